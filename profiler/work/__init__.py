"""What a step must do: FLOPs and bytes, counted from the module tree."""

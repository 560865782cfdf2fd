"""What the device can do: its datasheet, and its roofs as measured in this run."""

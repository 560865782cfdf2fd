"""Count FLOPs and bytes of a step from the module tree, and cross-check them with a second counter."""

"""FLOPs and bytes of a step, from the module tree, and the cross-check against a second counter."""

"""Load models: resolve a name, then build the checkpoint or random weights in the requested precision and device."""

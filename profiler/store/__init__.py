"""The run folder: append, fsync, resume."""

"""CUDA cards of known truth: the whole profiler runs on them without a GPU (README.md)."""

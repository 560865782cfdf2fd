"""The cells of a run: prompt lengths x batch sizes, and the grammar of ranges."""

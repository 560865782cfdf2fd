"""Which cells are asked for: prompt lengths x batch sizes, and the range grammar."""

"""Compare runs or other tools' results cell by cell: the `compare` and `gate` commands."""

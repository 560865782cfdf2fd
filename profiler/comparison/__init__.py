"""`compare` and `gate`: two runs, or other tools' results, cell by cell."""

"""Times of cells that were not measured, from a run's own facts, with a cross-validated error."""

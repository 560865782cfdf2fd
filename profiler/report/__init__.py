"""Terminal output, pages, tables and pictures, rendered from a run folder only."""

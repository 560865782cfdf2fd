"""What people look at, rendered from a run folder alone: tables, pictures, pages."""

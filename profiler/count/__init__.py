"""`count`: FLOPs, bytes and memory of a step or of a grid, as text, tables and JSON; nothing runs."""

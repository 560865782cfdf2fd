"""Measured and counted values, as a run folder stores them; nothing here imports torch."""

"""Values that are measured or counted, as a run folder keeps them; nothing here imports torch."""

"""`rent`: which GPU to rent for a model, and what it costs."""

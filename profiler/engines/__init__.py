"""How a model is stepped."""

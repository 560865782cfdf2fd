"""A model's name -> the model, loaded: its checkpoint or random weights, in its precision, on its device."""

"""`doctor`: check that this installation works."""

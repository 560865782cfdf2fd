"""Quantisation formats: how each is loaded, stored, counted and converted."""

"""Engines: ways to run the steps of a model."""

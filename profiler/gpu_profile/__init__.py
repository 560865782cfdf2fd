"""Profiles of GPUs: kernels and dispatch measured without a model, and forecasts of models that never ran there."""

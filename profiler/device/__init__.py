"""The only door to CUDA, the clock, memory, telemetry and process groups."""

"""Measured ceilings of a device: compute, memory, links, and the drift probe."""

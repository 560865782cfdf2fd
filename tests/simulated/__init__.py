"""CUDA cards of known truth: the whole profiler runs on them without a GPU. They price every call and compute nothing.

Tensors on `cuda` have an address but no memory. The card's truth gives the price of every aten operator, and a
simulated host keeps the time. Tests compare the profiler's output with the truth.

Python (`mode`, `pricing`) works out the effect of a call once. C++ (`cpp`) answers later calls with the same
layout, and simulates the card, its memory and the host's clock.
"""

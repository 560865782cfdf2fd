"""CUDA cards of known truth, on which the whole profiler runs without a GPU: nothing computes, everything has a price.

Tensors on `cuda` have an address and no memory. The card's truth gives the price of every aten operator, and time is
that of a simulated host. The profiler's output can then be compared with the truth.

The effect of a call is worked out once, in Python (`mode`, `calls`, `pricing`). C++ (`cpp`) answers later calls with
the same layout, and simulates the card, its memory and the host's clock.
"""

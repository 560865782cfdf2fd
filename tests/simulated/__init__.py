"""CUDA cards of known truth, on which the whole profiler runs without a GPU: nothing computes, everything has a price.

Tensors on `cuda` have an address and no memory behind it, every operator of aten is priced by the card's truth, and
time is that of a simulated host. What the profiler then says can be held against what is so.

What a call does is worked out once, in Python (`mode`, `calls`, `pricing`); calls that lie alike are answered in C++
(`cpp`), as are the card, its memory and the host's clock.
"""

"""CUDA cards of known truth, on which the whole profiler runs without a GPU: nothing computes, everything has a price.

Tensors on `cuda` are torch's fake ones, every operator of aten is priced by the card's truth, and time is that of a
simulated host. What the profiler then says can be held against what is so.
"""

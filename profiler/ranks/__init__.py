"""A run of several processes that share one model (tensor parallelism): the group, the shares, and the run itself."""

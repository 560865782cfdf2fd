"""What a step took: engines that run it, samples of its time, and the sweep over a grid."""

"""Parts of a step measured alone: its dispatch, its kernels, what happens inside."""

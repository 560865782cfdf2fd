"""The commands' bodies: what a run, a count or a self-test does, from request to result."""

"""From facts to verdicts: the time breakdown, regimes, changes, scaling, the answer; pure functions."""

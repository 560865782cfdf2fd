"""From facts to verdicts: the time breakdown, regimes, levers, scaling, the answer; pure functions."""

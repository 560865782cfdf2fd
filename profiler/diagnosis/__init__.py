"""What the counts, roofs and times mean. Pure: numbers in, verdicts out; no torch, no clock, no disk."""

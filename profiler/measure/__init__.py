"""Timing passes: the sweep, overhead, replays, traces and trials of changes."""

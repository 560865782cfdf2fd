"""Timing passes: the sweep, overhead, replays, traces and variants that are tried."""

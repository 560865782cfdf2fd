"""Timing passes: the sweep, dispatch, replays, traces and variants that are tried."""

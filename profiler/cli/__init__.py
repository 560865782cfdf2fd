"""The command line."""

from profiler.cli.app import main

__all__ = ["main"]

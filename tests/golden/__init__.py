"""Whole screens of commands, as they were last reviewed: `python -m tests.golden` writes them anew."""

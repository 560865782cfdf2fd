"""Whole screens of commands, as last reviewed: `python -m tests.golden` writes them again."""

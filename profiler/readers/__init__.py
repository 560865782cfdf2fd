"""Readers of other tools' result files, one per file format."""

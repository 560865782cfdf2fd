"""The groups of checks of `acceptance.py`, one a file: each says in `attempts` what it tries, in which order."""

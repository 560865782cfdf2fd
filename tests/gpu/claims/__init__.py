"""The groups of checks of `acceptance.py`, one per file: `attempts` lists what each tries, in order."""

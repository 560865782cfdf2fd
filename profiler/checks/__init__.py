"""`doctor` and `selftest`: whether this installation works and its verdicts are right."""

"""`doctor` and `selftest`: check that this installation works, and that its verdicts are right."""

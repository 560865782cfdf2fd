"""`why`: run a script unmodified, find what makes it slow, and try the fixes."""

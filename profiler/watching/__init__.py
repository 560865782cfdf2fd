"""What a user's own script does, seen as it happens: the calls of its models, their loads, and its text work."""

"""`place`: compare another tool's figures with the ceilings of a GPU."""

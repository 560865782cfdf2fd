"""`place`: compare another tool's figures with the roofs of a GPU."""

"""`place`: another tool's figures under the roofs of a GPU."""

"""Other tools' result files, one format a file, told apart by what is in them."""

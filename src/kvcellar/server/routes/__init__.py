"""One module per protocol."""

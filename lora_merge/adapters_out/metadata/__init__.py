"""The entries that an output says of itself."""

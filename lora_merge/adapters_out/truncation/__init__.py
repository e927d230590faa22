"""The best factors of a given rank."""

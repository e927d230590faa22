"""What a base is."""

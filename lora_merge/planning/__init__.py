"""Every output tensor gets its origin and its place."""

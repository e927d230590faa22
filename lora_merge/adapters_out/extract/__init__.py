"""The difference of two checkpoints as an adapter."""

"""The tensors of an adapter."""

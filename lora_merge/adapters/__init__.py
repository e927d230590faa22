"""Groups the tensors of an adapter into modules."""

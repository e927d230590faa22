"""Planning: origin and place of every output tensor."""

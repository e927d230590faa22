"""Pages about what the program did or saw: the content is made from its JSON."""

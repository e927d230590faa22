"""Facts in words: the rows that text, terminals and pages show."""

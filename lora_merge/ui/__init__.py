"""A page on the loopback interface for everything that the command line does with files."""

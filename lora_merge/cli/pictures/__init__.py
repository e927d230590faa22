"""Pictures on a terminal, and the files of --html and --plot."""

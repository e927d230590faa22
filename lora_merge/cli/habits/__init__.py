"""What people type from habit: options and spellings of other programs, each answered with the right form."""

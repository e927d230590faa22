"""What PEFT asks of a folder."""

"""What PEFT's configuration says."""

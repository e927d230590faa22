"""The content of PEFT's configuration."""

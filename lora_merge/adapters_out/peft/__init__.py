"""The demands of PEFT on a folder."""

"""python -m lora_merge."""

from .cli import main

main()

"""Whether this Python can run the checks as it is: `python -m tests.gpu.ready`; says what is missing.

A machine with a GPU often has a torch of its own, and no package index.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Final

NEEDED: Final = ("torch", "safetensors", "typer", "rich", "tqdm", "yaml", "pydantic", "numpy", "ml_dtypes", "filelock",
                 "platformdirs", "threadpoolctl", "typing_extensions", "pytest", "hypothesis")  # fmt: skip


def lacking() -> str:
    """Return what is missing; "" if nothing is."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if "torch" not in missing:
        import torch

        if not torch.cuda.is_available():
            return f"its torch, {torch.__version__}, finds no CUDA device"
    return f"it has no {', '.join(missing)}" if missing else ""


def main() -> int:
    """Say what is missing; 0 if nothing is."""
    why = lacking()
    print(f"{sys.executable}: {why}" if why else f"{sys.executable} is used as it is", file=sys.stderr)
    return int(bool(why))


if __name__ == "__main__":
    sys.exit(main())

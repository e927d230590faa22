"""The files of the package, and the libraries that it may import."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]


PACKAGE = ROOT / "lora_merge"


LIBRARIES = {
    "typing_extensions": {"memory", "adapters_out", "", "face"},
    "yaml": {"files", "models", "planning", "batch"},
    "torch": {"engine", "adapters_out", "memory", "files", "viewing", "cli"},
    "numpy": {"proof", "adapters", "engine", "adapters_out", "cli"},
    "typer": {"cli"},
    "tqdm": {"cli", ""},
    "plotly": {"viewing"},
    "matplotlib": {"viewing"},
    "rich": {"cli"},
    "pydantic": {"batch"},
    "ray": {"batch"},
    "filelock": {"disk"},
    "platformdirs": {"disk"},
    "safetensors": {"proof"},
    "threadpoolctl": {"proof"},
    "ml_dtypes": {"proof"},
}
"""Library → the rooms that may import it, at the top of a file or inside a function."""

"""The files of the package, and the libraries that it may import."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


PACKAGE = ROOT / "lora_merge"


@cache
def syntax(path: Path) -> ast.Module:
    """The syntax tree of a module, read once for all laws."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of the syntax tree of a module."""
    return tuple(ast.walk(syntax(path)))


LIBRARIES = {
    "typing_extensions": {"memory", "adapters_out", "", "face"},
    "yaml": {"files", "models", "planning", "batch"},
    "torch": {"engine", "adapters_out", "memory", "files", "viewing", "cli"},
    "numpy": {"proof", "adapters", "engine", "adapters_out", "cli"},
    "typer": {"cli"},
    "tqdm": {"cli", "", "sources"},
    "plotly": {"viewing"},
    "matplotlib": {"viewing"},
    "rich": {"cli"},
    "pydantic": {"batch"},
    "ray": {"batch"},
    "filelock": {"disk", "sources"},
    "platformdirs": {"disk", "sources"},
    "huggingface_hub": {"sources"},
    "obstore": {"sources"},
    "fsspec": {"sources"},
    "safetensors": {"proof"},
    "threadpoolctl": {"proof"},
    "ml_dtypes": {"proof"},
    "starlette": {"ui"},
    "uvicorn": {"ui"},
}
"""Library → the rooms that may import it, at the top of a file or inside a function."""

HOSTS = {name: {"comfyui"} for name in ("comfy", "comfy_api", "folder_paths", "nodes", "PIL")}
"""Library of the program that a room runs in, or that it brings → the rooms that may import it."""

"""The command `comfyui install`, and `comfyui export`: the node pack for ComfyUI."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from ..paths import expand
from .help import add
from .reports import echo


def add_to(app: typer.Typer) -> None:
    """Add this command to the application."""
    add(app, comfyui, "comfyui install ~/ComfyUI", "comfyui export registry")


def comfyui(
    action: Annotated[
        Literal["install", "export"],
        typer.Argument(metavar="install|export", help="Into ComfyUI; or the folder for its registry."),
    ],
    path: Annotated[str, typer.Argument(metavar="PATH", help="ComfyUI's folder; or where to write the folder.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace another version of the pack.")] = False,
) -> None:
    """Write the node pack for ComfyUI.

    `install` writes it into ComfyUI's custom_nodes, `export` writes the folder lora-merge for the registry.
    """
    from ..comfyui.pack import custom_nodes, write

    if action == "export":
        echo(f"written {write(expand(path), overwrite=overwrite)}")
        return
    echo(f"installed {write(custom_nodes(expand(path)), overwrite=overwrite)}; restart ComfyUI, search for lora-merge")

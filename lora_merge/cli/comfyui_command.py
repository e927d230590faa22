"""The commands `comfyui install` and `comfyui export`: the node pack for ComfyUI."""

from __future__ import annotations

from typing import Annotated

import typer

from ..paths import expand
from .help import CommandGroup, GroupedCommand
from .reports import echo

OVERWRITE = Annotated[bool, typer.Option("--overwrite", help="Replace another version of the pack.")]


def add_to(app: typer.Typer) -> None:
    """Add these commands to the application."""
    group = typer.Typer(cls=CommandGroup, help="Install the node pack for ComfyUI, or write its folder.")
    for command in (install, export):
        group.command(cls=GroupedCommand)(command)
    app.add_typer(group, name="comfyui")


def install(
    path: Annotated[str, typer.Argument(metavar="PATH", help="ComfyUI's folder, or its custom_nodes.")],
    overwrite: OVERWRITE = False,
) -> None:
    """Write the node pack into ComfyUI's custom_nodes; restart ComfyUI afterwards."""
    from ..comfyui.pack import custom_nodes, write

    echo(f"installed {write(custom_nodes(expand(path)), overwrite=overwrite)}; restart ComfyUI, search for lora-merge")


def export(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Folder to write the folder lora-merge into.")],
    overwrite: OVERWRITE = False,
) -> None:
    """Write the folder of the pack, ready for ComfyUI's registry."""
    from ..comfyui.pack import write

    echo(f"written {write(expand(folder), overwrite=overwrite)}")

"""The command `ui`: the page on the loopback interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UsageError
from .argument_values import whole_number
from .help import add
from .options import with_options
from .reports import echo

if TYPE_CHECKING:
    from ..ui.previews import Previews


def add_to(app: typer.Typer) -> None:
    """Add this command to the application."""
    add(app, ui, "ui ~/ComfyUI", "ui models loras --output-folder merged")


@with_options()
def ui(
    folders: Annotated[
        list[str] | None,
        typer.Argument(metavar="FOLDER...", help="Folders with models: ComfyUI's, A1111's, Forge's, or any."),
    ] = None,
    output_folder: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Write outputs into this folder. Default: the first.")
    ] = None,
    port: Annotated[str, typer.Option(metavar="N", help="Use this port of 127.0.0.1; 0: a free one.")] = "0",
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")] = True,
) -> None:
    """Open a page for these commands in the browser.

    Only files below the folders are read or written. Ctrl-C ends it; what runs is then removed.
    """
    try:
        from ..ui.server import Server
    except ModuleNotFoundError as e:
        fix = "pip install starlette uvicorn"
        raise UsageError("the page needs starlette and uvicorn", "lora-merge ui", fix) from e
    from ..ui.library import Library

    library = Library(folders or ["."], output_folder)

    def previews() -> Previews:
        from ..ui.previews import Previews
        from ..ui.runs import Queue
        from ..viewing.pages.page import drawable

        return Previews(library, Queue(pictures=drawable()))

    server = Server(library, previews, whole_number(port, "--port"))
    echo(f"open     {server.address}")
    echo("end      Ctrl-C")
    if browser:
        import webbrowser

        webbrowser.open(server.address)
    server.run()

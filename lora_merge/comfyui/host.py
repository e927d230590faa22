"""What the pack uses of ComfyUI: node types, model folders, progress and cancel. Only this module imports it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

import folder_paths
import nodes
from comfy import model_management
from comfy.utils import ProgressBar
from comfy_api.latest import ComfyExtension, io, ui
from PIL.Image import Image

from .. import Step
from ..paths import ENDINGS
from ..progress import StageSum

__all__ = ["ComfyExtension", "io", "ui"]

CHECKPOINTS: Final = ("checkpoints", "diffusion_models", "text_encoders")
"""ComfyUI's model folders that have bases."""

ANY: Final = ("*", "COMFY_MATCHTYPE_V3")
"""Types of outputs that may be anything: those of reroutes and switches."""

LORAS: Final = ("loras",)
"""ComfyUI's model folders that have adapters."""

WEIGHTS: Final = (*ENDINGS, ".sft")
"""Endings of files with weights: ComfyUI's own lists lack .gguf."""


def files(kinds: tuple[str, ...]) -> list[str]:
    """Return the files of model folders, `extra_model_paths.yaml` included: `kind/name`, or names of a single kind."""
    named = ((kind, name) for kind in kinds for root in folders((kind,)) for name in _names(root))
    return sorted({name if len(kinds) == 1 else f"{kind}/{name}" for kind, name in named})


def folders(kinds: tuple[str, ...]) -> list[str]:
    """Return the paths of model folders that are there."""
    return [root for kind in kinds for root in folder_paths.get_folder_paths(kind) if Path(root).is_dir()]


def path(choice: str, kinds: tuple[str, ...]) -> Path:
    """Return the path of one of `files(kinds)`; ValueError if it is not there any more."""
    choice = Path(choice).as_posix()
    kind, name = (kinds[0], choice) if len(kinds) == 1 else choice.split("/", 1)
    for root in folders((kind,)):
        if name in _names(root):
            return Path(root, name)
    raise ValueError(f"{name} is not in ComfyUI's folder {kind!r}; refresh the list (R) and choose again")


def paths(kinds: tuple[str, ...]) -> list[Path]:
    """Return the paths of all files of model folders."""
    return [Path(root, name) for root in folders(kinds) for name in _names(root)]


def location(name: str, kind: str) -> Path:
    """Return the path for an output in ComfyUI's model folder; ValueError for a name that leads out of it."""
    roots = [Path(root) for root in folder_paths.get_folder_paths(kind)]
    root = next((root for root in roots if root.name == kind), roots[0])  # `unet` is the former name of a folder
    whole = Path(os.path.abspath(root / name.strip()))  # noqa: PTH100  # without following links
    if not name.strip() or not whole.is_relative_to(root) or whole == root:
        raise ValueError(
            f"the name {name!r} is not inside of ComfyUI's folder {kind!r}; write a name such as styles/ink"
        )
    return whole


def _names(root: str) -> Iterator[str]:
    """Yield the files with weights below a folder, as ComfyUI spells them."""
    for name in folder_paths.recursive_search(root, excluded_dir_names=[".git"])[0]:
        if name.lower().endswith(WEIGHTS):
            yield Path(name).as_posix()


def preview(text: str, draw: Callable[[], Image] | None) -> dict[str, Any]:
    """Return what a node shows: its report as text, and a picture of it, written into ComfyUI's folder for such files,
    if one can be drawn: the work of the node is done, whatever becomes of its picture."""
    shown: dict[str, Any] = ui.PreviewText(text).as_dict()
    if draw is not None:
        folder, name = Path(folder_paths.get_temp_directory()), f"lora-merge-{token_hex(8)}.png"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            draw().save(folder / name)
        except Exception as e:  # noqa: BLE001  # Pillow without fonts, a full disk, anything
            logging.getLogger(__name__).warning("lora-merge: no picture of the report: %s", e)
        else:
            shown["images"] = [{"filename": name, "subfolder": "", "type": "temp"}]
    return shown


class ComfyWorkflow:
    """What runs, with the nodes that other nodes make while it runs: ComfyUI's DYNPROMPT."""

    def __init__(self, dynprompt: Any) -> None:
        self._nodes = dynprompt

    def node(self, name: str) -> Mapping[str, Any] | None:
        """Return the `class_type` and the `inputs` of a node; None if there is no such node."""
        return self._nodes.get_node(name) if self._nodes.has_node(name) else None

    def gives_model(self, name: str, output: int) -> bool | None:
        """Return whether an output of a node is a model; None if it may be anything."""
        node = self.node(name)
        kinds = getattr(nodes.NODE_CLASS_MAPPINGS.get(node["class_type"]), "RETURN_TYPES", ()) if node else ()
        kind = kinds[output] if output < len(kinds) else ANY[0]
        return None if kind in ANY else bool(kind == "MODEL")


def search_words(words: tuple[str, ...]) -> dict[str, list[str]]:
    """Return the words by which people search for a node, as a field of its schema; none for a ComfyUI without it."""
    return {"search_aliases": [*words]} if "search_aliases" in io.Schema.__dataclass_fields__ else {}


class RunProgress:
    """ComfyUI's progress bar and cancel button for one run; called with each step.

    KeyboardInterrupt when the user cancels: that ends a run and leaves nothing behind.
    """

    def __init__(self) -> None:
        self._bar, self._sum = ProgressBar(1), StageSum()

    def __call__(self, step: Step) -> None:
        """Take a step."""
        if model_management.processing_interrupted():
            raise KeyboardInterrupt
        self._sum.add(step)
        if self._sum.total:
            self._bar.update_absolute(self._sum.done, self._sum.total)

    def __enter__(self) -> RunProgress:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        """Report a cancelled run to ComfyUI as cancelled, not as failed."""
        if isinstance(error, KeyboardInterrupt):
            model_management.throw_exception_if_processing_interrupted()

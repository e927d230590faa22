"""The folder of the node pack, as ComfyUI and its registry take it: this package, its nodes, licence and icon."""

from __future__ import annotations

import json
import shutil
from importlib import metadata
from pathlib import Path
from typing import Final

from .. import algorithms
from ..disk.publish import replacing
from ..errors import InputError

NAME: Final = "lora-merge"
"""The name of the folder, and of the pack in the registry."""

PACKAGE: Final = Path(__file__).parents[1]

REQUIRES: Final = ">=0.8.0"
"""The versions of ComfyUI: the first with all inputs that the nodes use."""

UNUSED: Final = shutil.ignore_patterns("__pycache__", "*.md")
"""What the pack does not need of the package."""

LEFT_OUT: Final = ("torch", "typer", "rich")
"""Requirements of the package that the pack does not state: torch is ComfyUI's, the others are for the command line."""

LOAD: Final = '''"""lora-merge: bakes LoRAs into checkpoint files, and combines, resizes, converts and extracts them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "package"))

from lora_merge.comfyui.nodes import comfy_entrypoint  # noqa: E402

__all__ = ["comfy_entrypoint"]
'''
"""The module of the pack that ComfyUI loads."""

README: Final = """# lora-merge for ComfyUI

Nodes that merge LoRAs into checkpoint files, and combine, resize, convert, extract, inspect and verify them. Files in,
files out: no model is loaded into memory, and every output is verified before it gets its name.

Search for `lora-merge` in the node list. "LoRA to merge" gives an adapter with its strengths; connect any number of
them to "Bake LoRAs into a checkpoint file". Outputs are written to ComfyUI's own model folders.
"""


def custom_nodes(path: Path) -> Path:
    """Return ComfyUI's folder for node packs, from its own folder or from that one; InputError for other folders."""
    for folder in (path / "custom_nodes", path, path / "ComfyUI" / "custom_nodes"):
        if folder.name == "custom_nodes" and folder.is_dir():
            return folder
    raise InputError(
        "no ComfyUI is in this folder", str(path), "give the folder that contains main.py and custom_nodes"
    )


def write(folder: Path, *, overwrite: bool = False) -> Path:
    """Write the pack into a folder that has no such pack yet, or another version of it; return its path.

    Raises UsageError if a folder of that name is there and `overwrite` is not set, or if it has other files.
    """
    target = folder / NAME
    small = {
        "__init__.py": LOAD.encode(),
        "README.md": README.encode(),
        "LICENSE": _licence(),
        "icon.svg": (PACKAGE / "comfyui" / "icon.svg").read_bytes(),
        "requirements.txt": "".join(f"{line}\n" for line in requirements()).encode(),
        "pyproject.toml": _project().encode(),
    }
    former = {path.relative_to(target).as_posix() for path in (target / "package").rglob("*") if path.is_file()}
    with replacing(target, overwrite=overwrite, folder=True, contents={*small, *former}) as part:
        for name, content in small.items():
            (part / name).write_bytes(content)
        package = part / "package" / "lora_merge"
        shutil.copytree(PACKAGE, package, ignore=UNUSED)
        shutil.rmtree(package / "algorithms", ignore_errors=True)  # a link to the formulas, or a text in its place
        (package / "algorithms").unlink(missing_ok=True)
        shutil.copytree(Path(str(algorithms.__file__)).parent, package / "algorithms", ignore=UNUSED)
    return target


def requirements() -> list[str]:
    """Return the requirements of the pack."""
    lines = [line for line in metadata.requires(NAME) or () if ";" not in line]
    return [line for line in lines if not line.startswith(LEFT_OUT)]


def _licence() -> bytes:
    files = metadata.files(NAME) or ()
    return next(Path(str(f.locate())) for f in files if f.name == "LICENSE").read_bytes()


def _project() -> str:
    about = metadata.metadata(NAME)
    home = next(url.partition(", ")[2] for url in about.get_all("Project-URL") or () if url.startswith("Homepage"))
    icon = f"{home.replace('github.com', 'raw.githubusercontent.com')}/main/lora_merge/comfyui/icon.svg"
    listed = json.dumps(requirements(), indent=2)
    return f"""[project]
name = {json.dumps(NAME)}
description = {json.dumps(about["Summary"])}
version = {json.dumps(about["Version"])}
license = {{ file = "LICENSE" }}
requires-python = {json.dumps(about["Requires-Python"])}
dependencies = {listed}
classifiers = ["Operating System :: OS Independent"]

[project.urls]
Repository = {json.dumps(home)}

[tool.comfy]
PublisherId = {json.dumps(NAME)}
DisplayName = "lora-merge"
Icon = {json.dumps(icon)}
requires-comfyui = {json.dumps(REQUIRES)}
"""

"""Recognises files that people pass by mistake: other formats by their first bytes, other networks by their keys."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from itertools import islice
from math import prod
from pathlib import Path
from typing import Final

from ..disk.files import open_regular
from ..dtypes import Shape
from ..errors import InputError, MergeError, UsageError
from ..grouping import by_key
from ..paths import ENDINGS, JOBS_ENDINGS, exists, nearest, typed
from ..text import listed, quoted
from .folder_layouts import FOLDER_CONFIGS, entries

MAGIC_BYTES: Final = (
    # first bytes       what it is                         what to do
    (b"PK\x03\x04", "a zip archive", "give the checkpoint inside it, or a torch file saved by torch.save"),
    (b"\x80\x02", "a Python pickle", "give the .safetensors version of the model"),
    (b"ggjt", "a GGML file (quantised)", "merge into the original 16-bit .safetensors checkpoint"),
    (b"version https://git-lfs", "a git-lfs pointer, not the model itself", "run `git lfs pull` in its folder"),
    ((b"<!DOCTYPE", b"<!doctype", b"<html"), "a web page",
     "download it again; the site wanted a login or an agreement"),
    (b"<?xml", "an XML document", "download the file again; the server sent an error message"),
    (b"\x89HDF", "an HDF5 file (Keras)", "give the PyTorch version of the model, as .safetensors"),
    (b"\x93NUMPY", "a NumPy array", "give a .safetensors checkpoint"),
    (b"\x1f\x8b", "a gzip archive", "unpack it first"),
    (b"7z\xbc\xaf", "a 7z archive", "unpack it first"),
    (b"Rar!", "a RAR archive", "unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive", "unpack it first"),
    ((b"\x89PNG", b"\xff\xd8\xff"), "a picture", "give a .safetensors checkpoint"),
    (b"{", "a JSON file", "give the .safetensors file or its folder"),
)  # fmt: skip
"""Formats that people pass instead of a checkpoint; used only for files without a valid header."""

LOAD_AT_GENERATION: Final = (
    "load it at generation time: this file contains no weight changes, so there is nothing to merge"
)

PIPELINE_PARTS: Final = {"vae": "VAE", "te": "text encoder"}
"""Role of a network that pipelines also load from a file of its own → what it is."""

CHECKPOINT_WITH: Final = "a checkpoint with "
"""The first words on a file whose main network is unknown, before the networks that are known."""

RIGHT_NAMES: Final = "name an adapter; to merge into this file, first give its tensors the names of its model"

NOT_REPLACED: Final = "load it at generation time: a merge does not replace the {} of a checkpoint"

TEXTUAL_INVERSION: Final = "an embedding (textual inversion)"

CLONEOFSIMO: Final = "a LoRA of cloneofsimo/lora, whose layers have numbers instead of names"

BY_ITS_PACKAGE: Final = (
    "merge it with `lora_add` of the package that wrote it (lora_diffusion), which knows the order of the layers, or "
    "take a version of it with names"
)

NUNCHAKU: Final = "weights or factors packed for the kernels of nunchaku (SVDQuant)"

TAKE_UNCONVERTED: Final = "give the file that it was converted from"

MOST_NAMES: Final = 20_000  # that are compared of a file that is not a state dict

LONGEST_FOREIGN_NAME: Final = 200  # characters of such a name
SEARCHED_LEVELS: Final = 3  # of dicts and lists in which such names are looked for

FOREIGN_KEYS: Final = (
    # a key looks so                                                     what the file is
    (r"lora_controlnet$",                                                "a Control-LoRA: factors of a ControlNet"),
    (r"lllite_",                                                         "a ControlNet-LLLite"),
    (r"(?:control_model\.|.*\binput_hint_block\.|.*\bcontrolnet_)",     "a ControlNet"),
    (r"control_(?:layers|noise_refiner)\.",                              "a ControlNet"),
    (r"(?:image_proj|ip_adapter(?:_proj_model)?)\.|.*\.ip_adapter_",     "an IP-Adapter"),
    (r"(?:adapter\.)?body\.\d+\.(?:resnets\.|block\d)",                 "a T2I-Adapter"),
    (r"redux_(?:up|down)\.",                                             "an image encoder (Flux Redux)"),
    (r"pulid_\w+\.",                                                     "an encoder of faces (PuLID)"),
    (r"(?:emb_params|clip_[lg])$|string_to_param\.",                     TEXTUAL_INVERSION),
    (r"\d+\.\d\.linear\d?\.",                                          "a hypernetwork"),
    (r".*\.processor\.(?:[qkv]|proj)_loras\.\d",                         "a LoRA for a condition (EasyControl)"),
    (r".*\.(?:lora_(?:down|up)|wscales|smooth_factor(?:_orig)?)$",       NUNCHAKU),
    (r"(?:unet|text_encoder):\d+:(?:up|down)$",                          CLONEOFSIMO),
)  # fmt: skip
"""Key pattern → what the file is: networks and embeddings that people take for adapters, the surest patterns first.
Used only for files without adapter tensors."""

COMPONENTS: Final = (
    # a key looks so                                                                  what the file is
    (r"(?:taesd_)?(?:en|de)coder\.(?:layers\.)?\d+\.(?:weight$|conv\.\d)",          "VAE (tiny, TAESD)"),
    (r"(?:first_stage_model\.|vae\.)?(?:en|de)coder\.conv(?:_in|_out|1)\.",           "VAE"),
    (r"(?:first_stage_model\.|vae\.)?(?:en|de)coder\.(?:down|up)(?:_blocks|samples)?\.\d", "VAE"),
    (r"(?:first_stage_model\.|vae\.)?(?:post_)?quant_conv\.",                          "VAE"),
    (r"model\.\d+\.sub\.\d+\.rdb\d|(?:model\.)?conv_first\.|body\.\d+\.rdb\d",      "upscaler (ESRGAN)"),
)  # fmt: skip
"""Key pattern → the component of a pipeline that a file of no known architecture is."""

TEXT_WIDTHS: Final = {768: "Stable Diffusion 1", 1024: "Stable Diffusion 2", 2048: "Stable Diffusion XL"}
"""Width of the text states that a U-Net's cross-attention reads → the model."""

READS_TEXT: Final = re.compile(r"\.attn2\.to_k\.weight$|\.to_k_ip\.weight$")

TEXT_BYTES: Final = bytes(range(32, 127)) + b"\t\r\n"
"""Bytes of plain text."""

LONGEST_BEGINNING: Final = 2**16  # bytes of a text in which its fields are looked for


MERGEKIT: Final = frozenset({"merge_method", "models", "slices"})
"""Fields that a mergekit configuration begins with."""


def foreign(keys: Iterable[str]) -> str:
    """Return what a file without adapter tensors is; "" if its keys do not show it."""
    keys = [*keys]
    tokens = {*keys} - {"weight", "bias"}  # or names of encoders
    of_tokens = TEXTUAL_INVERSION if tokens and not any("." in key for key in tokens) else ""
    return _by_keys(FOREIGN_KEYS, keys) or of_tokens


def _by_keys(signs: Sequence[tuple[str, str]], keys: Sequence[str]) -> str:
    """Return what the first pattern that any key matches says; "" if none does."""
    return next((what for pattern, what in signs if any(map(re.compile(pattern).match, keys))), "")


def component(shapes: Mapping[str, Shape]) -> str:
    """Return the component of a pipeline that a file is by its keys; "" if they do not show it, or if most of its
    values are below other levels than those keys."""
    elements = Counter[str]()
    for key, shape in shapes.items():
        elements[key.partition(".")[0]] += prod(shape)
    levels = {key.partition(".")[0] for key in shapes if _by_keys(COMPONENTS, [key.lower()])}
    most = 2 * sum(elements[level] for level in levels) >= elements.total()
    return _by_keys(COMPONENTS, [key.lower() for key in shapes]) if most else ""


def network_for(shapes: Mapping[str, Shape]) -> str:
    """Return the model of Stable Diffusion that a ControlNet, an IP-Adapter or an embedding is for, by the width of
    the text states that it reads; "" if no shape shows it."""
    widths = {shape[-1] for key, shape in shapes.items() if READS_TEXT.search(key)}
    if not widths and foreign(shapes) == TEXTUAL_INVERSION:
        widths = {shape[-1] for shape in shapes.values() if shape}
        widths = {2048} if widths == {768, 1280} else widths
    return TEXT_WIDTHS.get(widths.pop(), "") if len(widths) == 1 else ""


def instead(what: str) -> str:
    """Return what to do with such a file."""
    if what.startswith(CHECKPOINT_WITH):
        return RIGHT_NAMES
    if part := next((part for part in PIPELINE_PARTS.values() if part in what), ""):
        return NOT_REPLACED.format(part)
    return BY_ITS_PACKAGE if what == CLONEOFSIMO else TAKE_UNCONVERTED if what == NUNCHAKU else LOAD_AT_GENERATION


def are_factors(loaded: Sequence[object]) -> bool:
    """Return whether a list of tensors is up, down, up, down …, as in the first files of cloneofsimo/lora."""
    shapes = [tuple(getattr(t, "shape", ())) for t in loaded]
    pairs = [*zip(shapes[::2], shapes[1::2], strict=False)]
    return len(shapes) == 2 * len(pairs) > 0 and all(len(a) == len(b) == 2 and a[1] == b[0] for a, b in pairs)


def nested(value: object) -> Iterator[str]:
    """Yield the names of values in nested dicts and lists: `SEARCHED_LEVELS` levels deep, at most `MOST_NAMES` names.

    A container that occurs several times is searched once.
    """
    visited: set[int] = set()
    return islice(_nested(value, "", SEARCHED_LEVELS, visited), MOST_NAMES)


def _nested(value: object, name: str, depth: int, visited: set[int]) -> Iterator[str]:
    entries = dict.items(value) if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not depth or id(value) in visited:
        return
    visited.add(id(value))
    for key, inner in entries:
        if isinstance(key, str | int):
            yield f"{name}{str(key)[:LONGEST_FOREIGN_NAME]}"
            yield from _nested(inner, f"{name}{str(key)[:LONGEST_FOREIGN_NAME]}.", depth - 1, visited)


def is_mergekit(fields: Collection[str]) -> bool:
    """Return whether a table with these fields is a mergekit configuration, not a jobs file."""
    return "jobs" not in fields and not MERGEKIT.isdisjoint(fields)


def model_as_jobs(where: str) -> UsageError:
    """Return the error for a model in the place of a jobs file."""
    fix = "one merge needs no file: `lora-merge BASE ADAPTER:0.8`"
    return UsageError("this is a model, not a jobs file", where, fix)


def of_mergekit(where: str) -> UsageError:
    """Return the error for a mergekit configuration."""
    return UsageError(
        "a mergekit configuration: mergekit merges checkpoints with each other, lora-merge merges adapters into one",
        where,
        "run mergekit-yaml; or write the change of each checkpoint as an adapter with lora-merge extract, and merge "
        "these; for adapters alone use lora-merge combine or lora-merge average",
    )


def top_fields(path: Path) -> set[str]:
    """Return the names at the beginnings of the first lines of a YAML file, which is not parsed for that."""
    with open_regular(path) as file:
        text = file.read(LONGEST_BEGINNING).decode(errors="replace")
    return {*re.findall(r"(?m)^(\w+) *:", text)}


def not_weights(path: Path) -> UsageError:
    """Return the error for a text file in the place of weights: a mergekit configuration, or a jobs file."""
    if is_mergekit(top_fields(path)):
        return of_mergekit(str(path))
    return UsageError(
        "this is a jobs file, not a model or an adapter",
        str(path),
        f"write `lora-merge batch {typed([nearest(str(path))])}`",
    )


def begins_with(start: bytes, magic: bytes | tuple[bytes, ...]) -> bool:
    """Return whether a file begins with the first bytes of another format than safetensors, whose header of 0x…0280
    bytes begins like a pickle; the brace after its length shows which it is."""
    return start.startswith(magic) and start[4:9] != b"\0\0\0\0{"


def refusal(path: Path, start: bytes, size: int, why: str) -> MergeError:
    """Return the error for a file of `size` bytes that begins with `start` and is not a safetensors file."""
    if path.suffix.lower() in JOBS_ENDINGS:
        return not_weights(path)
    if size == 0:
        return InputError("the file is empty", str(path), "download or export it again")
    if not any(start):
        return InputError("the file contains only zeros", str(path), "download it again; it was never completed")
    for magic, what, fix in MAGIC_BYTES:
        if begins_with(start, magic):
            return InputError(f"not a .safetensors file but {what}", str(path), fix)
    if not start.strip(TEXT_BYTES):
        why = f"it is text, {quoted(start.decode('ascii'))}"
    kind = path.suffix if path.suffix in ENDINGS else ".safetensors"
    return InputError(f"not a valid {kind} file", f"{path}: {why}", "download or export the file again")


class Choice:
    """Which files of a folder may be meant by the name of one that is missing: all."""

    kind = "model"
    """What is missing."""

    complete = True
    """Whether every file was looked at."""

    folders_first = False
    """Whether model folders come before files."""

    def of(self, files: Iterable[Path], *, alike: bool) -> list[Path]:
        """Return those of some files that may be meant. `alike`: whether their names are like the missing one."""
        return [*files]


def missing(path: Path, choice: Choice | None = None) -> InputError:
    """Return the error for a file that is not there, with the names of files that may be meant."""
    choice = choice or Choice()
    if path.is_symlink():
        return InputError("a broken symbolic link", str(path), "download the model again")
    # A folder of the path is missing.
    if not path.parent.is_dir():
        folder = next((p for p in path.parents if p.is_dir()), Path())
        lost, *rest = path.relative_to(folder).parts
        near = difflib.get_close_matches(lost, [entry.name for entry in entries(folder) if entry.is_dir()], 1)
        meant = f"; did you mean {folder.joinpath(*near, *rest)}?" if near else ""
        return InputError("file not found", str(path), f"check the path: there is no folder {lost} in {folder}{meant}")
    # A pattern, which a shell did not expand.
    if set(path.name) & set("*?[") and any(fnmatch(entry.name, path.name) for entry in entries(path.parent)):
        fix = f'name each file; in a jobs file write matrix: {{lora: {{glob: "{path}"}}}} and adapters: ["{{lora}}"]'
        return InputError("a pattern, and not a file", str(path), fix)
    if set(path.name) & set("*?"):
        return InputError(f"no file matches {path.name}", str(path), "name one file; check its ending")
    # Names like this one; without them, what else is in the folder.
    alike = {*ENDINGS, path.suffix, path.suffix.lower()}
    near_ones = (entry for entry in entries(path.parent) if entry.suffix in alike or entry.is_dir())
    stems = by_key((entry.stem, entry.name) for entry in near_ones)  # endings would make all names alike
    close = [stem for stem in stems if stem.lower() == path.stem.lower()]
    close = close or difflib.get_close_matches(path.stem, stems, n=3, cutoff=0.6)
    near = [name for stem in close for name in sorted(stems[stem], key=lambda n: Path(n).suffix != path.suffix)]
    files = choice.of(map(path.with_name, near), alike=True)[:3]
    if files:
        error = InputError("file not found", str(path), f"did you mean {', '.join(file.name for file in files)}?")
        return error.instead(str(path), str(files[0]))
    return InputError(
        "file not found", str(path), "; ".join(filter(None, ("check the path", in_folder(path.parent, choice))))
    )


def in_folder(folder: Path, choice: Choice) -> str:
    """Return which files a folder has that may be meant, in words; "" if there may be others."""
    if files := candidates(folder, choice):
        return f"its folder has {listed(file.name for file in files)}"
    return f"its folder has no {choice.kind}" if choice.complete else ""


def candidates(folder: Path, choice: Choice) -> list[Path]:
    """Return the files and model folders of a folder that may be meant; files that are never run as code come first."""
    files = [entry for entry in entries(folder) if entry.suffix in ENDINGS and not entry.is_dir()]
    files.sort(key=lambda file: ENDINGS.index(file.suffix))
    folders = [f for f in entries(folder) if f.is_dir() and any(exists(f / name) for name in FOLDER_CONFIGS)]
    return choice.of([*folders, *files] if choice.folders_first else [*files, *folders], alike=False)

"""What people pass instead of a .safetensors file, told by its first bytes, or instead of an adapter, by its keys."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from .errors import InputError

MAGIC: Final = (
    # first bytes       what it is                         what to do
    (b"PK\x03\x04", "a zip archive", "give the checkpoint inside it, or a torch file saved by torch.save"),
    (b"\x80\x02", "a Python pickle", "give the .safetensors version of the model"),
    (b"GGUF", "a GGUF file (quantised)", "merge into the original 16-bit .safetensors checkpoint"),
    (b"ggjt", "a GGML file (quantised)", "merge into the original 16-bit .safetensors checkpoint"),
    (b"version https://git-lfs", "a git-lfs pointer, not the model itself", "run `git lfs pull` in its folder"),
    (b"<!DOCTYPE", "a web page", "download it again; the site wanted a login or an agreement"),
    (b"<!doctype", "a web page", "download it again; the site wanted a login or an agreement"),
    (b"<html", "a web page", "download it again; the site wanted a login or an agreement"),
    (b"<?xml", "an XML document", "download the file again; the server sent an error message"),
    (b"\x89HDF", "an HDF5 file (Keras)", "give the PyTorch version of the model, as .safetensors"),
    (b"\x93NUMPY", "a NumPy array", "give a .safetensors checkpoint"),
    (b"\x1f\x8b", "a gzip archive", "unpack it first"),
    (b"7z\xbc\xaf", "a 7z archive", "unpack it first"),
    (b"Rar!", "a RAR archive", "unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive", "unpack it first"),
    (b"\x89PNG", "a picture", "give a .safetensors checkpoint"),
    (b"\xff\xd8\xff", "a picture", "give a .safetensors checkpoint"),
    (b"{", "a JSON file", "give the .safetensors file or its folder"),
)  # fmt: skip
"""What people pass instead of a checkpoint. Asked only after the bytes failed to be a header."""


BESIDE: Final = (
    "load it beside the model when that runs; it changes none of the model's weights, so nothing can be merged"
)

FOREIGN: Final = tuple(
    (re.compile(pattern), what)
    for pattern, what in (
        # a key looks so                                                  what the file is
        (r"lora_controlnet$",                                             "a Control-LoRA: factors of a ControlNet"),
        (r"lllite_",                                                      "a ControlNet-LLLite"),
        (r"(?:control_model\.|.*\binput_hint_block\.|.*\bcontrolnet_)",   "a ControlNet"),
        (r"(?:image_proj|ip_adapter)\.",                                  "an IP-Adapter"),
        (r"(?:emb_params|string_to_param|clip_[lg])$",                    "an embedding (textual inversion)"),
        (r"\d+\.\d\.linear\d?\.",                                       "a hypernetwork"),
    )
)  # fmt: skip
"""What people take for an adapter though it is a network of its own or no change of weights. Asked only of a file in
which nothing is an adapter's."""


def foreign(keys: Iterable[str]) -> str | None:
    """What a file without adapter tensors is, if one of its keys tells."""
    found = (what for key in keys for pattern, what in FOREIGN if pattern.match(key))
    return next(found, None)


def refusal(path: Path, start: bytes, size: int, why: str) -> InputError:
    """The error for a file of `size` bytes that begins with `start` and is no safetensors file."""
    if size == 0:
        return InputError("the file is empty", str(path), "download or export it again")
    if not any(start):
        return InputError("the file holds zeros", str(path), "download it again; it was never completed")
    for magic, what, fix in MAGIC:
        if start.startswith(magic) and start[4:9] != b"\0\0\0\0{":  # those are a damaged header's
            return InputError(f"not a .safetensors file but {what}", str(path), fix)
    return InputError("not a valid .safetensors file", f"{path}: {why}", "download or export the file again")


def quoted(name: str, limit: int = 120) -> str:
    """A name out of a file, safe to print: quoted, control characters escaped, cut to `limit`."""
    return ascii(name) if len(name) <= limit else ascii(name[:limit]) + "…"

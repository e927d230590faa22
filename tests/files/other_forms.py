"""Stored forms of the formats that no library in the tests writes."""

from __future__ import annotations

import lzma
from pathlib import Path

from safetensors.torch import load as load_bytes

from tests.kit.tensors import Tensors


def stored() -> dict[str, Tensors]:
    """Format → the tensors of its layer."""
    found: dict[str, Tensors] = {}
    packed = (Path(__file__).parent / "by_libraries.safetensors.xz").read_bytes()
    for name, value in load_bytes(lzma.decompress(packed)).items():
        form, _, last = name.partition("/")
        found.setdefault(form, {})[last] = value
    return found


FORMS = stored()

"""Keywords of other libraries, for advice."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

MEANT: Final[Mapping[str, str]] = MappingProxyType({
    **dict.fromkeys(("precision", "save_precision", "torch_dtype"), "dtype"),
    **dict.fromkeys(("out", "output_path", "output_dir", "output_file", "save_to"), "output"),
    **dict.fromkeys(("weight", "weights", "ratio", "ratios", "multiplier", "alpha", "lora_scale"), "strengths"),
    **dict.fromkeys(("force", "exist_ok"), "overwrite"),
})  # fmt: skip
"""Keyword of other libraries → the one of the same meaning here."""

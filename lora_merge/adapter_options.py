"""The table of the options that only commands which write adapters have; see options.py for its columns."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from .method_numbers import NAMES
from .options import OPTIONS, Option

ADAPTER_OPTIONS: Final[Mapping[str, Option]] = MappingProxyType({
    row.name: row
    for row in (
        Option("rank", "rule", None, "32, same, energy:0.99, fro:0.9, size:50MiB …", "given"),
        Option("conv_rank", "rule", None, "The rule for convolutions.", "given"),
        Option("max_rank", "whole", None, "A ceiling for every rule.", "given"),
        Option("rank_for", "rules", (), "The rule for a part.", "given"),
        Option("algorithm", "text", None, "lora, full (whole matrices) or auto.", "given"),
        Option("alpha", "rule", None, "rank (alpha = rank), keep, or a number.", "given"),
        Option("to", "text", None, "kohya, lycoris, onetrainer, comfy, diffusers or peft.", "given"),
        Option("include", "texts", (), "Only these: components, or re:REGEX.", "given"),
        Option("exclude", "texts", (), "Without these: components, or re:REGEX.", "given"),
        Option("others", "text", None, "What becomes of biases and norms that differ: diff, skip or error.", "given"),
        Option("format", "text", None, "The dialect of what is written.", "given"),
        Option("factor", "whole", None, "The smaller factor of lokr, as LyCORIS takes it.", "given"),
        Option("weights", "list", None, "One number for each snapshot; by default they are equal.", "given"),
        Option("ema", "number", None, "Exponential moving average.", "given"),
        Option("ema_to", "number", None, "Its last step; linear in between.", "given"),
        Option("sigma_rel", "number", None, "Width of a post-hoc EMA, up to 0.288.", "given"),
        Option("space", "text", None, "delta: average changes; factors: average the files' tensors.", "given"),
    )
})  # fmt: skip
"""Name → option."""

SHARED: Final = (
    "dtype", "strength_for", "unmatched", "map", "setting", "overwrite", "device", "max_memory", "max_vram", "verify",
    "compute_dtype", "include", "exclude",
)  # fmt: skip
"""The options that all these commands have."""

MADE: Final = ("rank", "conv_rank", "max_rank", "rank_for", "algorithm", "alpha")
"""The options for the form in which the layers of an output are stored."""

TAKES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType({
    "merge": tuple(name for name, option in OPTIONS.items() if option.in_batch),
    "unmerge": tuple(name for name, option in OPTIONS.items() if option.in_batch and name != "method"
                     and name not in NAMES),
    "combine": (*SHARED, "method", *NAMES, *MADE, "format"),
    "resize": (*SHARED, *MADE, "format"),
    "convert": (*SHARED, "to", *MADE),
    "extract": (*(n for n in SHARED if n not in ("strength_for", "setting")), *MADE, "others",
                "format", "factor"),
    "average": (*SHARED, "rank", "weights", "ema", "ema_to", "sigma_rel", "space", "format"),
})  # fmt: skip
"""Command of a jobs file → the options that it takes."""

WRITERS: Final = frozenset(TAKES) - {"merge", "unmerge"}
"""The commands that write adapters."""

"""The options that only commands which write adapters have, see options.py for the columns.

Each command takes them with a default of its own: recipes/commands.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from .options import Kind, Option

DIALECT_NAMES: Final = ("kohya", "lycoris", "onetrainer", "comfy", "ai-toolkit", "diffusers", "xlabs", "peft")
"""The dialects that adapters are written in, for help; a test compares them with the table of `adapters_out`."""

_FORMATS: Final = f"Write the format of {', '.join(DIALECT_NAMES[:-1])} or {DIALECT_NAMES[-1]}."

KEEP: Final = "keep"
"""The dialect, way to store layers or alpha that the input has."""


def _row(name: str, kind: Kind, metavar: str, text: str, words: tuple[str, ...] = ()) -> Option:
    default = () if kind in ("rules", "texts") else None
    return Option(name, kind, default, text, "given", words, metavar=metavar, group="Options")


ADAPTER_OPTIONS: Final[Mapping[str, Option]] = MappingProxyType({
    row.name: row
    for row in (
        _row("rank", "rule", "RULE", "Set the rank: 32, same, energy:0.99, fro:0.9, size:50MiB …"),
        _row("conv_rank", "rule", "RULE", "Set the rank of convolutions."),
        _row("max_rank", "whole", "N", "Limit the ranks that rules choose."),
        _row("rank_for", "rules", "PART=RULE", "Set the rank of a part, as in --strength-for; repeatable."),
        _row("algorithm", "name", "WAY", "Store layers as lora, full (whole matrices) or auto; extract: lokr too."),
        _row("alpha", "rule", "ALPHA", "Store this alpha: rank (alpha = rank), keep, or a number."),
        _row("to", "name", "FORMAT", f"{_FORMATS} [default: {KEEP}]"),
        _row("include", "texts", "PART", "Keep only these: unet, te1, IN04 … or re:REGEX of keys; repeatable."),
        _row("exclude", "texts", "PART", "Leave out these: unet, te1, IN04 … or re:REGEX of keys; repeatable."),
        _row("others", "text", "WHAT", "Store changes of biases and norms (diff), leave them out (skip), or stop. "
             "[default: diff]", ("diff", "skip", "error")),
        _row("format", "name", "FORMAT", _FORMATS),
        _row("factor", "whole", "N", "Set the smaller factor of lokr, as in LyCORIS. [default: -1, near the root]"),
        _row("weights", "list", "W,W…", "Weight the snapshots, one value for each. [default: equal]"),
        _row("ema", "number", "BETA", "Average exponentially with this decay."),
        _row("ema_to", "number", "BETA", "Change the decay to this value at the last step, linearly."),
        _row("sigma_rel", "number", "X", "Average by a post-hoc EMA of this width, up to 0.288."),
        _row("space", "text", "WHAT", "Average changes (delta) or tensors (factors). [default: delta]",
             ("delta", "factors")),
    )
})  # fmt: skip
"""Name → option."""

OF_MERGE: Final = (
    "dtype", "strength", "strength_for", "unmatched", "map", "setting", "cache", "overwrite", "device", "max_memory",
    "max_vram", "verify",
)  # fmt: skip
"""The options that mean what they mean for `merge`. All others of a command are fields of its `AdapterJob`."""

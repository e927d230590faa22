"""The options of the commands that write adapters: what they share with `merge` (OPTIONS), and a table of their own."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from ...methods import COMBINATIONS
from ...options import OPTIONS, Kind, Option


def _row(
    name: str, kind: Kind, metavar: str | None, text: str, short: str = "", group: str = "Options",
    words: tuple[str, ...] = (),
) -> Option:  # fmt: skip
    default = False if kind == "switch" else None
    return Option(name, kind, default, text, "never", short=short, metavar=metavar, group=group, words=words)


OWN: Final = MappingProxyType({
    row.name: row
    for row in (
        _row("output", "path", "PATH", "File to write.", "-o", "Output"),
        _row("base", "path", "BASE", "The model, where a formula or a name needs it."),
        _row("method", "text", "NAME", f"{', '.join([*COMBINATIONS][:3])}, dare … Default: sum.",
             words=(*COMBINATIONS,)),
        _row("conv_rank", "text", "RULE", "The rule for convolutions."),
        _row("max_rank", "whole", "N", "A ceiling for every rule."),
        _row("rank_for", "parts", "PART=RULE", "The rule for a part; repeatable."),
        _row("algorithm", "text", "WAY", "lora, full (whole matrices) or auto; extract: lokr too."),
        _row("alpha", "text", "ALPHA", "rank (alpha = rank), keep, or a number."),
        _row("format", "text", "FORMAT", "kohya, lycoris, onetrainer, comfy, ai-toolkit, diffusers, xlabs or peft."),
        _row("include", "parts", "PART", "Only these: unet, te1 … or re:REGEX of keys; repeatable."),
        _row("exclude", "parts", "PART", "Without these: unet, te1 … or re:REGEX of keys; repeatable."),
        _row("others", "text", "WHAT", "Biases, norms: diff, skip or error. Default: diff.",
             words=("diff", "skip", "error")),
        _row("factor", "whole", "N", "The smaller factor of lokr, as LyCORIS takes it. Default: -1, near the root."),
        replace(OPTIONS["dtype"], words=("keep", "fp32", "fp16", "bf16"), help="Of the output; keep: as the inputs."),
        replace(OPTIONS["compute_dtype"], default=None, words=("fp64", "fp32"),
                help="Numbers that formulas compute with. Default: fp64, or fp32 where that loses nothing."),
        _row("ema", "number", "BETA", "Exponential moving average."),
        _row("ema_to", "number", "BETA", "Its last step; linear in between."),
        _row("sigma_rel", "number", "X", "Width of a post-hoc EMA, up to 0.288."),
        _row("space", "text", "WHAT", "delta: average changes; factors: average tensors. Default: delta.",
             words=("delta", "factors")),
        _row("dry_run", "switch", None, "Plan only, from headers; write nothing.", group="Report"),
        _row("json", "switch", None, "Report as one JSON object on stdout.", group="Report"),
        _row("report", "path", "PATH", "Also write the JSON report to this file.", group="Report"),
        _row("html", "path", "FILE", "Also write a page to look at in a browser.", group="Report"),
        _row("plot", "path", "FILE", "Also draw it, as .png, .svg or .pdf.", group="Report"),
        _row("quiet", "switch", None, "No progress, no report; notes go to stderr.", "-q", "Report"),
        _row("verbose", "switch", None, "Name every layer.", "-v", "Report"),
    )
})  # fmt: skip
"""Name → option that `merge` does not have, or has with another help."""

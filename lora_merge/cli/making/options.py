"""The options of the commands that write adapters: what they share with `merge` (OPTIONS), what they alone have
(ADAPTER_OPTIONS), and here what only the command line has, or what stands for something else there."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from ...adapter_options import ADAPTER_OPTIONS
from ...methods import COMBINATIONS
from ...options import OPTIONS, Kind, Option


def _row(name: str, kind: Kind, metavar: str | None, text: str, short: str = "", group: str = "Report") -> Option:
    default = False if kind == "switch" else None
    return Option(name, kind, default, text, "never", short=short, metavar=metavar, group=group)


OWN: Final = MappingProxyType({**ADAPTER_OPTIONS} | {
    row.name: row
    for row in (
        _row("output", "path", "PATH", "File to write.", "-o", "Output"),
        _row("base", "path", "BASE", "The model, where a formula or a name needs it.", group="Options"),
        replace(OPTIONS["method"], default=None, words=(*COMBINATIONS,), metavar="NAME", group="Options",
                help=f"{', '.join([*COMBINATIONS][:3])}, dare … Default: sum."),
        replace(OPTIONS["dtype"], words=("keep", "fp32", "fp16", "bf16"), help="Of the output; keep: as the inputs."),
        replace(OPTIONS["compute_dtype"], default=None, words=("fp64", "fp32"),
                help="Numbers that formulas compute with. Default: fp64, or fp32 where that loses nothing."),
        _row("dry_run", "switch", None, "Plan only, from headers; write nothing."),
        _row("json", "switch", None, "Report as one JSON object on stdout."),
        _row("report", "path", "PATH", "Also write the JSON report to this file."),
        _row("html", "path", "FILE", "Also write a page to look at in a browser."),
        _row("plot", "path", "FILE", "Also draw it, as .png, .svg or .pdf."),
        _row("quiet", "switch", None, "No progress, no report; notes go to stderr.", "-q"),
        _row("verbose", "switch", None, "Name every layer.", "-v"),
    )
})  # fmt: skip
"""Name → option that `merge` does not have, or has with another help."""

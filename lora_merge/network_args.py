"""Settings of a formula that no tensor tells, from what kohya's and LyCORIS' trainers write into metadata.

`ss_network_args` (sd-scripts with LyCORIS) and `lycoris_config` (SimpleTuner) hold the arguments that the
user gave; what is not among them had its default. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from .algorithms import Algorithm
from .errors import InputError

ENTRIES: Final = ("ss_network_args", "lycoris_config")
NAMES: Final = ("algo", "rs_lora", "sig_type", "use_data_init")
"""Arguments that change what a stored tensor means."""

DYLORA_BLOCK: Final = 4
FIX: Final = "correct or remove this entry of the adapter's metadata"


def network_settings(row: Algorithm, metadata: Mapping[str, str], where: str) -> dict[str, Any]:
    """The row's settings among the network arguments, as their defaults' types; InputError for damaged ones."""
    given = _arguments(metadata, where)
    wanted = {name: row.settings[name] for name in NAMES if name in row.settings and name in given}
    return {name: _like(given[name], default) for name, default in wanted.items()}


def network_factor(row: Algorithm, metadata: Mapping[str, str], where: str) -> float:
    """By what the scale differs from α / r: LyCORIS trains DyLoRA with α over the number of blocks.

    lycoris/modules/dylora.py; a block has four ranks unless told otherwise. InputError for damaged arguments.
    """
    given = _arguments(metadata, where)
    if row.name != "lora" or str(given.get("algo", "")).lower() != "dylora":
        return 1.0
    size = str(given.get("block_size") or DYLORA_BLOCK)
    if not size.isdecimal() or int(size) < 1:
        raise InputError(f"block_size is {size[:40]!r}", where, FIX)
    return float(size)


def _arguments(metadata: Mapping[str, str], where: str) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for entry in ENTRIES:
        if entry in metadata:
            given |= _table(metadata[entry], f"{where}: {entry}")
    return given


def _table(text: str, where: str) -> dict[str, Any]:
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise InputError(f"the metadata is no JSON: {e}", where, FIX) from e
    if table is None:  # sd-scripts without arguments
        return {}
    if not isinstance(table, dict):
        raise InputError("the metadata is no table of arguments", where, FIX)
    return table


def _like(value: Any, default: Any) -> Any:
    """sd-scripts stores every argument as text: "True" for a flag."""
    if isinstance(default, bool):
        return str(value).strip().lower() in ("true", "1", "yes", "on")
    return str(value)

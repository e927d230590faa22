"""Settings of a formula that no tensor shows, from the metadata that kohya's and LyCORIS' trainers write.

`ss_network_args` (sd-scripts with LyCORIS) and `lycoris_config` (SimpleTuner) hold the arguments that the user gave.
All other arguments had their defaults, also arguments that the library's function does not read:
`lycoris.kohya.create_network` and `lycoris.create_lycoris` pass on different arguments (LyCORIS 4.1, kohya.py,
wrapper.py). The arguments that a preset gives to some kinds of layers always reach these layers. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from ..algorithms import Algorithm, Bounds
from ..errors import InputError
from ..text import Note, from_json, shown

READ_ARGUMENTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "ss_network_args": ("algo", "block_size", "bypass_mode", "rs_lora", "split_qkv"),
        "lycoris_config": ("algo", "block_size", "bypass_mode"),
        "lora_config": ("adapter_type",),  # Stable Audio 3, stable_audio_3/models/lora/model.py
    }
)
"""Metadata entry → its arguments that reach the layers and change the meaning of a stored tensor."""

MAPS: Final = ("module_algo_map", "name_algo_map")
"""Tables of a preset: kind or name of layers → their own arguments."""

BYPASS: Final = "bypass_mode"
"""The argument whose effect on a formula is its row's `Bypass`. DyLoRA leaves its scale out: `bypass_forward_diff` in
lycoris/modules/dylora.py."""

COLUMNS: Final = "dora-cols"
"""Beginning of Stable Audio 3's types of DoRA whose magnitude has a number for each input."""

SPLIT: Final = "split_qkv"
DYLORA: Final = "dylora"
DYLORA_BLOCK: Final = 4
BLOCK_RANKS: Final = Bounds(1, 2**31)
"""Allowed ranks of a block."""

CORRECT_ENTRY: Final = "correct or remove this entry of the adapter's metadata"


@dataclass(frozen=True)
class NetworkArguments:
    """The network arguments of a file that concern one formula."""

    settings: Mapping[str, Any]  # in the types of their defaults
    partial: frozenset[str]  # settings that a preset gives to some layers; the file does not say to which
    factor: float  # the scale is α / r times this
    turns_bias: bool  # whether the formula changes the bias too
    no_magnitude: bool = False  # whether the magnitude had no effect
    no_scale: bool = False  # whether neither α nor the rank had an effect: the scale is 1
    split: bool = False  # whether fused layers were trained as one LoRA each, every one with all of α
    has_arguments: bool = False
    bypass: bool = False  # whether bypass mode was on
    of_inputs: bool = False  # whether a magnitude has a number for each input
    note: Note | None = None  # for the user, on an unreadable entry that the formula does not need


def is_norm_limit(row: Algorithm, module: str, alpha: float | None, metadata: Mapping[str, str]) -> bool:
    """Return whether α of a rotation is the limit of its norm itself: by the names, in a file of neither LyCORIS nor
    sd-scripts."""
    if row.alpha_as_limit is None:
        return False
    start, value = row.alpha_as_limit
    of_others = metadata.keys().isdisjoint((*READ_ARGUMENTS, "ss_network_module"))
    return of_others and module.startswith(start) and alpha == value


def network_arguments(row: Algorithm, metadata: Mapping[str, str], where: str) -> NetworkArguments:
    """Return the arguments for a row of ALGORITHMS; InputError for damaged metadata that the row may depend on."""
    # Read the tables; a damaged one counts only if the formula may depend on it.
    tables, note = {}, None
    for name in [name for name in READ_ARGUMENTS if name in metadata]:
        try:
            tables[name] = _table(metadata[name], f"{where}: {name}")
        except InputError as e:
            if _may_depend(row, metadata[name]):
                raise
            note = Note(f"{e.what} ({name}); its formula takes nothing from there")
    arguments = {
        name: table[name] for entry, table in tables.items() for name in READ_ARGUMENTS[entry] if name in table
    }
    # Settings of the formula, and settings that only some layers have.
    settings = {name: _like(value, row.settings[name]) for name, value in arguments.items() if name in row.settings}
    partial = {name for table in tables.values() for name in _of_some_layers(table) if name in row.settings}
    # Arguments that change the meaning of the tensors.
    bypass = bool(_like(arguments.get(BYPASS, False), default=False))
    return NetworkArguments(
        settings,
        frozenset(partial),
        factor=_factor(row, arguments, where),
        turns_bias=bypass and row.bypass.with_bias,
        no_magnitude=bypass and row.bypass.no_magnitude,
        no_scale=bypass and _is_dylora(row, arguments),
        split=SPLIT in row.scale_words and arguments.get(SPLIT) == "True",  # sd-scripts accepts no other spelling
        has_arguments=bool(tables),
        bypass=bypass,
        of_inputs=str(arguments.get("adapter_type", "")).startswith(COLUMNS),
        note=note,
    )


def _may_depend(row: Algorithm, text: str) -> bool:
    """Return whether unreadable metadata may hold arguments that the row's formula depends on."""
    by_bypass = (row.bypass.with_bias or row.bypass.no_magnitude) and BYPASS in text.lower()
    by_settings = any(name in row.settings for names in READ_ARGUMENTS.values() for name in names)
    return by_bypass or by_settings or any(word in text.lower() for word in row.scale_words)


def _factor(row: Algorithm, arguments: Mapping[str, Any], where: str) -> float:
    """Return the ranks of a DyLoRA block, 4 by default, else 1. LyCORIS scales DyLoRA by α over the number of blocks
    (lycoris/modules/dylora.py)."""
    if not _is_dylora(row, arguments):
        return 1.0
    size = arguments.get("block_size") or DYLORA_BLOCK
    if (ranks := BLOCK_RANKS.number(size)) is None:
        raise InputError(f"block_size is {shown(size)!r}", where, CORRECT_ENTRY)
    return float(ranks)


def _is_dylora(row: Algorithm, arguments: Mapping[str, Any]) -> bool:
    return DYLORA in row.scale_words and str(arguments.get("algo", "")).lower() == DYLORA


def _of_some_layers(table: Mapping[str, Any]) -> Iterator[str]:
    preset = table.get("apply_preset")
    maps = [preset.get(name) for name in MAPS] if isinstance(preset, dict) else []
    for layers in maps:
        for arguments in layers.values() if isinstance(layers, dict) else ():
            yield from arguments if isinstance(arguments, dict) else ()


def _table(text: str, where: str) -> dict[str, Any]:
    try:
        table = from_json(text)
    except ValueError as e:
        raise InputError(f"the metadata is not JSON: {e}", where, CORRECT_ENTRY) from e
    if table is None:  # sd-scripts without arguments
        return {}
    if not isinstance(table, dict):
        raise InputError("the metadata is not a table of arguments", where, CORRECT_ENTRY)
    return table


def _like(value: Any, default: Any) -> Any:
    """Return a value in the type of the default, as LyCORIS reads it: all but "False" is on, also null and 0."""
    if isinstance(default, bool):
        return str(value).lower() != "false"
    return str(value)

"""What headers and configurations other than PEFT's say about the change: alpha, scale, rank and variant. No torch.

Trainers keep the configuration of the network in plain entries of the header, in an entry of JSON, or in a JSON or YAML
file next to the adapter. `ENTRY_MEANINGS` is the one table of these entries. The rules are those on which SGLang,
diffusers and ComfyUI agree: α of a tensor wins; a stated α is a finite number and is divided by the rank of each
module's own tensors; it is not used if the ranks of a file differ and one bare number is stated. What could change
the merged weights and is not used is refused by its name. Tables in PEFT's own words are read as PEFT's configuration.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from ..errors import FitError, InputError, MergeError, UsageError
from ..files.checkpoint import Index
from ..files.side_texts import SideText, side_texts
from ..files.yaml_source import parse
from ..text import Note, from_json, is_finite, listed, shown
from .modules import SCALE_SLOTS, AdapterFile, Module, group
from .peft.rules import ADAPTER_METADATA, UNTYPED, PeftRules, by_component, rules

OTHER_ENTRIES: Final = (
    "ss_", "sshs_", "modelspec.",  # sd-scripts; musubi-tuner leaves ss_network_alpha if it folds α into the tensors
    "ot_", "training_info", "software",  # OneTrainer, which stores α; ai-toolkit
    "lycoris_config",  # SimpleTuner: kohya_args.py reads it
    "sd_merge_", "lora_merge", "mecha_recipe",  # programs that merge: of a change that they made already
    "prompt", "workflow",  # the graph of ComfyUI
    "format", ADAPTER_METADATA,
)  # fmt: skip
"""Beginnings of entries of a header that other modules read, or that describe the training and not the tensors."""

OWNERS: Final = frozenset(("lora", "loha", "lokr", "adapter", "network", "peft", "lycoris", "dora"))
"""Words of which the name of a table, an entry or a file has one if it describes an adapter."""

GENERAL: Final = frozenset(
    ("config", "training", "train", "trainer", "args", "params", "settings", "model", "metadata")
)
"""Names of tables that may describe anything."""

FACTOR_WORDS: Final = frozenset(("alpha", "alphas", "scale", "scales", "scaling", "multiplier"))
PART_WORDS: Final = OWNERS | {"unet", "transformer", "text", "encoder", "te", "denoiser", "weight", "delta", "pattern"}
VARIANT_WORDS: Final = frozenset(("dora", "rslora"))
ORDER_WORDS: Final = frozenset(("order", "interleaved", "permuted", "transposed"))
ROW_WORDS: Final = frozenset(("qkv", "kv", "row", "rows", "gate", "head", "heads"))
"""An unknown entry looks decisive if its name is of FACTOR_WORDS and PART_WORDS alone, has a word of FACTOR_WORDS and
of OWNERS, or one of VARIANT_WORDS, or of ORDER_WORDS and ROW_WORDS."""

MODEL_CONFIG_ENTRIES: Final = frozenset(("model_type", "_class_name", "architectures"))
"""Entries of a model's configuration, whose scales are the model's."""

DEEPEST: Final = 6  # levels of tables in a configuration
LONGEST_VALUE: Final = 20_000  # characters of a value in Python's notation
EMPTY_VALUES: Final = ("", "none", "null", "false", "[]", "{}", "set()")

STATE_ALPHA: Final = (
    "state what the training used: `--setting lora_alpha={}`, which is divided by the rank of each module"
)
REMOVE: Final = "merge with the program that wrote it; if it has no effect on the weights, remove that entry"


class Meaning(Enum):
    """What an entry says, which decides what is done with it."""

    ALPHA = "used: scale = α / rank"
    SCALE = "used: the change is multiplied by it"
    ROOT = "used: scale = α / √rank"
    RANK = "compared with the rank of the tensors"
    DORA = "compared with the tensors, which must have a magnitude"
    INFORMATIVE = "not needed: the tensors show it, or hold its effect already"
    UNKNOWN = "refused if it could change the merged weights"


ENTRY_MEANINGS: Final[Mapping[str, Meaning]] = {
    **dict.fromkeys(("alpha", "lora_alpha", "network_alpha", "adapter_alpha"), Meaning.ALPHA),
    **dict.fromkeys(("scaling", "lora_scaling"), Meaning.SCALE),  # PEFT's α / r; mistral-finetune, model/args.py
    **dict.fromkeys(("use_rslora", "rslora", "use_rs_lora", "rs_lora"), Meaning.ROOT),
    **dict.fromkeys(("r", "rank", "dim", "lora_r", "lora_rank", "lora_dim"), Meaning.RANK),
    **dict.fromkeys(("network_rank", "network_dim", "adapter_rank", "adapter_dim"), Meaning.RANK),
    **dict.fromkeys(("use_dora", "dora", "dora_wd", "weight_decompose", "lora_decompose"), Meaning.DORA),
    # LyCORIS stores its α, and ai-toolkit trains without: alpha is then the rank (toolkit/lora_special.py)
    **dict.fromkeys(("linear_alpha", "conv_alpha"), Meaning.INFORMATIVE),
    **dict.fromkeys(("decompose_both", "wd_on_output"), Meaning.INFORMATIVE),  # the shapes show it
}  # fmt: skip
"""Name of an entry in small letters, without the levels above → its meaning."""


@dataclass(frozen=True)
class EntryTable:
    """The entries of one level of a header or a configuration."""

    place: str  # the beginning of an entry's place: "style.safetensors: training."
    level: str  # names of the levels above
    entries: Mapping[str, Any]
    header: bool = False
    file: str = ""  # name of the file next to the adapter
    certain: bool = True  # whether it belongs to this adapter
    damage: MergeError | None = None  # why its file cannot be read

    @property
    def is_pefts(self) -> bool:
        """Whether these are the fields of PEFT's configuration."""
        names = {key.rpartition(".")[2] for key in self.entries}
        return "peft_type" in names or {"r", "lora_alpha"} <= names

    @property
    def states_scale(self) -> bool:
        """Whether an entry is an alpha or a scale."""
        return any(meaning in (Meaning.ALPHA, Meaning.SCALE) for meaning, _, _ in self.read())

    @property
    def describes(self) -> bool:
        """Whether it describes an adapter: by its names, or because it states a rank."""
        names = (self.file, self.level, *self.entries)
        ranked = any(ENTRY_MEANINGS.get(key.lower()) is Meaning.RANK for key in self.entries)
        return self.header or ranked or any(_words(name) & OWNERS for name in names)

    @property
    def foreign(self) -> bool:
        """Whether its name is that of something else than an adapter, such as an optimizer."""
        return not (self.describes or _words(self.level) <= GENERAL)

    def read(self) -> Iterator[tuple[Meaning, str, Any]]:
        """Yield meaning, name and value of all entries that may decide and are not off."""
        for key, value in self.entries.items():
            meaning = ENTRY_MEANINGS.get(key.rpartition(".")[2].lower()) or (
                Meaning.UNKNOWN if _looks_decisive(key) else None
            )
            value = _value(value) if isinstance(value, str) else value
            off = value == 0 and _words(key).isdisjoint(FACTOR_WORDS)
            if meaning and meaning is not Meaning.INFORMATIVE and not off and str(value).lower() not in EMPTY_VALUES:
                yield meaning, key, value


@dataclass(frozen=True)
class Statement:
    """What the tables say about the scale of an adapter's modules."""

    numbers: Mapping[Meaning, Mapping[str, float]]  # place → number
    file: AdapterFile
    root: bool = False
    dora: str = ""  # place of the entry that switches it on
    problem: MergeError | None = None  # an entry that cannot be used for a scale
    variant: MergeError | None = None  # an entry of an unknown formula

    @cached_property
    def used(self) -> str:
        """The place of the number that is used; "" without one."""
        return next(iter({**self.numbers[Meaning.ALPHA], **self.numbers[Meaning.SCALE]}), "")

    @cached_property
    def settles(self) -> bool:
        """Whether it states a scale, or something that may be one."""
        return bool(self.used or self.problem)

    def alpha(self, rank: int) -> float | None:
        """Return α for a module of this rank; None if none is stated.

        InputError or FitError, with the setting that answers, where the tables do not settle it.
        """
        if self.problem is not None:
            raise self.problem
        if not self.used:
            return None
        alphas, scales = self.numbers[Meaning.ALPHA], self.numbers[Meaning.SCALE]
        factor = max(rank, 1) ** 0.5 if self.root else 1.0
        stated = {factor * value for value in alphas.values()} | {value * max(rank, 1) for value in scales.values()}
        first, where = f"{next(iter(alphas.values()), min(stated)):g}", _listed({**alphas, **scales})
        # All entries state one α, which is not 0.
        if max(stated) - min(stated) > 1e-6 * max(map(abs, stated)):
            raise InputError("the adapter's alpha is stated with several values", where, STATE_ALPHA.format(first))
        if stated == {0.0}:
            raise FitError("the adapter's alpha is stated as 0, and such an adapter changes nothing", where,
                           STATE_ALPHA.format("VALUE"))  # fmt: skip
        # It is stated for the rank of the tensors, of which there is one.
        ranks, of_tensors = self.numbers[Meaning.RANK], self.file.ranks
        tensors = listed(map(str, of_tensors))
        if alphas and len(of_tensors) > 1:
            raise InputError("one alpha is stated for modules of different ranks",
                             f"{where}; the tensors have ranks {tensors}", STATE_ALPHA.format(first))  # fmt: skip
        if any((value,) != of_tensors for value in ranks.values()):
            raise InputError("the rank that is stated with alpha is not the rank of the tensors",
                             f"{where}; {_listed(ranks)}; the tensors have {tensors}",
                             STATE_ALPHA.format(first))  # fmt: skip
        return min(stated)

    def check(self, module: Module) -> None:
        """Raise InputError if the module is of another formula than its tensors show."""
        if self.variant is not None:
            raise self.variant
        if self.dora and "magnitude" not in module.shared and {"up", "down"} <= module.slots.keys():
            what = "DoRA is switched on, and a module has no magnitude"
            raise InputError(what, f"{self.dora}; {module.where}", REMOVE)


def aside_remark(place: str) -> Note:
    """Return the remark on a scale that is stated at a place which not all programs read."""
    return Note(f"scaled by {Path(place).name}, as it was trained; a program that does not read it uses scale 1")


def rules_of(file: AdapterFile) -> PeftRules:
    """Return the rules that follow from an adapter's configuration and header; InputError for methods that cannot be
    merged. Tables in PEFT's words count in a file without α, and their rules are marked as `aside`."""
    index, where = file.index, str(file.path)
    config = index.config
    if config and "peft_type" not in config and UNTYPED.keys().isdisjoint(config):
        stated = any(ENTRY_MEANINGS.get(key.lower()) in (Meaning.ALPHA, Meaning.SCALE) for key in config)
        config = {} if stated or not MODEL_CONFIG_ENTRIES.isdisjoint(config) else config
    if config or ADAPTER_METADATA in index.metadata or not _lacks_alpha(file):
        return rules(config, where, index.metadata)
    table = next((t for t in _tables(file) if t.is_pefts and t.certain), None)
    return rules({}, where) if table is None else by_component(table.entries, table.place.rstrip(": ."), aside=True)


def statement(file: AdapterFile) -> Statement:
    """Return what the header of an adapter says about the scale of its modules, else the files next to it."""
    tables = [t for t in _tables(file) if t.damage or (t.entries and not (t.is_pefts and t.certain))]
    header = _read([table for table in tables if table.header], file)
    return header if header.settles else _read(tables, file)


def side_file(index: Index) -> Path | None:
    """Return the JSON or YAML file next to an adapter that states the scale of its modules; None without one."""
    sides = [] if "peft_type" in index.config else [*side_texts(index)]
    if not any(table.is_pefts or table.states_scale for side in sides for table in _of_side(side)):
        return None
    file = group(index)
    peft = rules_of(file)
    place = peft.fields.where if peft.aside or peft.components else statement(file).used
    return next((s.path for s in sides if place == str(s.path) or place.startswith(f"{s.path}: ")), None)


def _lacks_alpha(file: AdapterFile) -> bool:
    """Return whether the tensors of some module leave its scale open."""
    return any(m.shared.keys().isdisjoint(SCALE_SLOTS) and not m.slots.keys() <= {"diff"} for m in file.modules)


def _tables(file: AdapterFile) -> list[EntryTable]:
    """Return the tables of the header, then those of the files next to an adapter that leaves its scale open."""
    tables = [*_of_header(file.index)]
    if _lacks_alpha(file) and "peft_type" not in file.index.config:
        tables += [table for side in side_texts(file.index) for table in _of_side(side)]
    return tables


def _of_header(index: Index) -> Iterator[EntryTable]:
    """Yield the plain entries of a header, and the tables in its entries of JSON."""
    texts = {key: text for key, text in index.metadata.items() if not key.lower().startswith(OTHER_ENTRIES)}
    entries = {key: _value(text) if isinstance(text, str) else text for key, text in texts.items()}
    yield EntryTable(f"{index.path}: ", "", entries, header=True)
    for key in [key for key, value in entries.items() if isinstance(value, (dict, list)) and not _is_pattern(key)]:
        yield from _levels(entries[key], EntryTable(f"{index.path}: {key}.", key, {}, header=True))


def _of_side(side: SideText) -> Iterator[EntryTable]:
    """Yield the tables of a configuration; one without entries for a file that names alpha and cannot be read."""
    try:
        if side.unread:
            raise ValueError(side.unread)
        value = from_json(side.text) if side.path.suffix == ".json" else parse(side.text, str(side.path)).value
    except (ValueError, UsageError, InputError) as e:
        if re.search(r"(?:lora|network)_alpha", side.text):
            what = f"a configuration next to the adapter cannot be read: {getattr(e, 'what', e)}"
            damage = InputError(what, str(side.path), f"correct it, or {STATE_ALPHA.format('VALUE')}")
            yield EntryTable(f"{side.path}: ", "", {}, damage=damage)
        return
    if isinstance(value, dict) and not MODEL_CONFIG_ENTRIES.isdisjoint(value) and "peft_type" not in value:
        value = {key: inner for key, inner in value.items() if _words(str(key)) & OWNERS}
    for table in _levels(value, EntryTable(f"{side.path}: ", "", {}, file=side.path.stem, certain=side.certain)):
        if not table.foreign:
            yield table


def _levels(value: Any, level: EntryTable, depth: int = 0) -> Iterator[EntryTable]:
    """Yield a table and the tables inside it. `level`: its place and the names above it."""
    inside: list[tuple[EntryTable, Any]] = []
    if isinstance(value, dict):
        table = replace(level, entries={str(key): inner for key, inner in value.items()})
        yield table
        below = {} if table.is_pefts else table.entries
        inside = [
            (replace(level, place=f"{level.place}{key}.", level=f"{level.level} {key}"), v) for key, v in below.items()
        ]
    elif isinstance(value, list):
        inside = [(level, inner) for inner in value]
    for of, inner in inside if depth < DEEPEST else ():
        yield from _levels(inner, of, depth + 1)


def _read(tables: Sequence[EntryTable], file: AdapterFile) -> Statement:
    """Return what the entries of these tables state together."""
    numbers: dict[Meaning, dict[str, float]] = {m: {} for m in (Meaning.ALPHA, Meaning.SCALE, Meaning.RANK)}
    switches: dict[Meaning, str] = {}
    problem: MergeError | None = None
    variant: MergeError | None = None
    for table in tables:
        problem, entries = problem or table.damage, [*table.read()]
        for meaning, key, value in entries:
            place = table.place + key
            if meaning in (Meaning.ROOT, Meaning.DORA):
                switches.setdefault(meaning, place)
            elif meaning is Meaning.RANK and (not table.states_scale or not is_finite(value)):
                continue  # of another thing than the adapter
            elif meaning is Meaning.UNKNOWN and _words(key).isdisjoint(FACTOR_WORDS):
                what = "an entry next to the adapter's tensors may mean a formula unknown to lora-merge"
                variant = variant or InputError(what, f"{place} = {shown(value)}", REMOVE)
            elif meaning is Meaning.UNKNOWN or not is_finite(value) or not (table.describes and table.certain):
                harmless = meaning is Meaning.UNKNOWN and value == 1  # a scale of 1 is that of no scale
                problem = problem or (None if harmless else _refusal(table, key, value, file))
            elif meaning in numbers:
                numbers[meaning][place] = float(value)
    root, dora = (switches.get(kind, "") for kind in (Meaning.ROOT, Meaning.DORA))
    return Statement(numbers, file, bool(root), dora, problem, variant)


def _refusal(table: EntryTable, key: str, value: Any, file: AdapterFile) -> InputError:
    """Return the error for an entry that may give the scale and is not used."""
    what = "an entry may give the adapter's scale, but its meaning is unknown"
    if not table.certain:
        what = "alpha is stated next to several adapters, and may be that of another one"
    elif key.rpartition(".")[2].lower() in ENTRY_MEANINGS and not is_finite(value):
        what = "the adapter's alpha is stated, but not as a finite number"
    fix = STATE_ALPHA.format("VALUE")
    if is_finite(value) and len(file.ranks) == 1:
        rank, factor = file.ranks[0], _words(key) & {"alpha", "alphas"}
        other = "" if factor else f", if it multiplies the change, or {rank} if it does not"
        fix = STATE_ALPHA.format(f"{value if factor else value * rank:g}") + other
    return InputError(what, f"{table.place}{key} = {shown(value)}", fix)


def _looks_decisive(key: str) -> bool:
    """Return whether an entry that no table knows may change the merged weights."""
    words = _words(key.rpartition(".")[2])
    factors = words & FACTOR_WORDS and (words <= FACTOR_WORDS | PART_WORDS or words & OWNERS)
    return bool(factors or words & VARIANT_WORDS or (words & ORDER_WORDS and words & ROW_WORDS))


def _words(name: str) -> frozenset[str]:
    """Return the words of a name, in small letters: of `networkAlpha` network and alpha."""
    return frozenset(word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name))


def _listed(places: Mapping[str, float]) -> str:
    return listed(f"{place} = {value:g}" for place, value in places.items())


def _is_pattern(key: str) -> bool:
    return key.endswith("_pattern")  # of PEFT: its names are those of modules


def _value(text: str) -> Any:
    """Return the value of an entry's text in JSON or in Python's notation, a set as a list; else the text."""
    try:
        return from_json(text)
    except ValueError:
        pass
    try:
        value = ast.literal_eval(text) if len(text) <= LONGEST_VALUE else text
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text
    return sorted(map(str, value)) if isinstance(value, set) else value

"""The scale of a module, for the second reading: α / r of the tensors and the configuration.

A number is None if something that is not read here could change it: then only the plan knows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property
from math import isfinite
from typing import Any, Final, NamedTuple

from ...dtypes import StoredTensor
from .methods import METHOD_ROWS
from .modules import NUMBER_ROLES, Group
from .rows import PEFT_PREFIX

Number = Callable[[StoredTensor], float]

HEADER: Final = "lora_adapter_metadata"
"""Entry in which diffusers keeps PEFT's configuration: `transformer.r` and so on."""

ALPHA_ENTRIES: Final = ("alpha", "lora_alpha", "network_alpha")
"""Plain entries of a header that give α for all modules."""

SCALE_WORDS: Final = re.compile(r"alpha|scal|multiplier|rs_?lora", re.IGNORECASE)
"""Words in other entries of a header, and in the files next to it, with which only the plan knows α."""

TRAINING_ENTRIES: Final = ("ss_", "modelspec.", "ot_", "training_info", "prompt", "workflow", "lora_merge", "sd_merge_")
"""Beginnings of entries that describe the training, or what made the file: their alpha is in the tensors."""

ARGUMENT_ENTRIES: Final = ("ss_network_args", "lycoris_config")
"""Entries in which sd-scripts and SimpleTuner keep the arguments of the network, as JSON."""

CHANGES_ALPHA: Final = ("dylora", "rs_lora", "rslora", "split_qkv", "bypass_mode")
"""Words in those arguments that change what α means, unless the argument is off."""

ALPHA_OF_TYPE: Final = {"LORA": "lora_alpha", "LOHA": "alpha", "LOKR": "alpha", "IA3": ""}
"""peft_type → its field for α."""

PEFT_TYPES: Final = {*ALPHA_OF_TYPE, "BONE", *(m.type for m in METHOD_ROWS.values())}

OTHER_METHODS: Final = ("arrow_config", "use_qalora", "layer_replication", "ensure_weight_tying",
                        "alora_invocation_tokens", "monteclora_config", "velora_config", "runtime_config")  # fmt: skip
"""Fields of a LoRA configuration with which ΔW is not α / r · B A."""

PLAIN_STARTS: Final = (None, True, False, "gaussian", "eva", "orthogonal", "pissa", "olora")
SIMPLE: Final = re.compile(r"\^?(?:[\w-]|\.\*?|\\\.|\\d\+?|\[[\w-]+\])+\$?")
MOST_REPEATS: Final = 2
"""SIMPLE with so many `+`, or one `.*`, describes patterns whose time grows with the length of the text, or its square:
names, dots, few runs of digits, sets of characters."""

LONGEST_LOOSE_TEXT: Final = 150  # characters of a text that a pattern with `.*` is tried on
MOST_LOOSE: Final = 10  # patterns of a table that have `.*`
MOST_PATTERNS: Final = 100
"""Of one table: each is tried on each module, and Python caches some hundreds of compiled patterns."""


class AdapterTexts(NamedTuple):
    """What an adapter's files contain next to the values of its tensors."""

    config: Mapping[str, Any]
    metadata: Mapping[str, str]
    names: Collection[str]  # of the tensors
    side_texts: Callable[[], Iterable[str]]  # the texts of the JSON and YAML files next to it


class ModuleScales:
    """The numbers of one adapter's modules, from its configuration, its header and its α tensors."""

    def __init__(self, stored: AdapterTexts, settings: Mapping[str, Any], number: Number) -> None:
        # PEFT may have taken the factors' start out of a weight that the adapter's file holds
        self.keeps_base = any(".base_layer." in name for name in stored.names)
        self._stored, self._config, self._metadata = stored, stored.config, stored.metadata
        self._settings, self._number = settings, number
        self._simple: dict[int, bool] = {}  # `id` of a table of patterns → whether they are
        self._unread = any(_changes_alpha(self._metadata.get(name, "")) for name in ARGUMENT_ENTRIES)

    @cached_property
    def _stated(self) -> tuple[bool, float | None]:
        """Whether it is known which α is stated outside of the tensors, and that α, None without one."""
        entries = {
            name: text
            for name, text in self._metadata.items()
            if not name.startswith((*TRAINING_ENTRIES, *ARGUMENT_ENTRIES))
        }
        values = {entries.pop(name) for name in ALPHA_ENTRIES if name in entries}
        off = {name for name, text in entries.items() if text in ("", "None", "False", "{}")}
        others = any(SCALE_WORDS.search(f"{name} {text}") for name, text in entries.items() if name not in off)
        if others or len(values) > 1 or any(map(SCALE_WORDS.search, [] if values else self._stored.side_texts())):
            return False, None
        try:
            return True, next(map(float, values), None)
        except ValueError:
            return False, None

    @property
    def of_lycoris(self) -> bool:
        """Whether the header is of sd-scripts or LyCORIS."""
        return any(name in self._metadata for name in (*ARGUMENT_ENTRIES, "ss_network_module"))

    @cached_property
    def _header(self) -> dict[str, Any] | None:
        """PEFT's configuration as diffusers keeps it; None if it is not readable JSON."""
        try:
            entries = json.loads(self._metadata[HEADER])
        except (ValueError, RecursionError):
            return None
        return entries if isinstance(entries, dict) else None

    @cached_property
    def _models(self) -> Mapping[str, Mapping[str, Any]]:
        """Part of a pipeline, "" in a file of one model → its configuration in the header."""
        configurations: dict[str, dict[str, Any]] = {}
        for key, value in (self._header or {}).items():
            model, _, name = key.rpartition(".")
            configurations.setdefault(model, {"peft_type": "LORA"})[name] = value
        return configurations

    def stated(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return settings with the user's own values for them."""
        return {name: self._settings.get(name, value) for name, value in settings.items()}

    @property
    def turns(self) -> bool:
        """Whether the user says if square weights are [in, out]."""
        return "fan_in_fan_out" in self._settings

    @property
    def order(self) -> str:
        """The order of the rows of fused projections that the user states; "" for none."""
        return str(self._settings.get("row_order", ""))

    def configuration(self, stem: str) -> tuple[Mapping[str, Any], str] | None:
        """PEFT's configuration for a module, empty if it has none, and the module's path there; None if unknown."""
        if self._config:
            return self._config, stem.removeprefix(PEFT_PREFIX)
        if HEADER not in self._metadata:
            return {}, stem
        model = "" if self._models.keys() == {""} else stem.partition(".")[0]
        path = stem[len(model) + 1 :] if model else stem
        return (self._models[model], path) if model in self._models else None

    def config(self, stem: str) -> Mapping[str, Any]:
        """Return PEFT's configuration for a module; empty if it has none, or it is unknown."""
        return (self.configuration(stem) or ({}, ""))[0]

    def tokens(self, stem: str, count: int, rows: int) -> list[tuple[int, int, int]]:
        """Return (first token, the one behind the last, row of the stored values) for each run of a table's trained
        tokens; empty if the configuration does not give exactly one list of `count` of the table's `rows` tokens."""
        config, path = self.configuration(stem) or ({}, stem)
        value = config.get(
            "token_indices" if config.get("peft_type") == "TRAINABLE_TOKENS" else "trainable_token_indices"
        )
        if isinstance(value, dict) and len(value) > MOST_PATTERNS:
            return []
        lists = [v for k, v in value.items() if f".{path}".endswith(f".{k}")] if isinstance(value, dict) else [value]
        if len(lists) != 1 or not isinstance(lists[0], list) or len(lists[0]) != count:
            return []
        runs: list[tuple[int, int, int]] = []
        for at, token in enumerate(lists[0]):
            if type(token) is not int or not 0 <= token < rows:
                return []
            if runs and runs[-1][1] == token:
                runs[-1] = (runs[-1][0], token + 1, runs[-1][2])
            else:
                runs.append((token, token + 1, at))
        return runs

    def method(self, stem: str, *, stacked: bool = False) -> str | None:
        """Return the peft_type of a module's configuration, "" without one; None if its numbers are unknown here.

        `stacked`: the module is a LoRA of stacked experts, whose names may have levels of wrappers.
        """
        if self.configuration(stem) is None:
            return None
        config = self.config(stem)
        kind = str(config.get("peft_type", "LORA" if "lora_alpha" in config else "")).rpartition(".")[2].upper()
        odd = config and (kind not in PEFT_TYPES or any(config.get(name) for name in OTHER_METHODS))
        odd = odd or (not stacked and _holds_parameters(config, stem))
        odd = odd or config.get("init_lora_weights") not in PLAIN_STARTS or _is_tower(config)
        return None if odd or (not stacked and "base_layer" in stem) else kind

    def scale(self, group: Group) -> float | None:
        """Return the factor of ΔW; None if it is not known here. `methods.py` has those of its own families."""
        kind, stem = group.kind, group.stem
        method = self.method(stem)
        if kind in ("full", "full_rank", "peft_ia3") or (kind in METHOD_ROWS and kind != "lora_bias"):
            return 1.0
        if method is None or (self._unread and (kind != "loha" or "magnitude" in group.roles)):
            return None
        if kind == "ia3":
            return 1.0
        if kind == "lora_bias":
            return self._configured(group, method, 0) if method else None
        if "override" in group.roles:
            return self._number(group.roles["override"])
        rank = self._rank(group)
        return self._configured(group, method, rank) if method else self._plain(group, rank)

    def of_experts(self, group: Group, path: str, count: int) -> float | None:
        """Return α / r for the stacked factors of `count` experts; patterns match the parameter's path."""
        up, down = group.roles["up"].shape, group.roles["down"].shape
        if not len(up) == len(down) == 2 or up[1:] != down[:1] or down[0] % count:
            return None
        if self.method(group.stem, stacked=True) != "LORA":
            return None
        if self.config(group.stem).get("init_lora_weights") in ("pissa", "olora"):
            return None
        return self._configured(group, "LORA", down[0] // count, path)

    def limit(self, group: Group) -> float | None:
        """Return the α of a method's module; 0 without one, None if something may change it.

        The user's α counts if a scale is meant, not if α limits a rotation.
        """
        if self._unread or group.roles.keys() & NUMBER_ROLES - {"alpha"}:
            return None
        if not METHOD_ROWS[group.kind].has_scale and "alpha" not in group.roles:
            return 0.0
        alpha = self._alpha(group)
        return None if alpha is None and not self._knows_alpha(group) else alpha or 0.0

    def _plain(self, group: Group, rank: int) -> float | None:
        """Return α / r from the tensors, squared for early GLoRA; 1 without an α, and for two whole factors."""
        alpha = self._alpha(group)
        if not self._knows_alpha(group) or (alpha is not None and not isfinite(alpha)):
            return None
        whole = {"lokr/w1", "lokr/w2"} <= group.roles.keys()
        scale = alpha / rank if alpha and rank and not whole else 1.0
        early = group.kind == "glora" and group.roles["a1"].shape[:1] == (
            rank,
        )  # [r, in]: before LyCORIS 3, α / r twice
        return scale * scale if early else scale

    def _alpha(self, group: Group) -> float | None:
        if "alpha" in group.roles:
            return self._number(group.roles["alpha"])
        alpha = self._settings.get("lora_alpha")
        return float(alpha) if isinstance(alpha, (int, float)) else self._stated[1]

    def _knows_alpha(self, group: Group) -> bool:
        return "alpha" in group.roles or "lora_alpha" in self._settings or self._stated[0]

    def _rank(self, group: Group) -> int:
        """Return the rank of the factors; 0 if they have none."""
        sizes = group.shapes
        if group.kind == "glora":
            return min(sizes["a1"][:2], default=0)  # in which order depends on the layout
        if group.kind == "lokr":
            shape = sizes.get("w2_b", sizes.get("w1_b", ()))
        elif group.kind in ("lora_fused", "lora_blocks"):
            shape = sizes["up" if "up" in sizes else "up_0"][1:]
        elif group.kind.startswith("lora_stacked"):
            shape = sizes["down"][1:]
        else:
            shape = sizes["w1_b" if group.kind == "loha" else "down"]
        return shape[0] if shape else 0

    def _configured(self, group: Group, method: str, rank: int, path: str = "") -> float | None:
        """Return the scale by PEFT's configuration: LoRA's rank is that of its tensors, others' is configured."""
        config, path_of = self.configuration(group.stem) or ({}, "")
        path = path or path_of
        configured = config.get(ALPHA_OF_TYPE[method], 8) or self._settings.get("lora_alpha", 0)
        alpha = self._by_pattern(config, "alpha_pattern", path, configured)
        started = config.get("init_lora_weights") in ("pissa", "olora") and group.kind == "lora"
        whole = not rank or (started and rank == min(group.roles["up"].shape[0], group.roles["down"].shape[1]))
        if method != "LORA" or whole:  # PEFT may have cut the factors
            patterned = self._by_pattern(config, "rank_pattern", path, config.get("r", 8))
            if patterned is None:
                return None
            rank = int(patterned)
        if alpha is None or rank <= 0 or not ALPHA_OF_TYPE[method]:
            return None
        return alpha / (rank**0.5 if config.get("use_rslora") is True else rank)

    def _by_pattern(self, config: Mapping[str, Any], name: str, path: str, default: Any) -> float | None:
        """Return the number of the first pattern that fits a path; None if a pattern is not simple, or there are too
        many."""
        table = config.get(name)
        if not table:
            return _float(default)
        if not isinstance(table, dict):
            return None
        if id(table) not in self._simple:  # a table may be as long as its file, and is asked for every module
            self._simple[id(table)] = _are_simple(table)
        if not self._simple[id(table)] or (len(path) > LONGEST_LOOSE_TEXT and any("*" in key for key in table)):
            return None
        for key, value in table.items():
            if re.match(rf"(.*\.)?({key})$", path):
                return _float(value)
        return _float(default)

    def inputs_scaled(self, stem: str) -> bool | None:
        """Return whether PEFT's (IA)³ scales a module's inputs; None if that is not known here."""
        names = self.config(stem).get("feedforward_modules")
        if not isinstance(names, list) or len(names) > MOST_PATTERNS:
            return None
        return any(stem.endswith(str(name)) for name in names)


def _changes_alpha(text: str) -> bool:
    """Return whether network arguments may change what α means: one that does is on, or its place is not read."""
    if not any(word in text.lower() for word in CHANGES_ALPHA):
        return False
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        return True
    if not isinstance(table, dict):
        return True
    on = {name: value for name, value in table.items() if str(value).lower() != "false"}
    return any(word in str(on).lower() for word in CHANGES_ALPHA)


def _is_tower(config: Mapping[str, Any]) -> bool:
    """Return whether one tower of a two-tower model was trained alone: its names lack a level."""
    mapping = config.get("auto_mapping")
    name = str(mapping.get("base_model_class") or "") if isinstance(mapping, dict) else ""
    return "TextModel" in name or "VisionModel" in name


def _holds_parameters(config: Mapping[str, Any], stem: str) -> bool:
    """Return whether `target_parameters` may name a parameter of this module, so that its factors may be stacked."""
    names = config.get("target_parameters") or ()
    if not isinstance(names, list) or len(names) > MOST_PATTERNS:
        return bool(names)
    owners = [str(name).rpartition(".")[0] for name in names]
    return any(not owner or f".{stem}".endswith(f".{owner}") for owner in owners)


def _are_simple(patterns: Collection[Any]) -> bool:
    """Return whether the patterns are few and match in linear time, whatever the text."""
    if len(patterns) > MOST_PATTERNS:
        return False
    loose = sum("*" in str(pattern) for pattern in patterns)
    return loose <= MOST_LOOSE and all(is_simple(str(p)) for p in patterns)


def is_simple(pattern: str) -> bool:
    """Return whether a pattern matches in a time that grows little with the text, whatever that is."""
    return SIMPLE.fullmatch(pattern) is not None and pattern.count("+") + 2 * pattern.count("*") <= MOST_REPEATS


def _float(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value) else None

"""The meaning of a PEFT configuration for a merge: `rules(config, where, metadata)`. No torch.

A configuration is `adapter_config.json`, or in a file's header `lora_adapter_metadata` of diffusers;
adapters/network_settings.py finds those at other places. It decides what the tensors leave open. Without one the rules
are empty and the numbers in the file are used. Matching uses the rules so:

1. `stored_value(key)`: the meaning of a tensor that belongs to no algorithm: the new value of a parameter or of some
   of its rows, or a copy that is not needed. None for all other keys, which `suffixes.split` reads. A key that `split`
   does not know either, or a bare `.weight`, is a whole parameter that replaces the base's.
2. `algorithm(module, candidates)`: the row of ALGORITHMS for a module, out of the rows that its slots allow, or None
   for the first that fits. InputError if the tensors are of another method than the configuration.
3. `targets(module)`: the parameters that the module may change, best first; usually `<module>.weight`.
4. `scalars(algorithm, module, fitted shapes)`: `Scalar` fields, which replace those of `Algorithm.scalars_from`.
5. `settings(algorithm)`: the row's settings. Matching adds the setting `widest`: (out, in), each the largest over all
   weights that the adapter changes with this algorithm.
6. `shared(algorithm)`: slot → key of a tensor that the file has once for all modules. If the file lacks this tensor,
   `Algorithm.derive(fitted shapes, weight shape, settings)` computes it.

Module names may begin with the `base_model.model.` of PEFT's files. A row with `also_bias` changes the module's bias
too, with the same tensors, where the base has one. `fan_in_fan_out` is one sign of several for [in, out], and only
for square weights (matching/orientation.py). Sources: PEFT 0.21.2, tuners/*/{config,layer,model}.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, Literal

from ...algorithms import ALGORITHMS, Shapes
from ...errors import InputError
from ...files.folder_layouts import PEFT_PREFIX
from ...models.module_order import in_order
from ...models.prefixes import COMPONENTS, prefixed
from ...models.weights import WeightView
from ...row_ranges import RowNumbers
from ...text import Note, from_json
from .config import CONVERT, ORDER_OF, RETAKE, UNKNOWN_ORDER, PeftConfig, refuse
from .methods import MLX, PEFT_METHODS, SHARED_SLOTS_OF_ROW, PeftMethod, alpha_doubt, check_count, rank_doubt
from .target_parameters import WRAPPER, bare, is_layer, parameters, shared_kind

ADAPTER_METADATA: Final = "lora_adapter_metadata"
SHARED_PREFIX: Final = "base_model."

RENAMED: Final = "load the adapter with diffusers and save it again, or take `lora_adapter_metadata` out of its header"

NO_METHOD: Final = PeftMethod("")

PLAIN_LORA: Final = PEFT_METHODS["LORA"].algorithms[0]
"""The row for a file of PEFT without a configuration, of whose tensors only the rows of other trainers know all."""

UNTYPED: Final = {"lora_alpha": "LORA", "lora_parameters": MLX}
"""Field of a configuration without peft_type → its method."""

ALPHA_FIELDS: Final = ("lora_alpha", "alpha")
"""Fields for α of a configuration, by method."""

Kind = Literal["value", "copy", "ignored"]

BASE_LAYER: Final = "a copy of the base's own tensor"
TRAINED_TOKENS: Final = "rows of trained tokens"
_LEAF: Final = r"(?P<leaf>weight|bias|in_proj_weight|in_proj_bias)"
_TOKENS: Final = r"(?P<module>.*?)(?:\.token_adapter)?\.trainable_tokens"
_FORMS: Final[tuple[tuple[str, Kind, str], ...]] = (
    (r"(?P<module>.*)\.original_module\.(?P<leaf>.*)", "copy", "the untrained copy of a trained module"),
    (r"(?P<module>.*)\.modules_to_save\.(?:default\.)?(?P<leaf>.*)", "value", ""),
    (r"(?P<module>.*)\.ln_tuning_layers\.(?:default\.)?(?P<leaf>.*)", "value", ""),
    (rf"{_TOKENS}_delta(?:\.default)?(?P<leaf>)", "value", TRAINED_TOKENS),
    (rf"{_TOKENS}_original(?:\.default)?(?P<leaf>)", "ignored", "trained tokens before training"),
    (rf"(?P<module>.*?)(?:\.token_adapter)?\.base_layer\.{_LEAF}", "copy", BASE_LAYER),
    (r"(?P<module>.*)\.lora_(?P<leaf>velora_.*|monteclora_sampler\..*)", "ignored", "used in training only"),
)
STORED_VALUES: Final = tuple((re.compile(form, re.DOTALL), kind, why) for form, kind, why in _FORMS)
"""(pattern of the whole key, kind, why); the first match is used."""


@dataclass(frozen=True)
class StoredValue:
    """The meaning of a tensor that belongs to no algorithm.

    value:   replaces the base's `target`, or the `rows` of it in this order.
    copy:    an untrained copy of the base's tensor; more rows mean a vocabulary that was extended before training.
    ignored: not needed for a merge, for the reason in `why`.
    """

    kind: Kind
    target: str
    why: str = ""
    rows: RowNumbers | None = None


@dataclass(frozen=True)
class PeftRules:
    """The rules that follow from one configuration; see the top of this file."""

    fields: PeftConfig
    kind: str = ""  # peft_type; "" without a configuration
    components: Mapping[str, PeftRules] = field(default_factory=dict)  # diffusers: `transformer` → its rules
    layers: tuple[str, ...] = ()  # paths of all trained layers, for methods that count them
    ordered: bool = False  # whether `layers` are in the order of the model's code
    relatives: Mapping[str, Sequence[str]] = field(default_factory=dict)  # module → layers that share its basis
    layer_settings: Mapping[str, Mapping[str, object]] = field(
        default_factory=dict
    )  # module → settings that its place gives
    borrowed: bool = False  # the rules of a component that the file's names spell otherwise
    aside: bool = False  # from a place that PEFT's loaders do not read: α of a tensor and the user's α win

    @property
    def method(self) -> PeftMethod:
        """The row of PEFT_METHODS, an empty row without a configuration."""
        return PEFT_METHODS[self.kind] if self.kind else NO_METHOD

    @cached_property
    def _lengths(self) -> Sequence[int]:
        """The lengths of the components' names, the longest first."""
        return sorted({len(name) for name in self.components}, reverse=True)

    @property
    def fan_in_fan_out(self) -> bool:
        """Whether the last layer that PEFT wrapped has an [in, out] weight."""
        return self.fields.flag("fan_in_fan_out", default=False)

    @property
    def pair_slots(self) -> frozenset[str]:
        """The slots that every pair of LoRA factors of this configuration has next to the factors."""
        switches = self.method.switches
        return frozenset(slot for name, slot in switches.items() if self.fields.flag(name, default=False))

    def denies(self, slot: str) -> bool:
        """Return whether PEFT loads no tensor of a slot for these factors, as the flag for it is false."""
        switches = {} if self.borrowed or self.aside else self.method.switches
        return any(self.fields.get(name) is False for name, other in switches.items() if other == slot)

    def counting(self, modules: Sequence[str], model: str) -> PeftRules:
        """Return the rules with the modules in the order of the model's code, for methods that count layers."""
        if not self.method.counted:
            return self
        paths = sorted({bare(name) for name in modules})
        order = in_order(paths, model)
        return replace(self, layers=tuple(order or paths), ordered=order is not None)

    def of(self, module: str) -> PeftRules:
        """Return the rules for one module, which are those of its component if components have their own.

        A converted file may say `diffusion_model.`, or have no prefix, where its header says `transformer.`.
        """
        if not self.components:
            return self
        for length in self._lengths:
            if module[length : length + 1] == "." and module[:length] in self.components:
                return self.components[module[:length]]
        hint, path = prefixed(module)[-1]
        named = self.components.keys() & COMPONENTS.get(hint, ())
        if self.kind or len(named) != 1:
            return self
        component = self.components[named.pop()]
        return replace(component, fields=replace(component.fields, inside=module.removesuffix(path)), borrowed=True)

    def algorithm(
        self, module: str, candidates: Sequence[str], weight: WeightView | None = None, model: str = ""
    ) -> str | None:
        """Return the row of ALGORITHMS for a module on its weight; None for the first that fits. `model`: its type.

        InputError if no candidate is of this method, DoesNotFit if the orientation of stacked experts is unknown.
        """
        if not self.kind and module.startswith(PEFT_PREFIX):  # a file of PEFT without its configuration
            rows = [name for name in candidates if ALGORITHMS[name].in_peft != "never"]
            return next(iter(rows), PLAIN_LORA) if len(rows) < min(2, len(candidates)) else None
        if not self.kind or (len(candidates) == 1 and ALGORITHMS[candidates[0]].in_peft == "any"):
            return None
        rows = [name for name in candidates if name in self.method.algorithms]
        if candidates and not rows and (self.borrowed or self.aside):
            return None
        if candidates and not rows:
            what = f"peft_type is {self.kind}, the tensors are those of {' or '.join(candidates)}"
            fix = "put the adapter_config.json of this adapter next to it"
            raise InputError(what, f"{self.fields.where}: {module}", fix)
        return self.method.choose(self.fields, module, rows, weight, model)

    def targets(self, module: str) -> tuple[str, ...]:
        """Return the parameters that the module may change, best first, without PEFT's prefix and wrappers."""
        name = bare(module).replace(WRAPPER, "")
        return parameters(self.fields, module) or (f"{name}.weight", f"{name}.in_proj_weight")

    def scalars(self, algorithm: str, module: str, shapes: Shapes) -> Mapping[str, float]:
        """Return the scalars in the configuration. DoesNotFit if it contradicts the tensors, InputError if its
        patterns use other names than the file."""
        if self.borrowed and self.fields.get("alpha_pattern") and not is_layer(self.fields, module):
            where = f"{self.fields.where}: alpha_pattern has no entry for {module}"
            raise InputError("the file calls its modules by other names than its header does", where, RENAMED)
        method = self.method
        check_count(self.fields, method.counts.get(algorithm), module, shapes)
        if method.scale is None or algorithm not in method.algorithms:
            return {}
        return {"scale": method.scale(self.fields, module, algorithm, shapes)}

    @property
    def zero_alpha(self) -> str:
        """The field that gives an α of 0 to the whole adapter or a component; "" without one."""
        fields = [name for r in (self, *self.components.values()) for name in ALPHA_FIELDS if r.fields.get(name) == 0]
        return fields[0] if fields else ""

    def with_alpha(self, alpha: float) -> PeftRules:
        """Return the rules with another α in place of one of 0."""
        zeros = {name: alpha for name in ALPHA_FIELDS if self.fields.get(name) == 0}
        return replace(self, fields=replace(self.fields, values={**self.fields.values, **zeros}))

    def doubt(self, algorithm: str, module: str, shapes: Shapes) -> Note | None:
        """Return the remarks on a configured rank that the tensors do not have, or on one that diffusers does
        not read, on an alpha that the order of the configuration decides, and on the method; else None."""
        of_rank = rank_doubt(self.fields, algorithm, module, shapes) if self.method.doubts_rank else None
        of_alpha = alpha_doubt(self.fields, module)
        return Note("; ".join(filter(None, (of_rank, of_alpha, self.method.doubts(self.fields))))) or None

    def settings(self, algorithm: str, module: str = "") -> Mapping[str, object]:
        """Return the settings of the row, with the module's own, but without `widest`."""
        if algorithm not in self.method.algorithms:
            return {}
        known = ALGORITHMS[algorithm].settings
        values = {name: read(self.fields) for name, read in self.method.settings.items() if name in known}
        if self.method.counted and not self.fields.flag("save_projection", default=True):
            values["seed"] = self.fields.integer("projection_seed", 42) + self._number(module)
        return {
            **{name: value for name, value in values.items() if value is not None},
            **self.layer_settings.get(module, {}),
        }

    def is_shared(self, module: str) -> bool:
        """Return whether this is not a module but the prefix of the tensors that all modules share."""
        return f"{module}." == SHARED_PREFIX and bool(self.method.shared)

    def holds_for_all(self, key: str) -> bool:
        """Return whether a key without a known suffix names a tensor that several modules share."""
        stems = tuple(SHARED_PREFIX + name.partition("{")[0] for name in self.method.shared.values() if "{" in name)
        return bool(stems) and key.startswith((*stems, f"{SHARED_PREFIX}frod_s_size."))

    def shared(self, algorithm: str, module: str = "") -> Mapping[str, str]:
        """Return slot → key for the tensors that all modules share, or all modules of one kind or group."""
        group = self._group(module) if self.method.counted else 0
        names = {"kind": shared_kind(bare(module)), "group": group}
        return {
            slot: SHARED_PREFIX + name.format(**names) for slot, name in SHARED_SLOTS_OF_ROW.get(algorithm, {}).items()
        }

    def _group(self, module: str) -> int:
        """Return the number of the layer's vector in TinyLoRA; InputError if the order of the layers is unknown."""
        layers = len(self.layers) or 1
        groups = max(1, round(layers * (1 - self.fields.number("weight_tying", 0.0))))
        return min(self._number(module) // max(1, layers // groups), groups - 1) if groups > 1 else 0

    def _number(self, module: str) -> int:
        """Return the number of the layer in the order of the model's code."""
        if len(self.layers) != 1 and not self.ordered:
            raise refuse(self.kind, UNKNOWN_ORDER, ORDER_OF + CONVERT, f"{self.fields.where}: {module}")
        return self.layers.index(bare(module))

    def stored_value(self, key: str) -> StoredValue | None:
        """Return the meaning of a tensor that belongs to no algorithm; None for all others."""
        for pattern, kind, why in STORED_VALUES:
            if (match := pattern.fullmatch(key)) is None:
                continue
            module, leaf = match["module"], match["leaf"] or "weight"
            module = module.replace(".base_layer", "")
            if why == BASE_LAYER and leaf == "bias" and self.fields.text("bias", "none") != "none":
                return StoredValue("value", f"{module}.{leaf}")
            rows = self._tokens(bare(module)) if why == TRAINED_TOKENS else None
            return StoredValue(kind, f"{module}.{leaf}", "" if kind == "value" else why, rows)
        return None

    def _tokens(self, module: str) -> RowNumbers:
        """Return the row numbers of the embedding's trained tokens."""
        name = self.method.token_field
        value = self.fields.get(name)
        if isinstance(value, dict):
            ends = [module, *(module[dot.end() :] for dot in re.finditer(r"\.", module))]
            ends_in_table = [end for end in ends if end in value]
            value = value[ends_in_table[0]] if len(ends_in_table) == 1 else None
        if value is None:
            what = f"{name} does not say which rows of {module} were trained"
            raise InputError(what, self.fields.where, RETAKE)
        return self.fields.indices(name, value)


def rules(config: Mapping[str, Any], where: str, metadata: Mapping[str, str] = MappingProxyType({})) -> PeftRules:
    """Return the rules of a file with this configuration and header; InputError for methods that cannot be merged."""
    if not config and ADAPTER_METADATA in metadata:
        return _from_metadata(metadata[ADAPTER_METADATA], f"{where}: {ADAPTER_METADATA}")
    fields = PeftConfig(MappingProxyType({str(k): v for k, v in config.items()}), where)
    if not config:
        return PeftRules(fields)
    # The method, which must have a merged form.
    peft_type = fields.text("peft_type", next((kind for sign, kind in UNTYPED.items() if sign in config), ""))
    kind = peft_type.rpartition(".")[2].upper()  # some dumps have "PeftType.LORA"
    if kind not in PEFT_METHODS:
        what = f"peft_type {kind[:40]!r}" if kind else "a configuration without peft_type"
        raise refuse(what, "lora-merge does not support it", CONVERT, where)
    if refusal := PEFT_METHODS[kind].refuses:
        raise refuse(kind, *refusal, where)
    PEFT_METHODS[kind].check(fields)
    return PeftRules(fields, kind)


def _from_metadata(text: str, where: str) -> PeftRules:
    """Return the rules per component from the text that diffusers writes."""
    try:
        config = from_json(text)
    except ValueError as e:
        raise InputError(f"the configuration is not JSON: {e}", where, "save the file again") from e
    if not isinstance(config, dict):
        raise InputError("the configuration is not a JSON object", where, "save the file again")
    return by_component(config, where)


def by_component(config: Mapping[str, Any], where: str, *, aside: bool = False) -> PeftRules:
    """Return the rules per component; fields without a component hold for the whole file."""
    # The fields of each component.
    parts: dict[str, dict[str, Any]] = {}
    for key, value in config.items():
        component, _, name = key.rpartition(".")
        parts.setdefault(component, {})[name] = value
    read = {name: rules({"peft_type": "LORA", **part}, where) for name, part in parts.items()}
    read = {
        name: replace(r, aside=aside, fields=replace(r.fields, inside=f"{name}." if name else ""))
        for name, r in read.items()
    }
    whole = read.pop("", PeftRules(PeftConfig({}, where)))
    return replace(whole, components=read)

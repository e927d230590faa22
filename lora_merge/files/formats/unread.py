"""Quantised weights that no format reads: recognised by their tensors, metadata or configuration, and refused.

Often only a part of the model is quantised: the experts of gpt-oss, a text encoder. Such a part stays unchanged, and
an adapter of the other parts can be merged. Plain fp8 does not count as quantised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from ...dtypes import ITEM_BYTES, StoredTensor, spoken
from ...errors import FitError, InputError
from ...text import Note, from_json
from ..encodings.base import Packing, Tensors
from ..gguf.types import COPIED_TYPES, QUANTISED_TYPES
from . import packing_names
from .comfyui import LAYERS_ENTRY
from .quantization_config import section

SVDQUANT: Final = "SVDQuant (nunchaku)"

SIGNS: Final = {
    # a tensor's last name    format that has it
    "scaled_fp8":            "scaled fp8 (ComfyUI)",
    "scale_weight":          "scaled fp8 (ComfyUI, musubi)",
    "comfy_quant":           "ComfyUI's per-layer quantisation",
    "weight_scale_inv":      "block-scaled fp8 (DeepSeek, Qwen)",
    "weight_packed":         "compressed-tensors",
    "weight_zero_point":     "compressed-tensors",
    "weight_scale":          "scaled weights (compressed-tensors, FBGEMM, ModelOpt)",
    "SCB":                   "bitsandbytes int8",
    "absmax":                "bitsandbytes 4-bit",
    "bitsandbytes__nf4":     "bitsandbytes nf4",
    "bitsandbytes__fp4":     "bitsandbytes fp4",
    "pre_quant_scale":       "factors of its inputs (AWQ)",
    "act_pre_scale":         "factors of its inputs",
    "wscales":               SVDQUANT,
    "qweight":               "GPTQ or AWQ",
    "W_q":                   "HQQ",
    "codebooks":             "AQLM",
    "gate_up_proj_blocks":   "MXFP4",
    "_weight_qdata":         "torchao",
    "_data":                 "optimum-quanto",
    "_packed_params":        "torch.ao quantised modules",
}  # fmt: skip
"""Tensors next to quantised weights. https://github.com/comfyanonymous/ComfyUI comfy/ops.py,
transformers/quantizers, musubi-tuner modules/fp8_optimization_utils.py."""

SCALES_OF_DTYPES: Final = {
    "scale": ("SDNQ", frozenset(("F8_E4M3", "F8_E5M2", "I8", "U8"))),
    "scales": ("mlx", frozenset(("U32",))),
}
"""Last name of the scales next to a `weight` of these dtypes; norms use such names too. https://github.com/Disty0/sdnq"""

FP8_DTYPES: Final = frozenset(("F8_E4M3", "F8_E5M2"))

OF_OTHERS: Final = re.compile(r"input|output|act|logit|query|key|[kqv]_")
"""Parts of last names that show the scale of something else than the weight."""

NO_VALUE: Final = ("", "none", "null", "false")

ORDER_ENTRIES: Final = ("version", "checkpoint_format", "packing_format")
"""Entries of a section on quantisation on the order of the values."""

SHOWN_CHARACTERS: Final = 80
"""Characters of an entry of a configuration that a message shows."""

MERGE_UNQUANTISED: Final = "merge into the unquantised model"

LOAD_WITH_MODEL: Final = (
    "load the adapter together with the model, without a merge: nunchaku appends its factors to proj_down and "
    "proj_up, by"
    " update_lora_params; or merge into the unquantised model"
)
"""What to do instead of a merge into SVDQuant. https://github.com/nunchaku-tech/nunchaku."""

UNMARKED: Final = "nvfp4 without a mark: its scales may be in tiles (ComfyUI) or row after row (ModelOpt)"

GIVE_MARK: Final = (
    "give the folder with its config.json, or the file with ComfyUI's comfy_quant; or merge into the unquantised model"
)


def _states_something(text: str) -> bool:
    """Return whether an entry of the metadata has a value: neither none nor JSON without content."""
    if text.strip().lower() in NO_VALUE:
        return False
    try:
        return bool(from_json(text.encode()))
    except ValueError:
        return True


def _lists_layers(text: str) -> bool:
    """Return whether ComfyUI's entry names layers; what is no JSON counts as such."""
    try:
        entry = from_json(text.encode())
    except ValueError:
        return _states_something(text)
    return bool(entry.get("layers") if isinstance(entry, dict) else entry)


METADATA_FORMATS: Final[Mapping[str, tuple[str, Callable[[str], bool]]]] = MappingProxyType({
    LAYERS_ENTRY:            ("ComfyUI's quantisation", _lists_layers),
    "quantization_config":   (SVDQUANT, _states_something),
})  # fmt: skip
"""Entry of the metadata on quantised weights → (the format, whether a value of it shows that format).

These entries describe codes: an output without the codes of its base does not get them, an output with them keeps them,
and no user writes them (planning/header_entries.py).
"""


@dataclass(frozen=True)
class UnreadParts:
    """The quantised parts of a checkpoint that no format reads."""

    how: str = ""  # format and the tensor that shows it, for messages
    parts: frozenset[str] = frozenset()  # modules, or whole networks, with all below them; "" is the whole checkpoint

    @property
    def notes(self) -> tuple[Note, ...]:
        """Return a note for the user if a part is quantised."""
        return (Note(f"a part of the base is quantised and stays as it is: {self.how}"),) if self.parts else ()

    def holds(self, key: str) -> bool:
        """Return whether a tensor is in one of the parts."""
        while key and key not in self.parts:
            key = key.rpartition(".")[0]
        return key in self.parts

    def check(self, path: Path, dtype: str, changed: Iterable[str]) -> None:
        """Raise InputError if the merge changes quantised tensors, by an adapter or by another dtype."""
        if not self.parts:
            return
        fix = _instead(self.how)
        if any(map(self.holds, changed)):
            raise self._refusal(path, fix)
        if dtype != "keep":
            raise self._refusal(path, f"write `--dtype keep`, as what the adapter changes is not quantised; or {fix}")

    @contextmanager
    def blamed(self, path: Path) -> Iterator[None]:
        """Re-raise FitError as "the base is quantised": the adapter probably names a quantised module."""
        try:
            yield
        except FitError as e:
            if not self.parts:
                raise
            raise self._refusal(path, _instead(self.how), f"; {e.what}: {e.where}") from e

    def _refusal(self, path: Path, fix: str, more: str = "") -> InputError:
        return InputError(f"the base is quantised: {self.how}", f"{path}{more}", fix)


def _instead(how: str) -> str:
    """Return what to do instead of a merge into weights of a format, with which `how` begins."""
    return LOAD_WITH_MODEL if how.startswith(SVDQUANT) else GIVE_MARK if how.startswith(UNMARKED) else MERGE_UNQUANTISED


def together(parts: Mapping[str, UnreadParts]) -> UnreadParts:
    """Return the quantised parts of all components of a pipeline."""
    inside = {f"{name}.{part}".removesuffix(".") for name, unread in parts.items() for part in unread.parts}
    how = (f"{unread.how}, in {name}" for name, unread in parts.items() if unread.parts)
    return UnreadParts(next(how, ""), frozenset(inside))


def unread_parts(
    tensors: Tensors, metadata: Mapping[str, str], config: Mapping[str, Any], packed: Mapping[str, Packing]
) -> UnreadParts:
    """Return the quantised parts of one checkpoint that no format reads."""
    entries = section(config)
    if entries.get("transform_config"):
        return UnreadParts("its weights are rotated, config.json says so by transform_config", frozenset({""}))
    # The tensors that show it, apart from those that a format reads.
    read = {name for name in packed if tensors[name].dtype not in COPIED_TYPES}
    read |= packing_names(packed)
    signs: dict[str, str] = {}
    for name, info in tensors.items():
        if name not in read and (part := _sign(name, info, tensors)):
            signs.setdefault(*part)
    if signs and not entries and LAYERS_ENTRY not in metadata and (name := _unmarked(signs, tensors)):
        signs = {part: f"{UNMARKED}, it has {name}" for part in signs}
    if signs:
        how = next(iter(signs.values()))
        return UnreadParts(_with_method(how, entries), frozenset(signs))
    # Otherwise the metadata, or the configuration, if no format reads anything.
    for key, (what, shows) in METADATA_FORMATS.items():
        if key in metadata and not packed and shows(metadata[key]):
            return UnreadParts(f"{what}, its metadata has {key}", frozenset({""}))
    if entries and not packed:
        return UnreadParts(f"{entries.get('quant_method', 'unknown')}, says its config.json", frozenset({""}))
    return UnreadParts()


def _unmarked(parts: Iterable[str], tensors: Tensors) -> str:
    """Return the scale of the first of these modules if it is an nvfp4 weight without a mark, else ""."""
    stem = next(iter(parts))
    name = f"{stem}.weight_scale_2"
    return name if name in tensors and f"{stem}.comfy_quant" not in tensors else ""


def _with_method(how: str, entries: Mapping[str, Any]) -> str:
    """Return what a tensor shows, with the method of the section on quantisation if that is another, and its variant.

    `how`: format, comma, the tensor that shows it.
    """
    shown, _, tensor = how.rpartition(", ")
    method, sparse = str(entries.get("quant_method") or ""), entries.get("sparsity_config")
    more = [
        f"{key}: {entries[key]}"[:SHOWN_CHARACTERS]
        for key in ORDER_ENTRIES
        if isinstance(entries.get(key), str) and entries[key]
    ]
    more += (
        [f"sparse: {sparse['format']}"[:SHOWN_CHARACTERS]]
        if isinstance(sparse, Mapping) and sparse.get("format")
        else []
    )
    same = method.partition("_")[0].lower() in shown.lower()
    what = shown if same else method[:SHOWN_CHARACTERS]
    return f"{what} ({', '.join(more)}), {tensor}" if more else f"{what}, {tensor}"


def _sign(name: str, info: StoredTensor, tensors: Tensors) -> tuple[str, str] | None:
    """Return (the part of the checkpoint that a tensor shows to be quantised, how); None if it shows nothing."""
    path, _, last = name.rpartition(".")
    if last in SIGNS:
        module = f"{path}.".partition(".weight.")[0].removesuffix(".")  # l of l.weight._data
        return module, f"{SIGNS[last]}, it has {name}"
    if info.dtype not in ITEM_BYTES or info.dtype == "F8_E8M0":
        part = name if info.dtype in COPIED_TYPES else ""  # each tensor of a GGUF file has its own type
        return part, f"{spoken(info.dtype)} numbers, as in {name}"
    if "scale" not in last:
        return None
    weight = tensors.get(f"{path}.weight")
    if last == "scale" and weight is not None and weight.dtype in QUANTISED_TYPES:
        return path, f"{spoken(weight.dtype)} with a scale for the whole weight, it has {name}"
    how, dtypes = SCALES_OF_DTYPES.get(last, ("", frozenset[str]()))
    if weight is not None and weight.dtype in dtypes:
        return path, f"{how}, it has {name}"
    unknown = weight is not None and weight.dtype in FP8_DTYPES and not OF_OTHERS.search(last)
    return (path, f"fp8 with scales of an unknown kind, it has {name}") if unknown else None

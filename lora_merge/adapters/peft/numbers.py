"""Readers of numbers and settings in a PEFT configuration, of which the rows of methods.py are built. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

from ...algorithms import ALGORITHMS, COUNT, Bounds, DoesNotFit, Shapes
from ...errors import InputError
from ...text import Note
from .config import RETAKE, PeftConfig
from .target_parameters import bare, parameters

MHA_OUTPUT: Final = ".base_layer.out_proj"
"""End of the path of MultiheadAttention's output layer, whose change PEFT adds twice (0.21.2)."""

SORTED: Final = Note(
    "several entries of alpha_pattern fit it with different numbers; the first is used, as PEFT loads it, but it sorts "
    "them when it saves, so it may have been trained with another"
)

Scale: TypeAlias = Callable[[PeftConfig, str, str, Shapes], float]
"""(configuration, module, row of ALGORITHMS, fitted shapes) → the scale of the change."""


class Count(NamedTuple):
    """A length of a tensor that only the configuration can confirm."""

    slot: str
    axis: int
    field: str  # of the configuration with the same length
    pattern: str = ""  # field with the lengths of single modules


def flag(name: str, *, default: bool = False) -> Callable[[PeftConfig], bool]:
    """Return a reader of a boolean."""
    return lambda fields: fields.flag(name, default=default)


def integer(name: str, default: int, allowed: Bounds = COUNT) -> Callable[[PeftConfig], int]:
    """Return a reader of a whole number within these bounds."""
    return lambda fields: fields.integer(name, default, allowed)


def text(name: str, default: str, *known: str) -> Callable[[PeftConfig], str]:
    """Return a reader of a string; only the `known` strings are allowed, if there are any."""

    def read(fields: PeftConfig) -> str:
        value = fields.text(name, default)
        if known and value not in known:
            raise fields.wrong_type(name, " or ".join(known))
        return value

    return read


def other(name: str, default: str, other: str) -> Callable[[PeftConfig], bool]:
    """Return a reader of a field with two known values: true where it is not the default."""
    return lambda fields: text(name, default, default, other)(fields) == other


def number(name: str, default: float) -> Scale:
    """Return a reader of a scale that is a field of the configuration."""
    return lambda fields, _module, _row, _shapes: fields.number(name, default)


def _numbers(fields: PeftConfig, name: str, module: str, default: float) -> set[float]:
    """Return the numbers that a pattern field gives to a module, or to each parameter that the module may be."""
    return {fields.pattern(name, path, default) for path in parameters(fields, module) or (bare(module),)}


def _by_pattern(fields: PeftConfig, name: str, module: str, default: float) -> float:
    """Return the number that a pattern field gives to a module; DoesNotFit if there are several."""
    found = _numbers(fields, name, module, default)
    if len(found) > 1:
        raise DoesNotFit(f"{name} has several numbers for the parameters that this may mean")
    return found.pop()


def _shares(fields: PeftConfig, module: str) -> bool:
    """Return whether PEFT gives this head the factors of the embeddings; the scale then uses the head's own rank."""
    return module.endswith("lm_head") and fields.flag("ensure_weight_tying", default=False)


def no_rank(_: str, __: Shapes) -> int:
    """Return 0: the scale uses the configured rank."""
    return 0


def stored_rank(row: str, shapes: Shapes) -> int:
    """Return the rank of a row's tensors; 0 where the scale uses the configured rank.

    Factors that start in the base (PiSSA) have at most the rank of the weight, but PEFT scales them by the configured
    rank (0.21.2, `pissa_init`).
    """
    algorithm = ALGORITHMS[row]
    rank = algorithm.rank(shapes) if algorithm.rank else 0
    cut = algorithm.starts_in_base and rank >= min(shapes["up"][0], shapes["down"][1])
    return 0 if cut else rank


def ratio(alpha: str, default: float, rank: Callable[[str, Shapes], int] = no_rank) -> Scale:
    """Return a reader of α / r (α / √r for rs-LoRA); r is the rank of the tensors where `rank` finds one."""

    def scale(fields: PeftConfig, module: str, row: str, shapes: Shapes) -> float:
        a = _by_pattern(fields, "alpha_pattern", module, fields.number(alpha, default))
        found = 0 if _shares(fields, module) else rank(row, shapes)
        r = found or _by_pattern(fields, "rank_pattern", module, fields.number("r", 8))
        if r <= 0:
            raise fields.wrong_type("r", "a positive number")
        doubled = 2 if module.endswith(MHA_OUTPUT) else 1
        return doubled * a / (r**0.5 if fields.flag("use_rslora", default=False) else r)

    return scale


def rank_doubt(fields: PeftConfig, row: str, module: str, shapes: Shapes) -> Note | None:
    """Return the remark on tensors whose rank is not the configured one; None where the two are equal."""
    rank = stored_rank(row, shapes)
    if not rank or fields.get("r") is None or _shares(fields, module):
        return None
    configured = _numbers(fields, "rank_pattern", module, fields.number("r", 8))
    if rank in configured:
        return None
    return Note(f"the configuration says rank {min(configured):g}; the tensors have rank {rank}, which is used")


def alpha_doubt(fields: PeftConfig, module: str) -> Note | None:
    """Return the remark on a module to which entries of `alpha_pattern` give different numbers; else None."""
    paths = parameters(fields, module) or (bare(module),)
    return SORTED if any(fields.is_ambiguous("alpha_pattern", path) for path in paths) else None


def check_count(fields: PeftConfig, count: Count | None, module: str, shapes: Shapes) -> None:
    """Raise DoesNotFit if the configuration states another length than the tensor has."""
    if count is None or fields.get(count.field) is None or fields.get("proportional_parameters"):
        return
    stated = fields.number(count.field, 0)
    stated = fields.pattern(count.pattern, bare(module), stated) if count.pattern else stated
    if shapes[count.slot][count.axis] != stated:
        shape = list(shapes[count.slot])
        raise DoesNotFit(f"{count.slot} is {shape}, the configuration says {count.field} = {stated:g}")


def adalora(fields: PeftConfig, _: str, __: str, ___: Shapes) -> float:
    """Return α over the rank at the start of training, which cuts it."""
    start = fields.number("init_r", 12)
    alpha = fields.number("lora_alpha", 8)
    if start <= 0:
        raise fields.wrong_type("init_r", "a positive number")
    return (alpha if alpha > 0 else start) / (start + 1e-5)


def gralora(fields: PeftConfig, _: str, row: str, shapes: Shapes) -> float:
    """Return α / r; r counts the blocks and the plain pair."""
    return fields.number("alpha", 64) / stored_rank(row, shapes)


def deft(fields: PeftConfig, _: str, __: str, shapes: Shapes) -> float:
    """Return α / r, 1 without an α."""
    return 1.0 if not fields.get("alpha") else fields.number("alpha", 1) / shapes["subspace"][1]


def supra(fields: PeftConfig, _: str, row: str, shapes: Shapes) -> float:
    """Return α / r of the low-rank pair, 1 without a pair."""
    rank = stored_rank(row, shapes)
    return fields.number("lora_alpha", rank) / rank if rank else 1.0


def terms(*, required: bool) -> Callable[[PeftConfig], int]:
    """Return a reader of the number of terms of Cayley's series, 0 for the exact transform. `required`: the
    configuration must hold the switch, because its default has changed."""

    def read(fields: PeftConfig) -> int:
        if required and fields.get("use_cayley_neumann") is None:
            raise InputError("use_cayley_neumann is missing, and no tensor shows it", fields.where, RETAKE)
        if not fields.flag("use_cayley_neumann", default=False):
            return 0
        terms = fields.integer("num_cayley_neumann_terms", 5)
        if not 0 < terms <= 100:
            raise fields.wrong_type("num_cayley_neumann_terms", "between 1 and 100")
        return terms

    return read


def limit(name: str, default: float, switch: str) -> Callable[[PeftConfig], float]:
    """Return a reader of a number that is used where a switch is on; else 0."""
    return lambda fields: fields.number(name, default) if fields.flag(switch, default=False) else 0.0


def mlx_scale(fields: PeftConfig) -> float | None:
    """Return mlx-lm's `scale`; None where `alpha` differs from the rank, so that the user must state the scale. Early
    versions multiplied the scale by alpha / rank, later ones ignore alpha (mlx-lm, tuner/lora.py)."""
    table = fields.get("lora_parameters")
    if not isinstance(table, dict):
        raise fields.wrong_type("lora_parameters", "an object")
    inner = PeftConfig(table, f"{fields.where}: lora_parameters")
    known = inner.get("scale") is not None and inner.get("alpha") in (None, inner.get("rank"))
    return inner.number("scale", 0) if known else None

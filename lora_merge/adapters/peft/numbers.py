"""How numbers and settings are read from a PEFT configuration: what the rows of methods.py are made of. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

from ...algorithms import ALGORITHMS, COUNT, Bounds, DoesNotFit, Shapes
from ...errors import InputError
from .config import RETAKE, PeftConfig
from .target_parameters import bare, parameters

MHA_OUTPUT: Final = ".base_layer.out_proj"
"""Only MultiheadAttention has a layer below its `base_layer`; PEFT adds that layer's delta twice (0.21.2)."""

Scale: TypeAlias = Callable[[PeftConfig, str, str, Shapes], float]
"""(configuration, module, row of ALGORITHMS, fitted shapes) → what the change is multiplied by."""


class Count(NamedTuple):
    """A length that no other tensor confirms."""

    slot: str
    axis: int
    field: str  # of the configuration, which says it too
    pattern: str = ""  # the field that says it for single modules


def flag(name: str, *, default: bool = False) -> Callable[[PeftConfig], bool]:
    """True or false."""
    return lambda fields: fields.flag(name, default=default)


def integer(name: str, default: int, allowed: Bounds = COUNT) -> Callable[[PeftConfig], int]:
    """Return a whole number inside of these bounds."""
    return lambda fields: fields.integer(name, default, allowed)


def text(name: str, default: str, *known: str) -> Callable[[PeftConfig], str]:
    """Return a string, one of these if any are known."""

    def read(fields: PeftConfig) -> str:
        value = fields.text(name, default)
        if known and value not in known:
            raise fields.odd(name, " or ".join(known))
        return value

    return read


def other(name: str, default: str, other: str) -> Callable[[PeftConfig], bool]:
    """Return whether a field with two known values has the other one."""
    return lambda fields: text(name, default, default, other)(fields) == other


def number(name: str, default: float) -> Scale:
    """Return a scale that is a field of its own."""
    return lambda fields, _module, _row, _shapes: fields.number(name, default)


def _numbers(fields: PeftConfig, name: str, module: str, default: float) -> set[float]:
    """Return what a pattern gives a module, or each of the parameters that it may mean."""
    return {fields.pattern(name, path, default) for path in parameters(fields, module) or (bare(module),)}


def _by_pattern(fields: PeftConfig, name: str, module: str, default: float) -> float:
    """Return the one number that a pattern gives a module; DoesNotFit if that is open."""
    found = _numbers(fields, name, module, default)
    if len(found) > 1:
        raise DoesNotFit(f"{name} has several numbers for the parameters that this may mean")
    return found.pop()


def _shares(fields: PeftConfig, module: str) -> bool:
    """Return whether PEFT gives this head the factors of the embeddings; its scale stays that of its own rank."""
    return module.endswith("lm_head") and fields.flag("ensure_weight_tying", default=False)


def no_rank(_: str, __: Shapes) -> int:
    """Return 0: the configured rank alone counts."""
    return 0


def stored_rank(row: str, shapes: Shapes) -> int:
    """Return the rank of a row's tensors; 0 where the configured one alone counts.

    A start that was taken out of the weight is cut to all that the weight has, and PEFT scales it by the configured
    rank all the same (0.21.2, `pissa_init`).
    """
    algorithm = ALGORITHMS[row]
    rank = algorithm.rank(shapes) if algorithm.rank else 0
    cut = algorithm.starts_in_base and rank >= min(shapes["up"][0], shapes["down"][1])
    return 0 if cut else rank


def ratio(alpha: str, default: float, rank: Callable[[str, Shapes], int] = no_rank) -> Scale:
    """α / r by the patterns of the configuration (√r for rs-LoRA), r from the tensors where `rank` finds it."""

    def scale(fields: PeftConfig, module: str, row: str, shapes: Shapes) -> float:
        a = _by_pattern(fields, "alpha_pattern", module, fields.number(alpha, default))
        found = 0 if _shares(fields, module) else rank(row, shapes)
        r = found or _by_pattern(fields, "rank_pattern", module, fields.number("r", 8))
        if r <= 0:
            raise fields.odd("r", "a positive number")
        doubled = 2 if module.endswith(MHA_OUTPUT) else 1
        return doubled * a / (r**0.5 if fields.flag("use_rslora", default=False) else r)

    return scale


def rank_doubt(fields: PeftConfig, row: str, module: str, shapes: Shapes) -> str:
    """Return what the user should know if a LoRA's tensors have another rank than the configuration says; "" if not."""
    rank = stored_rank(row, shapes)
    if not rank or fields.get("r") is None or _shares(fields, module):
        return ""
    said = _numbers(fields, "rank_pattern", module, fields.number("r", 8))
    if rank in said:
        return ""
    return f"the configuration says rank {min(said):g}, the tensors have {rank}, which is what counts"


def check_count(fields: PeftConfig, count: Count | None, module: str, shapes: Shapes) -> None:
    """Raise DoesNotFit if a length is another than the configuration's; nothing where the configuration does not
    tell.
    """
    if count is None or fields.get(count.field) is None or fields.get("proportional_parameters"):
        return
    said = fields.number(count.field, 0)
    said = fields.pattern(count.pattern, bare(module), said) if count.pattern else said
    if shapes[count.slot][count.axis] != said:
        raise DoesNotFit(f"{count.slot} is {list(shapes[count.slot])}, the configuration says {count.field} = {said:g}")


def adalora(fields: PeftConfig, _: str, __: str, ___: Shapes) -> float:
    """α over the rank at the start, which is cut in training."""
    start = fields.number("init_r", 12)
    alpha = fields.number("lora_alpha", 8)
    if start <= 0:
        raise fields.odd("init_r", "a positive number")
    return (alpha if alpha > 0 else start) / (start + 1e-5)


def gralora(fields: PeftConfig, _: str, row: str, shapes: Shapes) -> float:
    """α / r of all blocks and the plain pair."""
    return fields.number("alpha", 64) / stored_rank(row, shapes)


def deft(fields: PeftConfig, _: str, __: str, shapes: Shapes) -> float:
    """α / r, 1 without an α."""
    return 1.0 if not fields.get("alpha") else fields.number("alpha", 1) / shapes["subspace"][1]


def supra(fields: PeftConfig, _: str, row: str, shapes: Shapes) -> float:
    """α / r of the pair beside the entries, 1 without it."""
    rank = stored_rank(row, shapes)
    return fields.number("lora_alpha", rank) / rank if rank else 1.0


def terms(*, told: bool) -> Callable[[PeftConfig], int]:
    """Return how many terms of its series Cayley's transform was trained with; 0 where it was exact. `told`: whether
    the configuration has to say it, because its default has changed."""

    def read(fields: PeftConfig) -> int:
        if told and fields.get("use_cayley_neumann") is None:
            raise InputError("use_cayley_neumann is missing, and no tensor tells it", fields.where, RETAKE)
        if not fields.flag("use_cayley_neumann", default=False):
            return 0
        terms = fields.integer("num_cayley_neumann_terms", 5)
        if not 0 < terms <= 100:
            raise fields.odd("num_cayley_neumann_terms", "between 1 and 100")
        return terms

    return read


def limit(name: str, default: float, switch: str) -> Callable[[PeftConfig], float]:
    """Return a number that counts where a switch is on; else 0."""
    return lambda fields: fields.number(name, default) if fields.flag(switch, default=False) else 0.0


def mlx_scale(fields: PeftConfig) -> float | None:
    """Return c of mlx-lm is its `scale` alone. Early versions multiplied it by a field alpha over the rank, later ones
    leave that field unread; where it would make a difference the user has to say (mlx-lm, tuner/lora.py)."""
    table = fields.get("lora_parameters")
    if not isinstance(table, dict):
        raise fields.odd("lora_parameters", "an object")
    inner = PeftConfig(table, f"{fields.where}: lora_parameters")
    told = inner.get("scale") is not None and inner.get("alpha") in (None, inner.get("rank"))
    return inner.number("scale", 0) if told else None

"""What a PEFT configuration says in numbers: the scale of each algorithm, and its settings. No
torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from ...algorithms import SEED, DoesNotFit, Shapes
from ...errors import InputError
from .config import RETAKE, Fields
from .target_parameters import bare, parameters

MHA_OUTPUT: Final = ".base_layer.out_proj"
"""Only MultiheadAttention has a layer below its `base_layer`; PEFT adds that layer's delta twice
(0.21.2)."""


def _numbers(fields: Fields, name: str, module: str, default: float) -> set[float]:
    """What a pattern gives a module, or each of the parameters that it may mean."""
    return {fields.pattern(name, path, default) for path in parameters(fields, module) or (bare(module),)}


def _by_pattern(fields: Fields, name: str, module: str, default: float) -> float:
    """The one number that a pattern gives a module; DoesNotFit if that is open."""
    found = _numbers(fields, name, module, default)
    if len(found) > 1:
        raise DoesNotFit(f"{name} has several numbers for the parameters that this may mean")
    return found.pop()


def _shares(fields: Fields, module: str) -> bool:
    """Whether PEFT gives this head the factors of the embeddings; its scale stays that of its own rank (0.21.2)."""
    return module.endswith("lm_head") and fields.flag("ensure_weight_tying", default=False)


def _ratio(alpha: str, default: float, rank: Callable[[Shapes], int]) -> Callable[[Fields, str, Shapes], float]:
    """α / r by the patterns of the configuration, r from the tensors where `rank` finds it (√r for
    rs-LoRA)."""

    def scale(fields: Fields, module: str, shapes: Shapes) -> float:
        a = _by_pattern(fields, "alpha_pattern", module, fields.number(alpha, default))
        found = 0 if _shares(fields, module) else rank(shapes)
        r = found or _by_pattern(fields, "rank_pattern", module, fields.number("r", 8))
        if r <= 0:
            raise fields.odd("r", "a positive number")
        doubled = 2 if module.endswith(MHA_OUTPUT) else 1
        return doubled * a / (r**0.5 if fields.flag("use_rslora", default=False) else r)

    return scale


def _adalora(fields: Fields, _: str, __: Shapes) -> float:
    start = fields.number("init_r", 12)
    alpha = fields.number("lora_alpha", 8)
    if start <= 0:
        raise fields.odd("init_r", "a positive number")
    return (alpha if alpha > 0 else start) / (start + 1e-5)


def _gralora(fields: Fields, _: str, shapes: Shapes) -> float:
    rank = shapes["inputs"][2] * shapes["inputs"][3] + (shapes["down"][0] if "down" in shapes else 0)
    return fields.number("alpha", 64) / rank


def _deft(fields: Fields, _: str, shapes: Shapes) -> float:
    return 1.0 if not fields.get("alpha") else fields.number("alpha", 1) / shapes["subspace"][1]


def _supra(fields: Fields, _: str, shapes: Shapes) -> float:
    rank = shapes["down"][0] if "down" in shapes else 0
    return fields.number("lora_alpha", rank) / rank if rank else 1.0


def _started(shapes: Shapes) -> int:
    """The rank of a start taken out of the weight; 0 where this is all the weight has and the configured one may be
    larger: PEFT cuts the factors, and scales by the configured rank all the same (0.21.2, `pissa_init`)."""
    rank: int = shapes["down"][0]
    return rank if rank < min(shapes["up"][0], shapes["down"][1]) else 0


RANKS: Final[Mapping[str, Callable[[Shapes], int]]] = MappingProxyType(
    {
        **dict.fromkeys(("lora", "lora_embedding", "kasa", "lora_sparse"), lambda shapes: shapes["down"][0]),
        **dict.fromkeys(("pissa", "olora"), _started),
        **dict.fromkeys(("lora_experts", "lora_experts_transposed"), lambda shapes: shapes["down"][1]),
        "bdlora": lambda shapes: shapes["down"][0] * shapes["down"][1],
    }
)
"""Row → the rank of its tensors, which PEFT's field `r` says too; 0 where that alone counts."""

SCALES: Final[Mapping[str, Callable[[Fields, str, Shapes], float]]] = MappingProxyType(
    {
        **{row: _ratio("lora_alpha", 8, rank) for row, rank in RANKS.items()},
        "lora_bias": _ratio("lora_alpha", 8, lambda _: 0),
        "loha": _ratio("alpha", 8, lambda _: 0),
        "lokr": _ratio("alpha", 8, lambda _: 0),  # also where both factors are full; LyCORIS has 1 there
        "randlora": _ratio("randlora_alpha", 640, lambda shapes: shapes["rank_scale"][0]),
        "adalora": _adalora,
        "gralora": _gralora,
        "deft": _deft,
        "supertuning": _supra,
        "fourierft": lambda fields, _module, _shapes: fields.number("scaling", 150.0),
        "waveft": lambda fields, _module, _shapes: fields.number("scaling", 25.0),
        "peanut": lambda fields, _module, _shapes: fields.number("scaling", 1.0),
    }
)
"""Row → its `scale`; rows that are not here have none, or their own."""

COUNTS: Final[Mapping[str, tuple[str, int, str, str]]] = MappingProxyType(
    {
        "vera": ("rank_scale", 0, "r", ""),
        "tinylora": ("vector", 0, "u", ""),
        "hra": ("vectors", 1, "r", "rank_pattern"),
        "miss": ("block", 0, "r", "rank_pattern"),
        "miss_mini": ("block", 0, "r", "rank_pattern"),
        "fourierft": ("spectrum", 0, "n_frequency", "n_frequency_pattern"),
        "waveft": ("spectrum", 0, "n_frequency", "n_frequency_pattern"),
    }
)
"""Row → the slot and axis whose length no other tensor confirms, and the field, perhaps with a pattern, that does."""


def check_count(fields: Fields, algorithm: str, module: str, shapes: Shapes) -> None:
    """DoesNotFit if a length is another than the configuration's; nothing where the configuration does not tell."""
    slot, axis, name, pattern = COUNTS.get(algorithm, ("", 0, "", ""))
    if not name or fields.get(name) is None or fields.get("proportional_parameters"):
        return
    said = fields.pattern(pattern, bare(module), fields.number(name, 0)) if pattern else fields.number(name, 0)
    if shapes[slot][axis] != said:
        raise DoesNotFit(f"{slot} is {list(shapes[slot])}, the configuration says {name} = {said:g}")


def rank_doubt(fields: Fields, algorithm: str, module: str, shapes: Shapes) -> str:
    """What the user should know if the tensors have another rank than the configuration says; "" if not."""
    if algorithm not in RANKS or fields.get("r") is None or _shares(fields, module):
        return ""
    said, rank = _numbers(fields, "rank_pattern", module, fields.number("r", 8)), RANKS[algorithm](shapes)
    if not rank or rank in said:
        return ""
    return f"the configuration says rank {min(said):g}, the tensors have {rank}, which is what counts"


CONFIGURED: Final = frozenset({"adalora", "randlora", "waveft", "peanut"})
"""Rows whose scale follows from no tensor, and is 1 in no file."""


def _oft(fields: Fields) -> Mapping[str, object]:
    if fields.get("use_cayley_neumann") is None:
        what = "use_cayley_neumann is missing, and no tensor tells it"
        raise InputError(what, fields.where, RETAKE)
    series = fields.flag("use_cayley_neumann", default=True)
    terms = fields.integer("num_cayley_neumann_terms", 5) if series else 0
    if series and not 0 < terms <= 100:
        raise fields.odd("num_cayley_neumann_terms", "between 1 and 100")
    old = fields.version("0.17") < (0, 18)
    return {"terms": terms, "doubled_last": old, **_blocks(fields)}


def _blocks(fields: Fields) -> Mapping[str, object]:
    limit = fields.number("eps", 6e-5) if fields.flag("coft", default=False) else 0.0
    return {"limit": limit, "shared": fields.flag("block_share", default=False)}


def _random(fields: Fields) -> Mapping[str, object]:
    return {"seed": fields.integer("projection_prng_key", 0, SEED)}


def _deft_method(fields: Fields) -> Mapping[str, object]:
    method = fields.text("decomposition_method", "relu")
    if method not in ("relu", "qr"):
        raise fields.odd("decomposition_method", "relu or qr")
    return {"method": method}


def _psoft(fields: Fields) -> Mapping[str, object]:
    start, how = fields.text("ab_svd_init", "psoft_init"), fields.text("psoft_svd", "full")
    if start not in ("psoft_init", "pissa_init"):
        raise fields.odd("ab_svd_init", "psoft_init or pissa_init")
    if how not in ("full", "lowrank"):
        raise fields.odd("psoft_svd", "full or lowrank")
    series = fields.flag("use_cayley_neumann", default=False)
    terms = fields.integer("num_cayley_neumann_terms", 5) if series else 0
    if series and not terms:
        raise fields.odd("num_cayley_neumann_terms", "a positive number")
    return {
        "orthogonal": fields.flag("psoft_orth", default=True),
        "terms": terms,
        "limit": fields.number("cayley_neumann_eps", 0.0) if series else 0.0,
        "balanced": start == "pissa_init",
        "low_rank": how == "lowrank",
        "rounds": fields.integer("psoft_svd_lowrank_niter", 10),
        "seed": fields.integer("random_seed", 0),
    }


def _mlx(fields: Fields) -> Mapping[str, object]:
    """c of mlx-lm is its `scale` alone. Early versions multiplied it by a field alpha over the rank, later ones leave
    that field unread; where it would make a difference the user has to say (mlx-lm, tuner/lora.py)."""
    table = fields.get("lora_parameters")
    if not isinstance(table, dict):
        raise fields.odd("lora_parameters", "an object")
    inner = Fields(table, f"{fields.where}: lora_parameters")
    told = inner.get("scale") is not None and inner.get("alpha") in (None, inner.get("rank"))
    return {"over_rank": False, **({"lora_alpha": inner.number("scale", 0)} if told else {})}


SETTINGS: Final[Mapping[str, Callable[[Fields], Mapping[str, object]]]] = MappingProxyType(
    {
        "peft_oft": _oft,
        "peft_oft_embedding": _oft,
        "peft_oft1": _blocks,
        "peft_oft2": _blocks,
        "lokr": lambda _: {"right_aligned": True},
        "lora_transposed": _mlx,
        "lora_switch": _mlx,
        "vera": _random,
        "pvera": _random,
        "randlora": lambda fields: {
            **_random(fields),
            **{name: fields.flag(name, default=False) for name in ("sparse", "very_sparse")},
        },
        "waveft": lambda fields: {
            "seed": fields.integer("random_loc_seed", 777, SEED),
            "family": fields.text("wavelet_family", "db1"),
            "transform": fields.flag("use_idwt", default=True),
        },
        "peanut": lambda fields: {
            "depth": fields.integer("depth", 0),
            "activation": fields.text("act_fn", "relu"),
        },
        "supertuning": lambda fields: {"top": fields.flag("select_top", default=True)},
        "psoft": _psoft,
        "adamss": lambda fields: {"seed": fields.integer("random_seed", 0)},
        "fourierft": lambda fields: {"seed": fields.integer("random_loc_seed", 777, SEED)},
        "hra": lambda fields: {"orthogonal": fields.flag("apply_GS", default=False)},
        "road": lambda fields: {"group": fields.integer("group_size", 64)},
        "vblora": lambda fields: {"top": fields.integer("topk", 2)},
        "deft": _deft_method,
    }
)

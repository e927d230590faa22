"""The formula of a module, for the second reading: by the sizes of its tensors and the configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Final

from .layouts import Shape
from .methods import METHOD_ROWS, Stored, table
from .modules import Group
from .rows import PEFT_PREFIX
from .scales import ModuleScales

IN_OUT_EXPERTS: Final = ("gpt_oss", "aria", "openai_privacy_filter")
"""The beginnings of the types of models whose class of experts is marked `is_transposed` (transformers 5)."""

STACKED: Final = ("lora_stacked", "lora_stacked_down", "lora_stacked_up")

LOW_RANK: Final = (*STACKED, "lora", "lora_sparse", "lora_sparse_tucker", "lora_embedding", "kasa", "bdlora")


def fits(group: Group, shape: Shape) -> bool:
    """Return whether the tensors have the axes and the sizes that a weight of this shape needs."""
    try:
        return bool(shape) and FITS[group.kind](group.shapes, shape)
    except IndexError:  # a tensor has fewer axes
        return False


def _fits_lora(s: Stored, shape: Shape) -> bool:
    inputs = s["down"][1:2] + (s["mid"][2:] if "mid" in s else s["down"][2:])
    plain = len(shape) == 2 or len(inputs) == len(shape) - 1
    product = prod(s["up"]) == shape[0] * s["down"][0]
    return plain and s["up"][:1] == shape[:1] and prod(inputs) == prod(shape[1:]) and product


def _fits_lokr(s: Stored, shape: Shape) -> bool:
    left = s["w1"] if "w1" in s else s["w1_a"]
    right = s["w2"] if "w2" in s else s["w2_a"][::-1] if "t2" in s else s["w2_a"]
    return left[0] * right[0] == shape[0] and len(shape) > 1


def _fits_loha(s: Stored, shape: Shape) -> bool:
    return "t1" in s or (s["w1_a"][:1] == shape[:1] and prod(s["w1_b"][1:]) == prod(shape[1:]))


def _fits_glora(s: Stored, shape: Shape) -> bool:
    new = s["a1"][:1] == shape[1:2] and s["b1"][:1] == shape[:1] and s["a2"][:1] == s["b1"][1:2]
    old = s["a1"][1:2] == s["b1"][1:2] == shape[1:2] and s["b2"][:1] == shape[:1] and len(shape) == 2
    return len(shape) > 1 and (new or old)


def _fits_full(s: Stored, shape: Shape) -> bool:
    return s["diff"][:1] == shape[:1] and prod(s["diff"]) == prod(shape)


def _fits_vector(s: Stored, shape: Shape) -> bool:
    return len(shape) > 1 and prod(s.get("diff") or s.get("factor") or ()) in shape[:2]


def _fits_blocks(s: Stored, shape: Shape) -> bool:
    """Check BD-LoRA: one factor is whole, the other holds the blocks of its diagonal side by side."""
    if not len(shape) == len(s["up"]) == len(s["down"]) == 2:
        return False
    (rows, part), (rank, width) = s["up"], s["down"]
    of_down = part == rank and width > 0 and shape[1] % width == 0
    of_up = width == shape[1] and part > 0 and rank % part == 0
    return rows == shape[0] and (of_down or of_up)


def _fits_fused(s: Stored, shape: Shape) -> bool:
    """Check litgpt's fused weights: the inner factors of the trained parts follow each other."""
    if not len(shape) == len(s["up"]) == len(s["down"]) == 2:
        return False
    (rows, rank), (ranks, width) = s["up"], s["down"]
    return rows <= shape[0] and width == shape[1] and 0 < rank < ranks and ranks % rank == 0


def _fits_stacked(s: Stored, shape: Shape) -> bool:
    """Check stacked experts: factors of three axes, of which one may be the same for all experts."""
    experts = max(s["up"][0], s["down"][0])
    return len(shape) == 3 and (experts, s["up"][1], s["down"][2]) == shape


def _fits_below(s: Stored, shape: Shape) -> bool:
    """Check LongCat-Video: the up factors fill the rows, one below the other."""
    ups = [size for slot, size in s.items() if slot.startswith("up_")]
    return sum(size[0] for size in ups) == shape[0] and s["down"][0] == sum(size[1] for size in ups)


def _started(kind: str, scales: ModuleScales, stem: str) -> str | None:
    """Return the row of ALGORITHMS for PEFT's LoRA, by how its factors began; None if only the plan knows."""
    config = scales.config(stem)
    start, kasa = config.get("init_lora_weights"), bool(config.get("kasa_config"))
    if bool(config.get("use_bdlora")) != (kind == "bdlora") or kasa != (kind == "kasa"):
        return None
    if start in ("pissa", "olora"):
        return start if kind == "lora" and not (kasa or scales.keeps_base) else None
    return kind


FITS: Final[Mapping[str, Callable[[Stored, Shape], bool]]] = {
    **dict.fromkeys(("lora", "lora_sparse", "lora_sparse_tucker", "kasa"), _fits_lora),
    "lora_embedding": table, "loha": _fits_loha, "lokr": _fits_lokr, "glora": _fits_glora,
    "full": _fits_full, "full_rank": lambda s, shape: _fits_full({"diff": s["down"]}, shape), "bdlora": _fits_blocks,
    **dict.fromkeys(STACKED, _fits_stacked), "lora_blocks": _fits_below, "bora": _fits_lora,
    "lora_fused": _fits_fused, "ia3": _fits_vector, "peft_ia3": _fits_vector,
    **{family: method.fits for family, method in METHOD_ROWS.items()},
}  # fmt: skip
"""Kind → check whether its tensors have the sizes for a weight."""


def variant(group: Group, scales: ModuleScales) -> str:
    """Return the kind of a module, by its configuration and the user's settings if its tensors have LoRA's names."""
    if group.kind == "lora" and scales.config(group.stem).get("use_bdlora"):
        return "bdlora"
    stored = group.shapes
    if group.kind in ("lora", "litgpt") and len(stored["up"]) == len(stored["down"]) == 3:
        (up, _, rank), (down, inner, _) = stored["up"], stored["down"]
        if rank == inner:  # of a convolution they are its kernel of one and its inputs
            return "lora_stacked" if up == down else "lora_stacked_down" if down == 1 else "lora_stacked_up"
    if group.kind != "litgpt":
        return group.kind
    return "lora" if stored["up"][1:] == stored["down"][:1] else "lora_fused"


def kind_of(group: Group, shape: Shape, scales: ModuleScales) -> str | None:
    """Return the row of ALGORITHMS for a weight of this shape; None if two rows fit the shapes, or the
    configuration is that of another method."""
    kind, stated = group.kind, scales.method(group.stem)
    if kind in METHOD_ROWS:
        return _of_method(group, shape, stated)
    if kind in ("full", "ia3"):
        return kind
    if kind == "peft_ia3":
        inputs = scales.inputs_scaled(group.stem) if stated == "IA3" else None
        return None if inputs is None else "peft_ia3_in" if inputs else "peft_ia3_out"
    if stated is None or (stated and stated not in (kind.upper(), "LORA" if kind in LOW_RANK else "")):
        return None
    if stated == "LORA":
        return _started(kind, scales, group.stem)
    return _glora(group.shapes, shape) if kind == "glora" else kind


def _of_method(group: Group, shape: Shape, stated: str | None) -> str | None:
    """Return the row of a method's family; if two trainers write it, the presence of a configuration decides."""
    method, stored = METHOD_ROWS[group.kind], group.shapes
    if stated == "" and method.plain is not None and not group.stem.startswith(PEFT_PREFIX):
        return method.plain(stored, shape)
    if stated != method.type and not (stated == "BONE" and method.type == "MISS"):
        return None
    return method.kind(stored, shape) if method.kind else group.kind


def _glora(s: Stored, shape: Shape) -> str | None:
    """Return which of GLoRA's two layouts it is, which swap outer sizes and ranks; None unless the rank is smaller."""
    rank = min(s["a1"][:2])
    if max(rank, 1) >= min(shape[:2]):
        return None
    return "glora" if s["a1"][1] == rank else "glora_old"


def square_experts(config: Mapping[str, Any], model: str) -> str | None:
    """Return the row for experts whose sides are equal; None if only the plan knows. `model`: the base's type.

    PEFT takes a stored weight for [out, in] since 0.19.1, unless the class of the experts says that it is [in, out].
    """
    parts = str(config.get("peft_version", "")).split(".")[:3]
    version = [int(part) for part in parts if part.isdecimal() and len(part) < 4]
    path = "" if model or config.get("auto_mapping") else str(config.get("base_model_name_or_path"))
    if model.startswith(IN_OUT_EXPERTS) or "gpt_oss" in path.lower().replace("-", "_"):
        return "lora_experts_transposed" if version != [0, 19, 0] else None
    return "lora_experts" if model and version >= [0, 19, 1] else None

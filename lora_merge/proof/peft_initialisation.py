"""Slots that no file holds: computed by the row's own steps, as PEFT does on loading, and checked in float64.

Signs of singular vectors and the order of equal values depend on the machine, so a second computation may give other
slots. So the computed slots are taken, and checked against their definition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from ..algorithms import ALGORITHMS, LoadedModule
from ..errors import VerificationFailed
from ..matching.patch import Patch
from ..text import quoted
from .reference.floats import Array, as_dtype

SVD_TOLERANCE: Final = 1e-3
"""Tolerance of a decomposition in fp32, as a share of the largest singular value."""
BASIS_TOLERANCE: Final = 0.1
"""Tolerance of FRoD's basis, rounded to 16 bits, against that of fp64, as a share of its norm."""

REPORT_CONFIGURATION = "report it with the configuration of the adapter and of the base"


@dataclass(frozen=True)
class RebuiltSlots:
    """The computed slots, and the tensors and settings that they were computed from."""

    slots: Mapping[str, Array]
    read: Callable[[str], Array]  # a slot of the base, or "" for the weight [out, cols]
    shapes: Mapping[str, tuple[int, ...]]
    shape: tuple[int, ...]  # of the weight
    settings: Mapping[str, Any]


def _largest(r: RebuiltSlots) -> bool:
    """Check SuperTuning: different places, of the largest magnitudes or of the smallest, in their order."""
    places, scores = r.slots["places"], np.abs(r.read("")).reshape(-1)
    ranked = np.sort(scores)[:: -1 if r.settings.get("top", True) else 1]
    different = len(np.unique(places)) == len(places)
    return different and np.array_equal(scores[places], ranked[: len(places)])


def _triples(r: RebuiltSlots) -> bool:
    """Check PSOFT: orthonormal vectors that the weight maps to each other, by its largest singular values."""
    left, right, weight = (as_dtype(v, "F64") for v in (r.slots["left"], r.slots["right"], r.read("")))
    values = np.linalg.svd(weight, compute_uv=False)
    sizes = np.linalg.norm(left, axis=0) * np.linalg.norm(right, axis=1)
    used = sizes > SVD_TOLERANCE * values[0]
    u, v = (side[:, used] / np.linalg.norm(side[:, used], axis=0) for side in (left, right.T))
    unit = np.eye(u.shape[1])
    exact = [(u.T @ weight @ v, np.diag(sizes[used]))]
    if not r.settings.get("low_rank", False):  # a randomised method, which is not exact
        exact.append((sizes, values[: len(sizes)]))
    near = all(np.abs(product - other).max(initial=0.0) <= SVD_TOLERANCE * values[0] for product, other in exact)
    return near and all(np.abs(side.T @ side - unit).max(initial=0.0) <= SVD_TOLERANCE for side in (u, v))


def _groups(r: RebuiltSlots) -> bool:
    """Check AdaMSS: every row is in one group, and the rows of a group are in the order of the weight."""
    order = r.slots["order"]
    heights = [r.shapes[f"up_{i}"][0] for i in range(sum(slot.startswith("up_") for slot in r.shapes))]
    rows = np.argsort(order)
    ends = np.cumsum(heights)
    inside = np.delete(np.diff(rows), ends[:-1] - 1)
    return np.array_equal(np.sort(order), np.arange(len(order))) and bool((inside > 0).all())


def _shares(r: RebuiltSlots) -> bool:
    """Check Uni-LoRA: entries of the vector, each weighed by its number of uses in all layers, which differs by 1."""
    entries, total, dtype = r.shapes["bank"][0], r.settings["total"], r.settings["dtype"]
    often = np.array([total // entries, total // entries + 1], np.float64)
    weights = as_dtype(1 / np.sqrt(often[often > 0]), dtype)
    inside = all(((v >= 0) & (v < entries)).all() for v in (r.slots["down_choice"], r.slots["up_choice"]))
    step = np.spacing(np.float32(weights.max())) if dtype in ("F32", "F64") else 0.0
    near = (np.abs(r.slots[s][..., None] - weights).min(axis=-1) <= step for s in ("down_weight", "up_weight"))
    return inside and all(flags.all() for flags in near)


def _joint(r: RebuiltSlots) -> bool:
    """Check FRoD: places off the diagonal, each once; the basis that is common to all layers (see `_basis`)."""
    (rows, columns), basis = r.slots["places"], as_dtype(r.slots["basis"], "F64")
    off = bool((rows != columns).all()) and len({*zip(rows.tolist(), columns.tolist(), strict=True)}) == len(rows)
    expected = _basis(
        [r.read(f"layer_{n}").astype(np.float64) for n in range(r.settings["layers"])], r.settings["ridge"]
    )
    apart = np.minimum(*(np.linalg.norm(basis - sign * expected, axis=0) for sign in (1.0, -1.0)))
    return off and bool(np.linalg.norm(apart) <= BASIS_TOLERANCE * np.linalg.norm(expected))


def _basis(weights: list[Array], ridge: float) -> Array:
    """Return V: for Wᵢ = Qᵢ R, Rᵀ E with the eigenvectors E of the mean of (QᵢᵀQᵢ + ridge)⁻¹."""
    stacked = np.concatenate(weights)
    if stacked.shape[0] < stacked.shape[1]:
        return np.asarray(np.linalg.svd(stacked)[2].T)
    upper: Array = np.linalg.qr(stacked)[1]
    parts = [np.linalg.solve(upper.T, weight.T).T for weight in weights]
    mean = sum(np.linalg.inv(part.T @ part + ridge * np.eye(len(upper))) for part in parts) / len(parts)
    return np.asarray(upper.T @ np.linalg.eigh(mean)[1])


CHECKS: Final[Mapping[str, Callable[[RebuiltSlots], bool]]] = MappingProxyType(
    {"supertuning": _largest, "psoft": _triples, "adamss": _groups, "unilora": _shares, "frod": _joint}
)
"""Row of ALGORITHMS with a `rebuild` → check of the slots that it computes."""


def rebuilt_slots(patch: Patch, read: Callable[[str], Array]) -> Mapping[str, Array]:
    """Return the slots that the patch's file lacks; VerificationFailed if one does not pass the row's check.

    `read`: gives a slot of the base or the file in the fitted shape, or for "" the weight [out, cols]; in float32, or
    in float64 if the base stores it so.
    """
    row, settings = ALGORITHMS[patch.algorithm], dict(patch.settings)
    if not row.is_rebuilt(patch.shapes):
        return {}
    more = patch.shapes, patch.view.shape, settings
    slots = {slot: np.asarray(v) for slot, v in row.rebuilt(LoadedModule.of_arrays(read, as_dtype, *more)).items()}
    if not CHECKS[patch.algorithm](RebuiltSlots(slots, read, *more)):
        where = f"{quoted(patch.module.where)} ({patch.algorithm}): {', '.join(sorted(slots))}"
        raise VerificationFailed(
            "tensors computed from the base do not satisfy the definition of the adapter's method",
            where,
            REPORT_CONFIGURATION,
        )
    return slots

"""FRoD, the weight written anew in a basis that all layers of a kind share: W' = U (S + diag(l)) Vᵀ. PEFT 0.21.2
tuners/frod/layer.py.

V is stored once for all layers that end in the same name. Where it is not stored (`save_projection=False`), it follows
from the weights of these layers, see joint_basis.py. U follows from the untouched weight: its columns are those of
W V⁻ᵀ, scaled to length 1. S is zero except for some entries. W' contains the untouched weight only through U.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .base import (
    LAYER_SLOT,
    ON_CPU,
    Algorithm,
    Checks,
    Loaded,
    Rebuild,
    Shape,
    Shapes,
    expect,
    expect_shapes,
    flat,
    length,
)
from .bounds import COUNT, SEED, below
from .joint_basis import drawn_places, joint_basis

if TYPE_CHECKING:
    from torch import Tensor

    from .base import Indices

SHORTEST = 1e-12
"""Columns of W V⁻ᵀ that are shorter become zeros."""


@dataclass(frozen=True)
class FrodTensors:
    """The shared basis, and the trained weight in that basis."""

    diagonal: Tensor  # l, [n, in]
    values: Tensor  # of S, [n, m]
    basis: Tensor | None = None  # V, [n, in, in]; shared
    places: Indices | None = None  # rows and columns of S, [n, 2, m]; shared
    layers: int = 0  # this and the following are set where V is not stored: how many layers share V
    ridge: float = 0.0  # `regularization_alpha`
    dtype: str = ""  # that of the weight; PEFT rounds V to it
    widths: tuple[int, ...] = ()  # inputs of every kind of layer whose S is drawn before this one, and of this one
    share: float = 0.0  # `sparse_rate`
    seed: int = 0  # `projection_prng_key`


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the stored shapes; the slots `layer_0` and so on are checked, but not returned."""
    expect(holds=len(target) == 2, otherwise=f"the weight is {list(target)}, FRoD is for linear layers only")
    cols, count = flat(target)[1], shapes["values"]
    want = {"diagonal": (cols,), "values": count[:1]}
    if "basis" in shapes or "places" in shapes:
        expect(holds={"basis", "places"} <= shapes.keys(), otherwise="only one of its basis and its places is stored")
        want |= {"basis": (cols, cols), "places": (2, *count)}
    wide = {shape[1] for slot, shape in shapes.items() if slot.startswith(LAYER_SLOT)}
    expect(holds=wide <= {cols}, otherwise=f"the layers that share its basis have {sorted(wide)} inputs, it has {cols}")
    return expect_shapes(shapes, want)


def check_settings(settings: Mapping[str, Any], shapes: Shapes, _: Shape) -> None:
    """Raise DoesNotFit if the basis is neither stored nor can be rebuilt from all layers that share it."""
    holds = "basis" in shapes or settings.get("layers", 0) > 0
    expect(holds=holds, otherwise="its basis is not stored, and not all layers that share it are known")


def delta(base: Tensor, t: FrodTensors) -> Tensor:
    """Return ΔW [n, out, in] from the untouched `base`."""
    import torch

    assert t.basis is not None and t.places is not None, "rebuilt"
    try:
        turned = torch.linalg.solve(t.basis, base.mT).mT
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # singular: PEFT takes the pseudoinverse too
        turned = base @ torch.linalg.pinv(t.basis, rtol=1e-6).mT
    size = length(turned, (1,))
    zero = size <= SHORTEST
    unit = (turned / size.masked_fill(zero, 1)).masked_fill(zero, 0)
    inner = torch.diag_embed(t.diagonal)
    at = t.places[:, 0] * inner.shape[2] + t.places[:, 1]
    inner = inner.flatten(1).scatter_add(1, at, t.values).view_as(inner)
    change: Tensor = unit @ inner @ t.basis.mT - base
    return change


def rebuild(loaded: Loaded) -> Mapping[str, Tensor]:
    """Return the basis that the layers share, rounded to the dtype of the weight, and the positions of S."""
    settings, cast = loaded.settings, loaded.cast
    weights = [cast(loaded.read(f"{LAYER_SLOT}{n}"), "F32") for n in range(settings["layers"])]
    basis = cast(joint_basis(weights, settings["ridge"], cast), settings["dtype"])
    places, count = drawn_places(settings["widths"], settings["share"], settings["seed"]), loaded.shapes["values"][0]
    expect(
        holds=places.shape[1] == count,
        otherwise=f"it has {count} numbers off the diagonal, its configuration gives {places.shape[1]}",
    )
    return {"basis": basis, "places": places}


FROD = Algorithm(
    "frod", FrodTensors, fitted_shapes, delta, "PEFT", reads_base=True, decomposes=True,
    shared=frozenset({"basis", "places"}),
    checks=Checks(
        {"places": lambda _, target: [below(target[1])], "layers": lambda _shapes, _target: [COUNT],
         "seed": lambda _shapes, _target: [SEED]},
        settings=check_settings,
    ),
    rebuild=Rebuild(
        frozenset({"basis", "places"}), rebuild,
        f"its basis is not stored (save_projection), and computed from the layers of one kind:  {ON_CPU}",
        of_relatives=True,
    ),
)  # fmt: skip

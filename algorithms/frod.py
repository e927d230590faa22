"""FRoD, the weight written anew in a basis that all layers of a kind share: W' = U (S + diag(l)) Vᵀ. PEFT 0.21.2
tuners/frod/layer.py.

V is stored once for all layers that end in the same name. If it is not stored (`save_projection=False`), it follows
from the weights of these layers. U follows from the untouched weight: its columns are those of
W V⁻ᵀ, scaled to length 1. S is zero except for some entries. W' contains the untouched weight only through U.

The steps are those of PEFT (0.21.2, tuners/frod/model.py), in fp32 on the CPU, which PEFT uses whatever the device.
LAPACK determines the signs of the eigenvectors. If eigenvalues are so close that rounding determines the vectors,
machines do not agree, and the layers are refused; the same steps in fp64 show this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .base import (
    LAYER_SLOT,
    ON_CPU,
    Algorithm,
    Checks,
    LoadedModule,
    Rebuild,
    Shape,
    Shapes,
    expect,
    expect_shapes,
    flat,
    length,
)
from .bounds import COUNT, SEED, below

if TYPE_CHECKING:
    from torch import Tensor

    from .base import Indices

BASIS_TOLERANCE: Final = 0.05
"""The largest relative distance between the bases in fp32 and fp64. With four layers of 2048 inputs it is 0.02: eleven
vectors are so close that rounding rotates them, which alters the change of a weight by 2 %. With one layer, or equal
layers, all eigenvalues are equal, and the basis is undetermined.
"""
UNDETERMINED: Final = (
    "the basis that its layers share is not stored, and for this base it depends on rounding; save the adapter again "
    "with save_projection=True"
)

SHORTEST = 1e-12
"""Columns of W V⁻ᵀ that are shorter become zeros."""


def joint_basis(weights: Sequence[Tensor], ridge: float, cast: Callable[[Tensor, str], Tensor]) -> Tensor:
    """Return V [in, in] in fp32, from weights [out, in] in fp32; raise DoesNotFit if rounding determines V.

    The order of the weights matters. `cast` is that of LoadedModule.
    """
    import torch

    basis, _ = _basis(weights, ridge)
    exact, upper = _basis([cast(weight, "F64") for weight in weights], ridge)
    single, double = (torch.cat([v, _left(upper, v)]) for v in (cast(basis, "F64"), exact))
    distance = torch.minimum((single - double).norm(dim=0), (single + double).norm(dim=0))
    expect(holds=not bool(distance.norm() > BASIS_TOLERANCE * double.norm()), otherwise=UNDETERMINED)
    return basis


def _basis(weights: Sequence[Tensor], ridge: float) -> tuple[Tensor, Tensor]:
    """Return V, and a matrix with the same right singular vectors as the stacked weights: R of their QR, or themselves.

    With Qᵢ the rows of Q that belong to weight i, V is Rᵀ times the eigenvectors of the mean of (Qᵢᵀ Qᵢ + ridge · I)⁻¹.
    """
    import torch

    stacked = torch.cat(list(weights))
    if stacked.shape[0] < stacked.shape[1]:
        right: Tensor = torch.linalg.svd(stacked, full_matrices=True)[2]
        return right.T, stacked
    orthonormal, upper = torch.linalg.qr(stacked)
    unit, mean = ridge * torch.eye(len(upper), dtype=upper.dtype), torch.zeros_like(upper)
    for part in orthonormal.split([len(weight) for weight in weights]):
        mean += torch.linalg.inv(part.T @ part + unit)
    mean /= len(weights)
    return upper.T @ torch.linalg.eigh(mean)[1], upper


def _left(upper: Tensor, basis: Tensor) -> Tensor:
    """Return U of all weights in the basis Q, its columns as long as those of V, so that both count alike."""
    import torch

    turned: Tensor = torch.linalg.lstsq(basis, upper.T).solution.T
    length = turned.norm(dim=0)
    scaled: Tensor = turned / length.where(length > 0, length.new_ones(())) * basis.norm(dim=0)
    return scaled


def drawn_places(widths: Sequence[int], share: float, seed: int) -> Tensor:
    """Return the rows and columns of S, [2, m], for the last of these widths; all draw in order from one generator."""
    import torch

    random, places = torch.Generator().manual_seed(seed), torch.empty(2, 0, dtype=torch.long)
    for width in widths:
        off = width * (width - 1)  # entries off the diagonal, row by row
        count = min(int(width * width * share), off)
        count = max(1, count) if share > 0 and off else count
        if not count:
            places = torch.empty(2, 0, dtype=torch.long)
            continue
        chosen = torch.randperm(off, generator=random)[:count]
        row, column = chosen // (width - 1), chosen % (width - 1)
        places = torch.stack([row, column + (column >= row)])
    return places


class FrodTensors(NamedTuple):
    """The shared basis, and the trained weight in that basis."""

    diagonal: Tensor  # l, [n, in]
    values: Tensor  # of S, [n, m]
    basis: Tensor | None = None  # V, [n, in, in]; shared
    places: Indices | None = None  # rows and columns of S, [n, 2, m]; shared
    layers: int = 0  # this and the following are set if V is not stored: how many layers share V
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


def rebuild(loaded: LoadedModule) -> Mapping[str, Tensor]:
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

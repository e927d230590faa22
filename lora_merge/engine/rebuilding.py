"""What PEFT rebuilds from the base when it loads an adapter, because it does not store it.

Singular vectors have a sign, and equal numbers an order, that no file tells: they are what the library computes on the
machine that loads the adapter. So these are the library's own steps (PEFT 0.21.2), in its precision, on the CPU,
whatever device the merge runs on; the formulas take what comes out for given. Where the file holds something to
compare with, a base that gives something else is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..algorithms import DoesNotFit, Shape, Shapes, flat
from ..algorithms.adamss import groups
from ..algorithms.frod import LAYER
from ..algorithms.peft_oft import block_size
from ..disk.files import StoredTensor
from ..matching.patch import Patch
from ..matching.relatives import kin
from ..matching.remarks import rebuilt
from ..models.weights import Weight, WeightView
from .joint_basis import drawn_places, joint_basis
from .placement import TORCH_DTYPES, Placement, host, stage
from .tensors import weight_values

Read: TypeAlias = Callable[[str], Tensor]
"""A slot that the base or the file holds, in the fitted shape, or "" for the weight [out, cols]: fp32 (fp64 if
stored so) on the CPU."""

Kin: TypeAlias = MutableMapping[tuple[WeightView, ...], Mapping[str, Tensor]]
"""The weights of all layers of a kind → what is rebuilt from them."""

AS_LOADED: Final = Placement(torch.device("cpu"), torch.float32)
WIDE: Final = Placement(torch.device("cpu"), torch.float64)

CLUSTERING_SEED: Final = 123456789
ROUNDS: Final = 10
MOST_SHARED: Final = 2**29
"""Numbers of all layers of a Uni-LoRA: 4 GiB of indices."""
NEAR: Final = 0.05
"""How far, of its length 1, a stored singular vector may be from the rebuilt one; bf16 has a hundredth of it."""


Maker: TypeAlias = Callable[[Read, Shapes, Shape, Mapping[str, Any]], Mapping[str, Tensor]]


def rebuild(name: str, read: Read, shapes: Shapes, target: Shape, settings: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """The slots of the row `name` that the file lacks, CPU tensors without n; DoesNotFit if this base does not give
    what was trained on."""
    return MAKERS[name](read, shapes, target, settings) if rebuilt(name, shapes) else {}


def from_base(
    patch: Patch, base: Mapping[str, Weight], fetch: Callable[[StoredTensor], Tensor], kept: Kin
) -> Mapping[str, Tensor]:
    """As `rebuild` for a patch, from the base before any adapter: so PEFT does where several act in turn too. What
    several layers share is made once and goes into `kept`, which is of one plan."""

    def read(slot: str) -> Tensor:
        view = patch.view if not slot else patch.beside.get(slot)
        if view is None:
            return stage([fetch(patch.module.slots[slot]).reshape(patch.shapes[slot])], AS_LOADED)[0]
        wide = any(base[piece.key].stored.dtype == "F64" for piece in view.pieces)
        found = [(weight_values(base[p.key], fetch).reshape(-1, p.cols)[p.start : p.stop], p) for p in view.pieces]
        at = WIDE if wide else AS_LOADED
        return torch.cat([stage([rows.t() if p.transposed else rows], at)[0] for rows, p in found])

    of = kin(patch)
    if of and of in kept:
        return kept[of]
    found = rebuild(patch.algorithm, read, patch.shapes, patch.view.shape, dict(patch.settings))
    if of:
        kept[of] = found
    return found


def as_loaded(values: Any, *, wide: bool = False) -> Tensor:
    """An array of fp64 as PEFT's steps want it: fp32, or `wide` as it is."""
    return torch.from_numpy(values if wide else values.astype(np.float32))


def _largest(read: Read, shapes: Shapes, _: Shape, settings: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """The places of the largest magnitudes, or of the smallest, in the order that topk gives them."""
    scores = read("").abs().flatten()
    chosen = torch.topk(scores, shapes["values"][0], largest=bool(settings.get("top", True)))
    return {"places": chosen.indices}


def _subspace(read: Read, shapes: Shapes, _: Shape, settings: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """The leading singular triples, as factors."""
    weight, count = read(""), shapes["turn"][1]
    rank = block_size(count) if settings.get("orthogonal", True) else count
    if settings.get("low_rank", False):
        left, values, right = low_rank_svd(weight, rank, settings.get("rounds", 10), settings.get("seed", 0))
        found = left, values, right.mT
    else:
        found = torch.linalg.svd(weight, full_matrices=False)
    left, values, right = found[0][:, :rank], found[1][:rank], found[2][:rank]
    if settings.get("balanced", False):
        root = values.sqrt()
        return {"left": left * root, "right": root[:, None] * right}
    return {"left": left * values, "right": right}


def low_rank_svd(weight: Tensor, rank: int, rounds: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """As torch.svd_lowrank after torch.manual_seed(seed), without touching the process' generator: U, S, V.

    Halko et al. 2009, arXiv:0909.4061, algorithms 4.4 and 5.1.
    """
    wide = weight.shape[0] < weight.shape[1]
    matrix = weight.mT if wide else weight
    random = torch.Generator().manual_seed(seed)
    start = torch.randn(matrix.shape[1], rank, dtype=matrix.dtype, generator=random)
    basis = torch.linalg.qr(matrix @ start).Q
    for _ in range(rounds):
        basis = torch.linalg.qr(matrix.mT @ basis).Q
        basis = torch.linalg.qr(matrix @ basis).Q
    small, values, right = torch.linalg.svd(basis.mT @ matrix, full_matrices=False)
    left, right = basis @ small, right.mT
    return (right, values, left) if wide else (left, values, right)


def _clusters(read: Read, shapes: Shapes, _: Shape, settings: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Which row of all groups' each row of the weight is: clusters of its left singular vectors, as many as groups."""
    whole = read("weight")
    if "bias" in shapes:
        whole = torch.cat([whole, read("bias")], 1)
    left, _values, right = low_rank_svd(whole, shapes["space"][0], 2, settings.get("seed", 0))
    if bool(((right.mT - read("space")).norm(dim=1) > NEAR).any()):
        raise DoesNotFit("its adamss_newB are not the singular vectors that PEFT finds in this base on the CPU")
    numbers = groups(shapes)
    if len(left) <= left.shape[1]:
        raise DoesNotFit("it has as many singular vectors as rows: all rows are equally far apart, and none is near")
    labels = kmeans(left.numpy(), len(numbers))
    if not np.array_equal(labels, kmeans(left.numpy().astype(np.float64), len(numbers))):
        raise DoesNotFit("which of its rows are together is a matter of rounding in this base")
    sizes = [int((labels == i).sum()) for i in numbers]
    stored = [shapes[f"up_{i}"][0] for i in numbers]
    if sizes != stored:
        raise DoesNotFit(f"its groups have {stored} rows, the clusters of this base {sizes}")
    return {"order": torch.from_numpy(np.argsort(np.argsort(labels, kind="stable"), kind="stable"))}


def _shares(_: Read, shapes: Shapes, target: Shape, settings: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Which entries of the shared vector a layer's numbers are, and one over the root of how often each is used."""
    (out, cols), rank, numbers = flat(target), settings["rank"], shapes["bank"][0]
    chosen, uses = spread(settings["total"], numbers, settings["shuffle"])
    middle, first = settings["start"] + rank * cols, settings["start"]
    down, up = chosen[first:middle].reshape(rank, cols), chosen[middle : middle + out * rank].reshape(out, rank)
    scale = torch.from_numpy(uses).rsqrt()
    stored = host(host(scale, TORCH_DTYPES[settings["dtype"]]), torch.float32)
    found = {"down_choice": torch.from_numpy(down), "up_choice": torch.from_numpy(up)}
    return found | {"down_weight": stored[found["down_choice"]], "up_weight": stored[found["up_choice"]]}


def _joint(read: Read, shapes: Shapes, _: Shape, settings: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """FRoD's basis for all layers of a kind, in the precision of the weight, and the places of S."""
    weights = [host(read(f"{LAYER}{n}"), torch.float32) for n in range(settings["layers"])]
    basis = host(host(joint_basis(weights, settings["ridge"]), TORCH_DTYPES[settings["dtype"]]), torch.float32)
    places = drawn_places(settings["widths"], settings["share"], settings["seed"])
    if places.shape[1] != shapes["values"][0]:
        raise DoesNotFit(f"it has {shapes['values'][0]} numbers off the diagonal, its configuration {places.shape[1]}")
    return {"basis": basis, "places": places}


@lru_cache(maxsize=1)
def spread(total: int, numbers: int, seed: int) -> tuple[Any, Any]:
    """(entry of a vector for each of `total` numbers, how often each entry is used, fp32): as even as can be, and
    shuffled, as PEFT's generate_index does it."""
    if total > MOST_SHARED:
        raise DoesNotFit(f"its layers have {total} numbers in all, more than are drawn at once")
    random = np.random.default_rng(seed)
    chosen = np.repeat(np.arange(numbers), total // numbers)
    if rest := total % numbers:
        chosen = np.concatenate([chosen, random.choice(numbers, size=rest, replace=False)])
    random.shuffle(chosen)
    return chosen, np.bincount(chosen, minlength=numbers).astype(np.float32)


def kmeans(points: Any, count: int) -> Any:
    """The cluster of each point, [n], as scikit-learn 1.9 finds them by Lloyd's steps from random points
    (`init="random"`, `n_init=1`, `max_iter=10`, that seed): sklearn/cluster/_kmeans.py. DoesNotFit where a cluster has
    run empty, which scikit-learn fills from afar."""
    points = points - points.mean(axis=0)
    chosen = np.random.RandomState(CLUSTERING_SEED).choice(
        len(points), count, replace=False, p=np.full(len(points), 1 / len(points))
    )
    centres, before = points[chosen], np.full(len(points), -1)
    enough = 1e-4 * float(points.var(axis=0).mean())
    for _ in range(ROUNDS):
        labels = _nearest(points, centres)
        sizes = np.bincount(labels, minlength=count)
        if not sizes.all():
            raise DoesNotFit("a cluster of its rows ran empty")
        moved = np.zeros_like(centres)
        np.add.at(moved, labels, points)  # one after the other, in the points' precision: so are ties decided alike
        moved *= (1 / sizes.astype(points.dtype))[:, None]
        shift, centres = float(((moved - centres) ** 2).sum()), moved
        if np.array_equal(labels, before):
            return labels
        if shift <= enough:
            break
        before = labels
    return _nearest(points, centres)


def _nearest(points: Any, centres: Any) -> Any:
    return np.argmin((centres * centres).sum(axis=1) - 2 * points @ centres.T, axis=1)


MAKERS: Final[Mapping[str, Maker]] = MappingProxyType(
    {"supertuning": _largest, "psoft": _subspace, "adamss": _clusters, "unilora": _shares, "frod": _joint}
)
"""Row of ALGORITHMS → what makes the slots that its file lacks."""

"""AdaMSS, groups of output rows with a small LoRA each in one subspace: ΔW[rowsᵢ] = Bᵢ Aᵢ P. PEFT 0.21.2
tuners/adamss/layer.py.

P holds the leading right singular vectors of the weight, to which the bias is appended as one more column; the last
column of ΔW is the change of the bias. The file does not store which rows belong to group i: the groups are clusters of
the left singular vectors, which PEFT computes when it loads the adapter.

The clusters are those of Lloyd's algorithm with the steps of scikit-learn 1.9, sklearn/cluster/_kmeans.py.
"""

from __future__ import annotations

import re
from collections import namedtuple
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from .base import ON_CPU, SEEDED, Algorithm, Checks, LoadedModule, Rebuild, Shape, Shapes, expect, flat
from .bounds import below
from .low_rank_svd import low_rank_svd

if TYPE_CHECKING:
    from torch import Tensor

PEFT_SEED: Final = 123456789
"""The seed that PEFT uses for AdaMSS."""
ROUNDS: Final = 10

ALL_APART: Final = "it has as many singular vectors as rows: so all rows have the same distance, and form no clusters"
MOST_GROUPS: Final = 32
"""The largest number of groups; PEFT's default is 5."""

VECTOR_TOLERANCE: Final = 0.05
"""The largest distance between a stored singular vector of length 1 and the rebuilt one; rounding to bf16 gives a
hundredth of it."""

_FIELDS: Final = {
    "space": "Tensor",  # P, [n, r, in] or, of a layer with a bias, [n, r, in + 1]
    "weight": "Tensor",  # [n, out, in]; the base's
    "down_0": "Tensor",  # A, [n, rᵢ, r]
    "up_0": "Tensor",  # B, [n, rows of the group, rᵢ]
    "seed": "int",  # `random_seed`
    "bias": "Tensor | None",  # [n, out, 1]; the base's
    "order": "Indices | None",  # weight row → row of the stacked groups, [n, out]; not stored
    **{f"{side}_{i}": "Tensor | None" for i in range(1, MOST_GROUPS) for side in ("down", "up")},
}

AdamssTensors = namedtuple("AdamssTensors", _FIELDS, defaults=(0, *[None] * (len(_FIELDS) - 5)))  # type: ignore[misc]
AdamssTensors.__annotations__ = _FIELDS


def kmeans(points: Any, count: int) -> Any:
    """Return the cluster [n] of each point of an array [n, r], as KMeans with `init="random"`, `n_init=1` and
    `max_iter=10` does. Raise DoesNotFit if a cluster is empty: scikit-learn fills it with distant points."""
    import numpy as np

    points = points - points.mean(axis=0)
    chosen = np.random.RandomState(PEFT_SEED).choice(
        len(points), count, replace=False, p=np.full(len(points), 1 / len(points))
    )
    centres, before = points[chosen], np.full(len(points), -1)
    enough = 1e-4 * float(points.var(axis=0).mean())
    for _ in range(ROUNDS):
        labels = _nearest(points, centres)
        sizes = np.bincount(labels, minlength=count)
        expect(holds=bool(sizes.all()), otherwise="a cluster of its rows is empty")
        moved = np.zeros_like(centres)
        np.add.at(moved, labels, points)  # one point after another, so that ties are decided alike
        moved *= (1 / sizes.astype(points.dtype))[:, None]
        shift, centres = float(((moved - centres) ** 2).sum()), moved
        if np.array_equal(labels, before):
            return labels
        if shift <= enough:
            break
        before = labels
    return _nearest(points, centres)


def _nearest(points: Any, centres: Any) -> Any:
    return ((centres * centres).sum(axis=1) - 2 * points @ centres.T).argmin(axis=1)


def groups(shapes: Shapes) -> list[int]:
    """Return the numbers of the groups, in order; raise DoesNotFit if a group or one of its factors is missing."""
    sides = {
        side: sorted(int(m[1]) for slot in shapes if (m := re.fullmatch(rf"{side}_(\d+)", slot)))
        for side in ("up", "down")
    }
    complete = sides["up"] == sides["down"] == list(range(len(sides["up"])))
    expect(holds=complete, otherwise=f"A has the groups {sides['down']}, B {sides['up']}")
    return sides["up"]


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the stored shapes; `target` is the shape of the weight or of the bias."""
    out, inputs = flat(shapes["weight"])
    space = shapes["space"]
    rank = space[0] if space else 0
    width = inputs + ("bias" in shapes)
    expect(
        holds=space == (rank, width) and inputs > 1 and (target == (out, inputs) or _is_vector(target, out)),
        otherwise=f"newB is {list(space)}, the weight {list(target)} has {width} columns with its bias",
    )
    want = {"space": space, "weight": (out, inputs), **({"bias": (out, 1)} if "bias" in shapes else {})}
    expect(holds="bias" not in shapes or _is_vector(shapes["bias"], out), otherwise=f"the bias is {shapes.get('bias')}")
    height = 0
    for i in groups(shapes):
        up, down = shapes[f"up_{i}"], shapes[f"down_{i}"]
        expect(
            holds=len(up) == 2 and down == (up[1], rank),
            otherwise=f"A of group {i} is {list(down)}, B {list(up)}, newB {list(space)}",
        )
        height += up[0]
        want |= {f"up_{i}": up, f"down_{i}": down}
    expect(holds=height == out, otherwise=f"its groups have {height} rows, the weight {out}")
    if "order" in shapes:
        expect(holds=shapes["order"] == (out,), otherwise=f"order is {list(shapes['order'])}")
        want["order"] = (out,)
    return want


def _is_vector(shape: Shape, size: int) -> bool:
    return shape in ((size,), (size, 1))


def delta(base: Tensor, t: Any) -> Tensor:
    """Return ΔW [n, out, in], or Δb [n, out, 1]; the values of `base` are not read."""
    import torch

    assert t.order is not None, "rebuilt"
    inputs = t.weight.shape[2]
    space = t.space[:, :, :inputs] if base.shape[2] == inputs else t.space[:, :, inputs:]
    pairs = [(getattr(t, f"up_{i}"), getattr(t, f"down_{i}")) for i in range(MOST_GROUPS)]
    rows = torch.cat([up @ down for up, down in pairs if up is not None], 1)  # [n, out, r]
    ordered = rows.gather(1, t.order[:, :, None].expand_as(rows))
    change: Tensor = ordered @ space
    return change


def rebuild(loaded: LoadedModule) -> Mapping[str, Tensor]:
    """Return the slot `order`, from clusters of the weight's left singular vectors, one cluster for each group."""
    import numpy as np
    import torch

    shapes, whole = loaded.shapes, loaded.read("weight")
    if "bias" in shapes:
        whole = torch.cat([whole, loaded.read("bias")], 1)
    left, _values, right = low_rank_svd(whole, shapes["space"][0], 2, loaded.settings.get("seed", 0))
    near = not bool(((right.mT - loaded.read("space")).norm(dim=1) > VECTOR_TOLERANCE).any())
    expect(holds=near, otherwise="its adamss_newB are not the singular vectors that PEFT finds in this base on the CPU")
    expect(holds=len(left) > left.shape[1], otherwise=ALL_APART)
    numbers = groups(shapes)
    labels = kmeans(left.numpy(), len(numbers))
    settled = np.array_equal(labels, kmeans(left.numpy().astype(np.float64), len(numbers)))
    expect(holds=settled, otherwise="the row clusters of this base depend on rounding")
    sizes, stored = [int((labels == i).sum()) for i in numbers], [shapes[f"up_{i}"][0] for i in numbers]
    expect(holds=sizes == stored, otherwise=f"its groups have {stored} rows, the clusters of this base {sizes}")
    return {"order": torch.from_numpy(np.argsort(np.argsort(labels, kind="stable"), kind="stable"))}


ADAMSS = Algorithm(
    "adamss", AdamssTensors, fitted_shapes, delta, "PEFT", also_bias=True,
    base_slots={"weight": "weight", "bias": "bias"},
    rebuild=Rebuild(frozenset({"order"}), rebuild, f"its groups of rows are clusters in the base, {ON_CPU}"),
    checks=Checks({**SEEDED, "order": lambda shapes, _: [below(shapes["weight"][0])]}),
)  # fmt: skip

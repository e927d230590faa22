"""Uni-LoRA, ΔW = B A, all values of A and B taken from one short vector. Li et al. 2025, arXiv:2506.00799.

A[i, j] = θ[a_ij] · s_ij, and B likewise; θ is stored once for all layers. The indices a and scales s are stored with
`save_indices`; otherwise they are drawn for all layers at once, in the order of the model's code, see
lora_merge/matching/layer_order.py. PEFT 0.21.2 tuners/unilora/model.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .base import Checks, Factorisation, LoadedModule, Rebuild, Shape, Shapes, expect, expect_shapes, flat, of_factors
from .bounds import COUNT, Bounds, below

if TYPE_CHECKING:
    from torch import Tensor

    from .base import Indices

MOST_INDICES: Final = 2**29
"""The most values of all layers together: 4 GiB of indices."""


class UniTensors(NamedTuple):
    """The shared vector, and for every number of both factors its index in the vector and its scale."""

    bank: Tensor  # θ, [n, values]; shared
    down_choice: Indices | None = None  # [n, r, in]
    down_weight: Tensor | None = None  # [n, r, in]
    up_choice: Indices | None = None  # [n, out, r]
    up_weight: Tensor | None = None  # [n, out, r]
    rank: int = 0  # r; this and the following are set if the indices are not stored
    shuffle: int = 0  # `proj_seed`, a seed of numpy
    start: int = 0  # position of this layer's first number among those of all layers
    total: int = 0  # count of the values of all layers
    dtype: str = ""  # that of the weight; PEFT rounds the scales to it


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the stored shapes."""
    (out, cols), choice = flat(target), shapes.get("down_choice", ())
    rank, bank = choice[0] if choice else 0, shapes["bank"]
    up, down = (out, rank), (rank, cols)
    want = {"down_choice": down, "down_weight": down, "up_choice": up, "up_weight": up}
    expect(holds=len(bank) == 1 and bank[0] > 0, otherwise=f"the vector that all layers share is {list(bank)}")
    stored = want.keys() & shapes.keys()
    expect(holds=len(stored) in (0, len(want)), otherwise=f"of its indices and scales only {sorted(stored)} are stored")
    return {**(expect_shapes(shapes, want) if stored else {}), "bank": bank}


def check_settings(settings: Mapping[str, Any], shapes: Shapes, _: Shape) -> None:
    """Raise DoesNotFit if the indices are not stored and the settings to draw them are missing."""
    total, rank = settings.get("total", 0), settings.get("rank", 0)
    expect(holds="down_choice" in shapes or (total > 0 and rank > 0), otherwise="its indices are not stored")


def entries(shapes: Shapes, _: Shape) -> list[Bounds]:
    """Return the range of indices into the vector."""
    return [below(shapes["bank"][0])]


def factors(base: Tensor, t: UniTensors) -> tuple[Tensor, Tensor]:
    """Return B and A; `base` is not read."""
    assert t.up_choice is not None and t.up_weight is not None, "rebuilt"
    assert t.down_choice is not None and t.down_weight is not None, "rebuilt"
    return _factor(t.bank, t.up_choice, t.up_weight), _factor(t.bank, t.down_choice, t.down_weight)


def _factor(bank: Tensor, choice: Tensor, weight: Tensor) -> Tensor:
    return bank.gather(1, choice.flatten(1)).view(weight.shape) * weight


def rebuild(loaded: LoadedModule) -> Mapping[str, Tensor]:
    """Return the indices of a layer's values, and their scales: 1 / √(number of uses of the entry in all layers)."""
    import torch

    (out, cols), settings = flat(loaded.target), loaded.settings
    rank, first = settings["rank"], settings["start"]
    chosen, uses = spread(settings["total"], loaded.shapes["bank"][0], settings["shuffle"])
    middle = first + rank * cols
    down, up = chosen[first:middle].reshape(rank, cols), chosen[middle : middle + out * rank].reshape(out, rank)
    scale = loaded.cast(torch.from_numpy(uses).rsqrt(), settings["dtype"])
    slots = {"down_choice": torch.from_numpy(down), "up_choice": torch.from_numpy(up)}
    return slots | {"down_weight": scale[slots["down_choice"]], "up_weight": scale[slots["up_choice"]]}


@lru_cache(maxsize=1)
def spread(total: int, entries: int, seed: int) -> tuple[Any, Any]:
    """Return the index of each of `total` values, and the number of uses of each entry in fp32.

    The uses are as even as possible, and shuffled, as in PEFT's generate_index, by numpy's generator."""
    import numpy as np

    expect(
        holds=total <= MOST_INDICES,
        otherwise=f"its layers have {total} numbers in all, at most {MOST_INDICES} can be drawn",
    )
    random = np.random.default_rng(seed)
    chosen = np.repeat(np.arange(entries), total // entries)
    if rest := total % entries:
        chosen = np.concatenate([chosen, random.choice(entries, size=rest, replace=False)])
    random.shuffle(chosen)
    return chosen, np.bincount(chosen, minlength=entries).astype(np.float32)


def _rank(shapes: Shapes, target: Shape) -> int:
    return shapes["down_weight"][0] if "down_weight" in shapes else min(flat(target))


UNILORA = of_factors(
    "unilora", UniTensors, fitted_shapes, Factorisation(_rank, factors), "arXiv:2506.00799",
    row_axes={"up_choice": 0, "up_weight": 0}, not_sliceable_with=frozenset({"total"}), shared=frozenset({"bank"}),
    checks=Checks(
        {"up_choice": entries, "down_choice": entries, "shuffle": lambda _shapes, _target: [below(2**64)],
         **dict.fromkeys(("rank", "start", "total"), lambda _shapes, _target: [COUNT])},
        settings=check_settings,
    ),
    rebuild=Rebuild(
        frozenset({"down_choice", "down_weight", "up_choice", "up_weight"}), rebuild,
        "it is not stored (save_indices): taken for one of the layers that its configuration means, in the order of "
        "the model's own class",
    ),
)  # fmt: skip

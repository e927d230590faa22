"""One small module for every row of ALGORITHMS; `doctor` computes it on each device, tests on the CPU."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from ..algorithms import ALGORITHMS
from ..dtypes import Shape, flat
from .reference import FormulaInput
from .reference.floats import Array

OUT, IN, RANK = 12, 16, 2
LINEAR_SHAPE: Final = (OUT, IN)
CONV: Final = (OUT, 4, 3, 3)
EXPERT_SHAPE: Final = (3, 8, 6)

_PAIR: Final = {"up": (OUT, RANK), "down": (RANK, IN)}
_SCALE: Final = {"scale": 0.75}
_LIMIT: Final = {"limit": 0.5}


@dataclass(frozen=True)
class Example:
    """A module by the fitted shapes of its slots (or the indices in them), and a weight that it fits."""

    slots: Mapping[str, Any]  # slot → shape, or a list of integers
    shape: Shape = LINEAR_SHAPE
    scalars: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


EXAMPLES: Final[Mapping[str, Example]] = MappingProxyType({
    "lora": Example({"up": (OUT, RANK), "down": (RANK, 4), "mid": (RANK, RANK, 9)}, CONV, _SCALE),
    "lora_sparse": Example({**_PAIR, "indices": [[1, 0, 11], [3, 15, 2]], "values": (3,), "size": [OUT, IN]},
                           scalars=_SCALE),
    "lora_sparse_tucker": Example({"up": (OUT, RANK), "down": (RANK, 4), "mid": (RANK, RANK, 9), "values": (3,),
                                   "indices": [[1, 0, 11], [3, 35, 2]], "size": [OUT, 36]}, CONV, _SCALE),
    "lora_fused": Example({"up": (8, RANK), "down": (2 * RANK, IN)}, scalars=_SCALE,
                          settings={"parts": ((0, 3), (7, 12))}),
    "lora_blocks": Example({"up_0": (5, RANK), "up_1": (OUT - 5, RANK), "down": (2 * RANK, IN)}, scalars=_SCALE),
    "lora_xs": Example({"left": (OUT, RANK), "core": (RANK, RANK), "right": (IN, RANK)}, scalars=_SCALE),
    "bora": Example({**_PAIR, "rows": (OUT, 1), "columns": (1, IN)}, scalars=_SCALE),
    "lora_transposed": Example({"up": (RANK, OUT), "down": (IN, RANK)}, settings={"lora_alpha": 3.0}),
    "lora_bias": Example({"diff": (OUT, 1)}, (OUT,), _SCALE),
    "lora_embedding": Example({"up": (IN, RANK), "down": (RANK, OUT)}, scalars=_SCALE),
    "lora_experts": Example({"up": (8, RANK, 3), "down": (3, RANK, 6)}, EXPERT_SHAPE, _SCALE),
    "lora_experts_transposed": Example({"up": (1, 6, RANK, 3), "down": (3, RANK, 8)}, EXPERT_SHAPE, _SCALE),
    "lora_stacked": Example({"up": (3, 8, RANK), "down": (3, RANK, 6)}, EXPERT_SHAPE, _SCALE),
    "lora_stacked_down": Example({"up": (3, 8, RANK), "down": (1, RANK, 6)}, EXPERT_SHAPE, _SCALE),
    "lora_stacked_up": Example({"up": (1, 8, RANK), "down": (3, RANK, 6)}, EXPERT_SHAPE, _SCALE),
    "lora_switch": Example({"up": (3, 8, RANK), "down": (3, RANK, 6)}, EXPERT_SHAPE, settings={"lora_alpha": 3.0}),
    "bdlora": Example({"up": (OUT, 2, 2), "down": (2, 2, 8)}, scalars=_SCALE),
    "pissa": Example(_PAIR, scalars=_SCALE),
    "olora": Example(_PAIR, scalars=_SCALE),
    "kasa": Example({**_PAIR, "values": (RANK, 1)}, scalars=_SCALE),
    "loha": Example({"w1_a": (RANK, OUT), "w1_b": (RANK, 4), "w2_a": (RANK, OUT), "w2_b": (RANK, 4),
                     "t1": (RANK, RANK, 9), "t2": (RANK, RANK, 9)}, CONV, _SCALE),
    "lokr": Example({"w1": (3, 2), "w2_a": (RANK, 4), "w2_b": (RANK, 2), "t2": (RANK, RANK, 9)}, CONV,
                    {"scale": 0.75, "rs_scale": 1.5}),
    "glora": Example({"a1": (4, RANK), "a2": (RANK, 4), "b1": (OUT, RANK), "b2": (RANK, 36)}, CONV, _SCALE),
    "glora_old": Example({"a1": (RANK, IN), "a2": (IN, RANK), "b1": (RANK, IN), "b2": (OUT, RANK)}, scalars=_SCALE),
    "tlora": Example({"p": (OUT, RANK), "q": (RANK, IN), "lambdas": (1, RANK)}, scalars=_SCALE,
                     settings={"algo": "tlora"}),
    "full": Example({"diff": LINEAR_SHAPE}),
    "full_rank": Example({"down": LINEAR_SHAPE}),
    "set": Example({"diff": LINEAR_SHAPE}),
    "ia3": Example({"diff": (2, 4), "on_input": [[1]]}, CONV),
    "diag_oft": Example({"blocks": (3, 4, 4), "rescale": (OUT, 1)}, scalars=_LIMIT),
    "oft_diag": Example({"blocks": (3, 4, 4)}),
    "boft": Example({"blocks": (2, 6, 2, 2), "rescale": (OUT, 1)}, scalars=_LIMIT),
    "onetrainer_oft": Example({"skew": (4, 6), "scaled": (1,)}),
    "onetrainer_oft_conv": Example({"skew": (9, 6)}, CONV),
    "adalora": Example({**_PAIR, "values": (RANK, 1)}, scalars=_SCALE),
    "peft_ia3_out": Example({"factor": (OUT, 1)}),
    "peft_ia3_in": Example({"factor": (2, 4)}, CONV),
    "peft_oft": Example({"skew": (4, 6)}, settings={"limit": 0.5, "terms": 5}),
    "peft_oft_embedding": Example({"skew": (1, 6)}, settings={"terms": 0}),
    "peft_oft2": Example({"blocks": (4, 4, 4), "rows": (OUT, 1)}),
    "peft_oft1": Example({"blocks": (3, 5, 5)}),
    "peft_boft": Example({"blocks": (2, 4, 4, 4), "rows": (OUT, 1)}),
    "vera": Example({"out_scale": (OUT, 1), "rank_scale": (RANK, 1)},
                    settings={"widest": (20, 24), "seed": 7}),
    "pvera": Example({"out_scale": (OUT, 1), "rank_scale": (2 * RANK, 1)},
                     settings={"widest": (20, 24), "seed": 7}),
    "randlora": Example({"rank_scale": (4, 3), "side_scale": (3, OUT)}, scalars=_SCALE,
                        settings={"widest": (20, 24), "seed": 7}),
    "fourierft": Example({"spectrum": (9,)}, scalars={"scale": 150.0}, settings={"seed": 777}),
    "hra": Example({"vectors": (IN, RANK)}),
    "miss": Example({"block": (5, OUT)}),
    "miss_mini": Example({"block": (4, 3)}),
    "miss_bat": Example({"block": (3, 4, 4)}),
    "shira": Example({"values": (3,), "places": [[1, 11, 1], [0, 15, 0]]}),
    "c3a": Example({"kernel": (3, 4, 4)}),
    "road": Example({"theta": (OUT * 2,), "stretch": (OUT * 2,)}, settings={"group": 4}),
    "delora": Example({**_PAIR, "length": (1, 1), "norms": (1, IN)}),
    "gralora": Example({"inputs": (2, 8, 2, 1), "outputs": (2, 2, 1, 6), **_PAIR}, scalars=_SCALE),
    "hira": Example(_PAIR),
    "hira_embedding": Example({"up": (IN, RANK), "down": (RANK, OUT)}),
    "vblora": Example({"down": (RANK, 4, 6), "up": (3, RANK, 6), "bank": (6, 4)}, settings={"top": 2}),
    "vblora_top": Example({"down_choice": np.arange(16).reshape(RANK, 4, 2) % 6, "down_weight": (RANK, 4, 1),
                           "up_choice": np.arange(12).reshape(3, RANK, 2) % 5, "up_weight": (3, RANK, 1),
                           "bank": (6, 4)}),
    "deft": Example({"subspace": (OUT, RANK), "content": (RANK, IN)}, scalars=_SCALE),
    "supertuning": Example({"values": (3,), "places": [0, 17, 191], **_PAIR}, scalars=_SCALE),
    "waveft": Example({"spectrum": (9,)}, scalars={"scale": 25.0},
                      settings={"seed": 777, "family": "db3", "transform": True}),
    "peanut": Example({"down": (RANK, OUT), "up": (OUT, RANK), "encoder_0": (RANK, RANK), "decoder_0": (RANK, RANK)},
                      scalars=_SCALE, settings={"depth": 1, "activation": "silu"}),
    "unilora": Example({"down_choice": np.arange(RANK * IN).reshape(RANK, IN) % 7, "down_weight": (RANK, IN),
                        "up_choice": np.arange(OUT * RANK).reshape(OUT, RANK) % 5, "up_weight": (OUT, RANK),
                        "bank": (7,)}),
    "peft_glora": Example({"a_up": (OUT, RANK), "a_down": (RANK, IN), "b": (OUT, 1)}),
    "peft_glora_bias": Example({"c_up": (IN, RANK), "c_down": (RANK, 1), "d": (OUT, 1), "e": (1, 1),
                                "weight": LINEAR_SHAPE}, (OUT,)),
    "psoft": Example({"turn": (1, 1), "rows": (RANK, 1), "columns": (1, RANK), "left": (OUT, RANK),
                      "right": (RANK, IN)},
                     settings={"terms": 0, "limit": 0.0, "orthogonal": True}),
    "adamss": Example({"space": (3, IN), "weight": LINEAR_SHAPE, "up_0": (5, 2), "down_0": (2, 3), "up_1": (7, 1),
                       "down_1": (1, 3), "order": [7, 0, 8, 1, 9, 2, 10, 3, 11, 4, 5, 6]}),
    "tinylora": Example({**_PAIR, "vector": (3,)}, settings={"seed": 43}),
    "frod": Example({"diagonal": (IN,), "values": (3,), "basis": (IN, IN), "places": [[0, 3, 15], [1, 2, 0]]}),
    "osf": Example({"left": (OUT, 3), "values": (3, 1), "right": (3, IN)}),
})  # fmt: skip


def shapes(example: Example) -> dict[str, Shape]:
    """Return the shape per slot."""
    return {slot: what if isinstance(what, tuple) else np.shape(what) for slot, what in example.slots.items()}


def tensors(name: str, example: Example) -> dict[str, Array]:
    """Return fixed random numbers in the shapes of the slots; indices as the example has them."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    arrays: dict[str, Array] = {}
    for slot, what in example.slots.items():
        arrays[slot] = random.standard_normal(what) * 0.3 if isinstance(what, tuple) else np.asarray(what, np.int64)
    return arrays


def weight(example: Example) -> Array:
    """Return a weight of the example's shape, flattened: [out, cols]."""
    return np.random.default_rng(5).standard_normal((example.shape[0], int(np.prod(example.shape[1:]))))


def formula_input(
    name: str, example: Example, base: Array, rows: Array | None = None, stored: dict[str, Array] | None = None
) -> FormulaInput:
    """Return the example as the reference formulas take it, for some rows of ΔW or all."""
    row, stored = ALGORITHMS[name], dict(tensors(name, example) if stored is None else stored)
    derived = row.derived(shapes(example), example.shape, example.settings)
    stored |= {slot: np.asarray(value) for slot, value in derived.items()}

    def read(slot: str, entries: Array | None) -> Array:
        value = stored[slot]
        value = value if slot in row.integer_slots else value.astype(np.float64)
        return value if entries is None else value[entries]

    settings = {**row.settings, **example.settings}
    chosen = np.arange(len(base)) if rows is None else rows

    def weights(entries: Array | None) -> Array:
        return base if entries is None else base[entries]

    return FormulaInput(
        read, weights, frozenset(stored), example.scalars, settings, example.shape, chosen, flat(example.shape)
    )

"""Examples of the files of PEFT's tuners, one maker per row of ALGORITHMS; see adapter_examples.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from lora_merge.algorithms import ALGORITHMS
from tests.algorithms.adapter_examples import EXAMPLES, INPUTS, Example, Maker

Stored = dict[str, Tensor]
PAIR = {"up": (12, 3), "down": (3, 10)}
OUT, COLS = (0,), (1, 2, 3)


def places(*sizes: int, count: int) -> Maker:
    """Different places of a weight, as one index per axis."""

    def make(g: torch.Generator) -> Tensor:
        chosen = torch.randperm(torch.Size(sizes).numel(), generator=g)[:count]
        return torch.stack(torch.unravel_index(chosen, sizes)) if len(sizes) > 1 else chosen

    return make


def numbers_below(shape: tuple[int, ...], bound: int) -> Maker:
    return lambda g: torch.randint(bound, shape, generator=g)


def start(first: Callable[[int, int], int], scale: float = 1.0) -> Callable[[Tensor, Stored], Stored]:
    """Factors that are singular triples of the weight, from `first(rank, how many there are)` on."""

    def make(weight: Tensor, stored: Stored) -> Stored:
        u, s, v = torch.linalg.svd(weight, full_matrices=False)
        rank = stored["values" if "values" in stored else "down"].shape[0]
        low = first(rank, len(s))
        kept = slice(low, low + rank)
        if "left" in stored:
            return {"left": u[:, kept], "values": s[kept], "right": v[kept]}
        values = {"values": s[kept] / scale} if "values" in stored else {}
        return {"up": u[:, kept] * (1 if values else s[kept] / scale), "down": v[kept], **values}

    return make


def olora(weight: Tensor, stored: Stored) -> Stored:
    q, r = torch.linalg.qr(weight)
    return {"up": q[:, : len(stored["down"])], "down": r[: len(stored["down"])]}


def ones(slot: str, *zeros: str) -> Callable[[Tensor, Stored], Stored]:
    return lambda _, stored: {
        slot: torch.ones_like(stored[slot]),
        **{z: torch.zeros_like(stored[z]) for z in zeros},
    }


def pairs(_: Tensor, stored: Stored) -> Stored:
    """Every reflection twice."""
    return {"vectors": stored["vectors"][:, :1].expand(-1, stored["vectors"].shape[1])}


def unseen(weight: Tensor, stored: Stored) -> Stored:
    """Vectors that the weight maps to zero."""
    _, _, v = torch.linalg.svd(weight.flatten(1), full_matrices=True)
    return {"vectors": v[len(weight) :][: stored["vectors"].shape[1]].T}


def taken_out(weight: Tensor, stored: Stored) -> Stored:
    """What DEFT takes out, put back in."""
    return {"content": torch.linalg.qr(stored["subspace"]).Q.T @ weight}


def _oft() -> list[Example]:
    def case(label: str, target: tuple[int, ...], blocks: int, **told: Any) -> Example:
        blind = OUT if blocks > 1 else (*OUT, *COLS)
        return Example(label, target, {"skew": (blocks, 15)}, settings={"terms": 5, **told}, blind=blind, spread=0.1)

    return [
        case("series", (10, 24), 4),
        case("old series", (10, 24), 4, doubled_last=True),
        case("exact", (10, 24), 4, terms=0),
        case("shared", (10, 24), 1),
        case("bounded", (10, 24), 4, limit=0.1),
        case("conv", (10, 4, 3, 2), 4),
    ]


def _vera(rank: int, doubled: int) -> list[Example]:
    own = {"out_scale": (12,), "rank_scale": (doubled * rank,)}
    stored = {**own, "down": (doubled * rank, 14), "up": (20, rank)}
    loose = (("down", 1), ("up", 0))
    return [
        Example("stored", (12, 10), stored, blind=(1,), free=loose),
        Example("drawn", (12, 10), own, settings={"seed": 3, "widest": (20, 14)}, blind=(1,),
                free=(("rank_scale", 0),)),
    ]  # fmt: skip


def _randlora() -> list[Example]:
    def case(label: str, target: tuple[int, int]) -> Example:
        slots = {"rank_scale": (4, 3), "side_scale": (3, 10), "down": (4, 1, 11), "up": (14, 3, 4)}
        larger = 0 if target[0] > target[1] else 1
        return Example(label, target, slots, blind=(larger,), free=(("down", 2), ("up", 0), ("up", 1)))

    drawn = {"rank_scale": (4, 3), "side_scale": (3, 10)}
    told = {"seed": 3, "widest": (14, 11)}
    return [
        *(case("tall", (12, 10)), case("wide", (10, 12))),
        Example("drawn", (12, 10), drawn, settings=told, blind=(0,)),
        Example("drawn, sparse", (12, 10), drawn, settings={**told, "sparse": True}, blind=(0,)),
    ]


def _waveft() -> list[Example]:
    def case(family: str, **told: Any) -> Example:
        settings = {"seed": 777, "family": family, **told}
        return Example(family, (12, 9), {"spectrum": (9,)}, settings=settings, blind=(0, 1), free=(("spectrum", 0),))

    return [case("db1"), case("db4"), case("sym5"), case("coif1"), case("sym9", transform=False)]


def _peanut() -> list[Example]:
    inner = {f"{side}_{i}": (3, 3) for side in ("encoder", "decoder") for i in range(4)}
    slots = {"down": (3, 12), "up": (12, 3)}
    told = {"depth": 4, "activation": "silu"}
    return [
        Example("shallow", (12, 10), slots, blind=INPUTS),
        Example("four deep", (12, 10), {**slots, **inner}, settings=told, blind=INPUTS, spread=1.0),
    ]


def _unilora() -> list[Example]:
    slots = {"down_choice": (3, 10), "down_weight": (3, 10), "up_choice": (12, 3), "up_weight": (12, 3), "bank": (7,)}
    values = {slot: numbers_below(slots[slot], 7) for slot in ("down_choice", "up_choice")}
    return [Example("linear", (12, 10), slots, values, free=(("bank", 0),), spread=1.0)]


def _vblora() -> list[Example]:
    slots = {"down": (2, 5, 7), "up": (4, 2, 7), "bank": (7, 3)}
    return [Example("two of seven", (12, 15), slots, settings={"top": 2})]


def _vblora_top() -> list[Example]:
    slots = {"down_choice": (2, 5, 2), "down_weight": (2, 5, 1), "up_choice": (4, 2, 3), "up_weight": (4, 2, 2)}
    values = {name: numbers_below(slots[name], 7) for name in ("down_choice", "up_choice")}
    return [Example("stored choice", (12, 15), {**slots, "bank": (7, 3)}, values, free=(("bank", 0),))]


def _road() -> list[Example]:
    def case(label: str, target: tuple[int, ...], count: int) -> Example:
        slots = {"theta": (count,), "stretch": (count,)}
        return Example(label, target, slots, neutral=ones("stretch", "theta"), settings={"group": 4}, blind=INPUTS)

    return [case("1", (12, 10), 6), case("2", (12, 10), 12), case("4", (12, 10), 24), case("bias", (12,), 12)]


def _deft() -> list[Example]:
    both, alone = {"subspace": (12, 3), "content": (3, 10)}, {"subspace": (12, 3)}
    qr = {"method": "qr"}
    return [
        Example("relu", (12, 10), both, unnoticed=("content",)),
        Example("qr", (12, 10), both, neutral=taken_out, settings=qr, unnoticed=("content",)),
        Example("PaRa", (12, 10), alone, blind=INPUTS, free=(("subspace", 1),)),
    ]


def as_it_was(weight: Tensor, stored: Stored) -> Stored:
    """What FRoD makes of the weight before it is trained."""
    turned = torch.linalg.solve(stored["basis"], weight.T).T
    return {"diagonal": turned.norm(dim=0), "values": torch.zeros_like(stored["values"]), "basis": stored["basis"]}


def _psoft() -> list[Example]:
    pair = {"left": (12, 3), "right": (3, 10)}
    ends = {"rows": (3,), "columns": (3,)}
    told = {"terms": 5, "limit": 0.3}

    def still(_: Tensor, stored: Stored) -> Stored:
        return {**stored, **{s: torch.ones_like(stored[s]) for s in ends}, "turn": torch.zeros_like(stored["turn"])}

    def free(_: Tensor, stored: Stored) -> Stored:
        return {**stored, "turn": torch.eye(3, dtype=stored["turn"].dtype)}

    return [
        Example("exact", (12, 10), {"turn": (3,), **ends, **pair}, neutral=still, unnoticed=(*ends, *pair)),
        Example("series", (12, 10), {"turn": (3,), **pair}, settings=told, unnoticed=(*pair,)),
        Example(
            "free", (12, 10), {"turn": (3, 3), **pair}, neutral=free, settings={"orthogonal": False}, unnoticed=(*pair,)
        ),
    ]


def _adamss() -> list[Example]:
    pairs = {"up_0": (5, 2), "down_0": (2, 4), "up_1": (7, 1), "down_1": (1, 4), "order": (12,)}
    many = {f"{side}_{i}": (1, 1) if side == "up" else (1, 4) for i in range(32) for side in ("up", "down")}

    def case(label: str, target: tuple[int, ...], weight: int, slots: dict[str, tuple[int, ...]]) -> Example:
        held = {"space": (4, weight + ("bias" in slots)), "weight": (target[0], weight), **slots}
        made = {"order": lambda g: torch.randperm(target[0], generator=g)}
        return Example(label, target, held, made, spread=1.0, unnoticed=("order",))

    return [
        case("one group", (12, 10), 10, {"up_0": (12, 2), "down_0": (2, 4), "order": (12,)}),
        case("two groups", (12, 10), 10, pairs),
        case("with a bias", (12, 10), 10, {**pairs, "bias": (12,)}),
        case("its bias", (32,), 10, {**many, "order": (32,), "bias": (32,)}),
    ]


def _peft_glora() -> list[Example]:
    pair = {"a_up": (12, 3), "a_down": (3, 10), "b_up": (12, 3), "b_down": (3, 10)}
    return [
        Example("factors", (12, 10), pair),
        Example("vectors", (12, 10), {"a": (12, 1), "b": (12, 1)}, blind=INPUTS),
        Example("numbers", (12, 10), {"a": (1,), "b": (1,)}, blind=(0, 1)),
        Example("whole", (12, 10), {"a": (12, 10), "b": (12, 10)}),
    ]


def _peft_glora_bias() -> list[Example]:
    weight, pair = {"weight": (60, 10)}, {"c_up": (10, 3), "c_down": (3, 1)}
    return [
        Example("factors", (60,), {**pair, "d": (1,), "e": (1,), **weight}),
        Example("vectors", (60,), {"c": (10, 1), "d": (60,), "e": (60,), **weight}),
        Example(
            "a trained bias",
            (60,),
            {**pair, "d": (60,), "e": (60,), "trained": (60,), **weight},
            unnoticed=("trained",),
            neutral=lambda own, stored: {
                s: own if s == "trained" else 0 * t for s, t in stored.items() if s != "weight"
            },
        ),
    ]


def _experts(target: tuple[int, ...]) -> list[Example]:
    slots = {"up": (8, 6), "down": (6, 10)}
    return [Example("three of rank two", target, slots, alpha=4.0, blind=(0,))]


PEFT_EXAMPLES: Mapping[str, list[Example]] = {
    "lora_bias": [Example("bias", (12,), {"diff": (12,)}), Example("BEFT", (12,), {"diff": (1, 12)})],
    "lora_embedding": [Example("table", (12, 10), {"up": (10, 3), "down": (3, 12)}, alpha=6.0)],
    "lora_experts": [*_experts((3, 8, 10)), *(Example(f"turned, {e.label}", (3, 10, 8), e.slots, blind=(0,))
                                            for e in _experts((3, 10, 8)))],
    "lora_experts_transposed": _experts((3, 10, 8)),
    "bdlora": [
        Example("blocks of A", (12, 10), {"up": (12, 4), "down": (4, 5)}, alpha=6.0),
        Example("blocks of B", (12, 10), {"up": (12, 2), "down": (4, 10)}, alpha=6.0, free=(("up", 1),)),
        Example("whole", (12, 10), PAIR, alpha=6.0),
    ],
    "pissa": [Example("linear", (12, 10), PAIR, neutral=start(lambda *_: 0, 2.0), alpha=6.0)],
    "olora": [Example("linear", (12, 10), PAIR, neutral=olora, alpha=6.0)],
    "kasa": [Example("linear", (12, 10), {**PAIR, "values": (3,)}, neutral=start(lambda r, n: n - r, 2.0), alpha=6.0,
                     unnoticed=("values",))],
    "adalora": [Example("linear", (12, 10), {**PAIR, "values": (3, 1)}, unnoticed=("values",))],
    "peft_ia3_out": [
        Example("linear", (12, 10), {"factor": (12, 1)}, neutral=ones("factor"), blind=INPUTS),
        Example("conv", (12, 5, 3, 2), {"factor": (1, 12, 1, 1)}, neutral=ones("factor"), blind=INPUTS),
        Example("bias", (12,), {"factor": (12, 1)}, neutral=ones("factor")),
    ],
    "peft_ia3_in": [
        Example("linear", (12, 10), {"factor": (1, 10)}, neutral=ones("factor"), blind=OUT),
        Example("conv", (12, 5, 3, 2), {"factor": (1, 5, 1, 1)}, neutral=ones("factor"), blind=(0, 2, 3)),
        Example("groups", (12, 5, 3, 2), {"factor": (1, 10, 1, 1)}, neutral=ones("factor"), blind=(0, 2, 3)),
    ],
    "peft_oft": _oft(),
    "peft_oft_embedding": [Example("table", (10, 24), {"skew": (4, 15)}, settings={"terms": 5}, blind=OUT)],
    "peft_oft2": [
        Example("blocks", (10, 24), {"blocks": (4, 6, 6), "rows": (10, 1)}, neutral=ones("rows", "blocks")),
        Example("bounded", (10, 24), {"blocks": (4, 6, 6), "rows": (10, 1)}, neutral=ones("rows", "blocks"),
                settings={"limit": 0.01}),
    ],
    "peft_oft1": [Example("cut to size", (10, 7), {"blocks": (3, 4, 4)}, blind=(0, *INPUTS), free=(("blocks", 0),))],
    "peft_boft": [
        Example("one stage", (10, 24), {"blocks": (1, 4, 6, 6), "rows": (10, 1)}, neutral=ones("rows", "blocks"),
                free=(("blocks", 0),)),
        Example("three stages", (10, 4, 3, 2), {"blocks": (3, 4, 6, 6), "rows": (1, 10)},
                neutral=ones("rows", "blocks"), free=(("blocks", 0),)),
    ],
    "vera": _vera(3, 1),
    "pvera": _vera(3, 2),
    "randlora": _randlora(),
    "fourierft": [Example("linear", (12, 10), {"spectrum": (9,)}, settings={"seed": 777}, blind=(0, 1),
                          free=(("spectrum", 0),), spread=30.0)],
    "hra": [
        Example("chain", (12, 10), {"vectors": (10, 4)}, neutral=pairs, blind=OUT, free=(("vectors", 1),)),
        Example("orthogonal", (4, 10), {"vectors": (10, 3)}, neutral=unseen, settings={"orthogonal": True},
                blind=OUT, free=(("vectors", 1),)),
        Example("conv", (12, 5, 2, 1), {"vectors": (10, 4)}, neutral=pairs, blind=OUT, free=(("vectors", 1),)),
        Example("more than columns", (12, 4), {"vectors": (4, 6)}, neutral=pairs, blind=OUT, free=(("vectors", 1),)),
    ],
    "miss": [Example("ragged", (12, 10), {"block": (4, 12)}, blind=INPUTS, free=(("block", 0),))],
    "miss_mini": [Example("tiled", (12, 10), {"block": (5, 4)}, blind=INPUTS, free=(("block", 0), ("block", 1)))],
    "miss_bat": [Example("blocks", (12, 8), {"block": (3, 4, 4)})],
    "shira": [Example("seven", (12, 10), {"values": (7,), "places": (2, 7)}, {"places": places(12, 10, count=7)},
                      blind=(0, 1))],
    "c3a": [Example("blocks", (12, 8), {"kernel": (3, 2, 4)})],
    "road": _road(),
    "delora": [Example("linear", (12, 10), {**PAIR, "length": (1,), "norms": (10,)}, spread=1.0)],
    "gralora": [
        Example("blocks", (12, 10), {"inputs": (2, 5, 4), "outputs": (2, 4, 6)}, alpha=6.0),
        Example("hybrid", (12, 10), {"inputs": (2, 5, 4), "outputs": (2, 4, 6), **PAIR}, alpha=6.0),
    ],
    "hira": [
        Example("linear", (12, 10), PAIR),
        Example("conv", (12, 5, 3, 2), {"up": (12, 3, 1, 1), "down": (3, 5, 3, 2)}),
    ],
    "hira_embedding": [Example("table", (12, 10), {"up": (10, 3), "down": (3, 12)})],
    "vblora": _vblora(),
    "vblora_top": _vblora_top(),
    "waveft": _waveft(),
    "peanut": _peanut(),
    "unilora": _unilora(),
    "deft": _deft(),
    "supertuning": [
        Example("sparse", (12, 10), {"values": (7,), "places": (7,)}, {"places": places(120, count=7)}, blind=(0, 1),
                unnoticed=("places",)),
        Example("Supra", (12, 10), {"values": (7,), "places": (7,), **PAIR}, {"places": places(120, count=7)},
                unnoticed=("places",)),
    ],
    "peft_glora": _peft_glora(),
    "peft_glora_bias": _peft_glora_bias(),
    "psoft": _psoft(),
    "adamss": _adamss(),
    "tinylora": [
        Example("stored", (12, 10), {**PAIR, "vector": (5,), "mixed": (5, 3, 3)}, spread=1.0),
        Example("drawn", (12, 10), {**PAIR, "vector": (5,)}, settings={"seed": 7}, free=(("vector", 0),), spread=1.0),
    ],
    "frod": [Example("linear", (12, 10), {"diagonal": (10,), "values": (7,), "basis": (10, 10), "places": (2, 7)},
                     {"places": places(10, 10, count=7)}, neutral=as_it_was, blind=(0,))],
    "osf": [Example("four smallest", (12, 10), {"left": (12, 4), "values": (4,), "right": (4, 10)},
                    neutral=start(lambda m, n: n - m))],
}  # fmt: skip

ALL_EXAMPLES = {**EXAMPLES, **PEFT_EXAMPLES}

every = pytest.mark.parametrize(
    ("name", "example"),
    [pytest.param(n, e, id=f"{n}: {e.label}") for n in ALGORITHMS for e in ALL_EXAMPLES.get(n, [])],
)
"""For tests of every example of every row."""

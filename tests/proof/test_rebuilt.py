"""What a row makes of the base on loading: right ones pass, whatever their signs; wrong ones of every kind are found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lora_merge
from lora_merge.algorithms import ALGORITHMS, LoadedModule
from lora_merge.algorithms.adamss import kmeans
from lora_merge.algorithms.low_rank_svd import low_rank_svd
from lora_merge.errors import VerificationFailed
from lora_merge.proof.peft_initialisation import CHECKS, RebuiltSlots
from lora_merge.proof.reference.floats import Array, as_dtype
from lora_merge.recipes.replay import prove
from tests.kit.files import save
from tests.kit.tensors import rand

OUT, IN = 12, 10
RANDOM = np.random.default_rng(3)
WEIGHT = RANDOM.standard_normal((OUT, IN)).astype(np.float32)
LAYERS = {f"layer_{n}": RANDOM.standard_normal((OUT, IN)).astype(np.float32) for n in range(3)}


def clustered() -> tuple[dict[str, Array], list[int]]:
    """A weight, what AdaMSS stores of it, and how many rows are in each of two clusters."""
    left, _, right = low_rank_svd(torch.from_numpy(WEIGHT), 3, 2, 0)
    sizes = np.bincount(kmeans(left.numpy(), 2), minlength=2)
    return {"weight": WEIGHT, "space": right.mT.contiguous().numpy()}, sizes.tolist()


CLUSTERED, HEIGHTS = clustered()
CASES: Mapping[str, tuple[dict[str, Array], dict[str, tuple[int, ...]], dict[str, Any]]] = {
    # row: what there is to read, shapes of what the file holds, settings
    "supertuning": ({"": WEIGHT}, {"values": (7,)}, {}),
    "psoft": ({"": WEIGHT}, {"turn": (1, 3)}, {}),
    "adamss": (CLUSTERED, {"space": (3, IN), "weight": (OUT, IN), "up_0": (HEIGHTS[0], 1), "up_1": (HEIGHTS[1], 1), "down_0": (1, 3), "down_1": (1, 3)}, {}),
    "unilora": ({}, {"bank": (50,)}, {"rank": 2, "start": 44, "total": 211, "shuffle": 5, "dtype": "BF16"}),
    "frod": (LAYERS, {"diagonal": (IN,), "values": (5,)},
             {"layers": 3, "ridge": 1e-3, "dtype": "BF16", "widths": (IN,), "share": 0.05, "seed": 2}),
}  # fmt: skip


def made(name: str, **settings: Any) -> RebuiltSlots:
    values, shapes, told = CASES[name]
    more = shapes, (OUT, IN), told | settings
    found = ALGORITHMS[name].rebuilt(LoadedModule.of_arrays(values.__getitem__, as_dtype, *more))
    return RebuiltSlots({slot: np.asarray(v).copy() for slot, v in found.items()}, values.__getitem__, *more)


def spoiled(remade: RebuiltSlots, slot: str, change: Callable[[Array], Array]) -> RebuiltSlots:
    return RebuiltSlots({**remade.slots, slot: change(remade.slots[slot])}, remade.read, remade.shapes, remade.shape, remade.settings)  # fmt: skip


def test_every_row_that_makes_slots_has_a_check() -> None:
    assert CHECKS.keys() == CASES.keys() == {name for name, row in ALGORITHMS.items() if row.rebuild is not None}
    assert all(row.rebuild.slots for row in ALGORITHMS.values() if row.rebuild is not None)


@pytest.mark.parametrize(
    ("name", "settings"),
    [*((name, {}) for name in CASES), ("supertuning", {"top": False}), ("psoft", {"balanced": True}),
     ("psoft", {"low_rank": True}), ("psoft", {"low_rank": True, "rounds": 0}), ("frod", {"dtype": "F32"}),
     *(("unilora", {"dtype": dtype}) for dtype in ("F32", "F64", "F16"))],
)  # fmt: skip
def test_rebuilt_values_that_are_right_pass(name: str, settings: dict[str, Any]) -> None:
    remade = made(name, **settings)
    assert CHECKS[name](remade)


def test_signs_are_free() -> None:
    signs = np.array([1.0, -1.0, -1.0])
    both = spoiled(spoiled(made("psoft"), "left", lambda a: a * signs), "right", lambda a: a * signs[:, None])
    assert CHECKS["psoft"](both)
    assert CHECKS["frod"](spoiled(made("frod"), "basis", lambda a: a * np.where(np.arange(IN) % 2, 1, -1)))


@pytest.mark.parametrize("first", [0, 1, 7])
def test_psoft_has_the_largest_triples_alone(first: int) -> None:
    """Others of the same weight are orthonormal and mapped to each other, too."""
    u, s, v = np.linalg.svd(WEIGHT.astype(np.float64), full_matrices=False)
    part = slice(first, first + 3)
    right = spoiled(made("psoft"), "left", lambda _: u[:, part] * s[part])
    assert CHECKS["psoft"](spoiled(right, "right", lambda _: v[part])) is (first == 0)


def test_vectors_of_psoft_are_orthonormal() -> None:
    """Of a randomised method nothing else is known: others are mapped to each other too."""
    weight, left = WEIGHT.astype(np.float64), np.linalg.svd(WEIGHT.astype(np.float64))[0][:, 3:6]
    right = np.linalg.pinv(left.T @ weight)
    right += 0.5 * np.linalg.svd(left.T @ weight)[2][3][:, None]  # what the weight maps to none of them
    right /= np.linalg.norm(right, axis=0)
    sizes = np.diag(left.T @ weight @ right)
    whole = spoiled(made("psoft", low_rank=True), "left", lambda _: left * sizes)
    assert not CHECKS["psoft"](spoiled(whole, "right", lambda _: right.T))


@pytest.mark.parametrize("size", [1e-4, 1e4])
def test_tolerance_of_triples_is_a_share_of_the_weight(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    values, shapes, settings = CASES["psoft"]
    monkeypatch.setitem(CASES, "psoft", ({"": values[""] * np.float32(size)}, shapes, settings))
    remade = made("psoft")
    assert CHECKS["psoft"](remade)
    for change in (lambda a: a * 1.01, lambda a: a + 0.01 * np.roll(a, 1, 1)):
        assert not CHECKS["psoft"](spoiled(remade, "left", change))


def swapped(values: Array) -> Array:
    return values[[1, 0, *range(2, len(values))]]


WRONG: tuple[tuple[str, str, Callable[[Array], Array]], ...] = (
    ("supertuning", "places", swapped),
    ("supertuning", "places", lambda a: a * 0 + a[0]),
    ("supertuning", "places", lambda a: (a + 1) % WEIGHT.size),
    ("psoft", "left", lambda a: a * 1.1),
    ("psoft", "left", lambda a: -a),
    ("psoft", "right", swapped),
    ("psoft", "left", lambda a: a[:, [1, 0, 2]]),
    ("psoft", "right", lambda a: np.roll(a, 1, 1)),
    ("adamss", "order", swapped),
    ("adamss", "order", lambda a: a[::-1].copy()),
    ("adamss", "order", lambda a: a * 0),
    ("unilora", "down_weight", lambda a: a * 2),
    ("unilora", "up_choice", lambda a: a + 50),
    ("unilora", "up_weight", np.square),
    ("frod", "basis", lambda a: a[:, [1, 0, *range(2, IN)]]),
    ("frod", "basis", lambda a: a * 1.5),
    ("frod", "basis", lambda a: a.T.copy()),
    ("frod", "places", lambda a: a * 0),
    ("frod", "places", lambda a: np.stack([a[0], a[0]])),
)


@pytest.mark.parametrize(("name", "slot", "change"), WRONG)
def test_rebuilt_values_that_are_wrong_are_detected(name: str, slot: str, change: Callable[[Array], Array]) -> None:
    remade = made(name)
    wrong = spoiled(remade, slot, change)
    assert not np.array_equal(wrong.slots[slot], remade.slots[slot])
    assert not CHECKS[name](wrong)


def test_merge_that_makes_them_wrong_does_not_get_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels and the proof take the same ones: only the look at them can notice."""
    base = save({"a.weight": rand(OUT, IN)}, tmp_path / "base.safetensors")
    folder = tmp_path / "adapter"
    folder.mkdir()
    save({"base_model.model.a.psoft_R.weight": rand(3)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "PSOFT", "r": 3}')
    out = tmp_path / "out.safetensors"
    lora_merge.merge(base, folder, out)
    assert prove(out, full=True)["proven"]
    right = torch.linalg.svd
    monkeypatch.setattr(torch.linalg, "svd", lambda m, **k: (lambda u, s, v: (u, s, v.roll(1, 1)))(*right(m, **k)))
    with pytest.raises(VerificationFailed, match="do not satisfy the definition"):
        lora_merge.merge(base, folder, tmp_path / "wrong.safetensors")
    assert not (tmp_path / "wrong.safetensors").exists()

"""Merging by a method of `combine` is merging what `combine` writes, and the proof finds what is not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lora_merge
from lora_merge.engine import combination, row_blocks
from lora_merge.engine.row_matrix import RowMatrix
from lora_merge.errors import ResourceError, VerificationFailed
from lora_merge.merge_methods import COMBINATIONS, DIVISORS, SUM, MethodParameters
from lora_merge.proof import combination_methods
from lora_merge.recipes.replay import prove
from tests.kit.adapters import kohya
from tests.kit.command_line import run
from tests.kit.files import load, save
from tests.kit.methods import FUSED, KINDS, MODULES, flux, module
from tests.kit.models import sd1
from tests.kit.pairs import examples
from tests.kit.tensors import rand

NUMBERS: dict[str, dict[str, Any]] = {
    "slerp": {"t": 0.3},
    "consensus": {},
    "mean": {},
    "karcher": {},
    "model_stock": {},
}
"""Method → its numbers, where they are not those below."""

PARTS = [name for name in MODULES if name != FUSED]
"""Modules for q, k or v alone."""

METHODS = sorted(set(COMBINATIONS) - {SUM})


def numbers(method: str) -> dict[str, Any]:
    """Numbers for a method that make it do something."""
    if method in NUMBERS:
        return NUMBERS[method]
    found: dict[str, Any] = {"density": 0.4}
    found |= {"gamma": 0.1} if "breadcrumbs" in method else {}
    return found | ({"epsilon": 0.2, "seed": 3} if "della" in method else {"seed": 3} if "dare" in method else {})


CHANGED = 15
"""Weights of the tiny checkpoint that the LoRAs change."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A tiny checkpoint in fp32, and two LoRAs for it."""
    folder, whole = tmp_path_factory.mktemp("combined"), sd1()
    base = {k: v.float() for k, v in whole.items() if v.is_floating_point() and "blocks.2." not in k}
    some = [save(kohya(base, seed=n), folder / f"{n}.safetensors") for n in (100, 300)]
    return save(base, folder / "base.safetensors"), some[0], some[1]


@pytest.mark.few(1)
@pytest.mark.parametrize("method", METHODS)
def test_methods_give_what_merging_the_combined_adapter_gives(
    method: str, files: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    base, *adapters = files
    given: list[Any] = [(adapters[0], 0.8), (adapters[1], -0.5)] if method != "mean" else [*adapters]
    options: Any = {**numbers(method), "method": method}
    lora_merge.merge(base, given, tmp_path / "one.safetensors", **options)
    lora_merge.combine(given, tmp_path / "c.safetensors", base=base, algorithm="full", dtype="fp32", **options)
    lora_merge.merge(base, tmp_path / "c.safetensors", tmp_path / "two.safetensors")
    one, two, before = (load(p) for p in (tmp_path / "one.safetensors", tmp_path / "two.safetensors", base))
    assert any(not torch.equal(one[key], before[key]) for key in before)
    for key, value in one.items():
        np.testing.assert_allclose(value, two[key], rtol=3e-7, atol=3e-8, err_msg=key)
    assert prove(tmp_path / "one.safetensors", full=True, search=[base.parent])["tensors"] == CHANGED


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["ties", "della_ties"])
def test_bytes_depend_on_no_window_and_replay_makes_them_again(
    method: str, files: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    base, *adapters = files
    words = [f"--{name}={value}" for name, value in numbers(method).items()]
    assert run(base, *adapters, "-o", tmp_path / "a.safetensors", "--method", method, *words)[::2] == (0, "")
    options: Any = {**numbers(method), "method": method, "max_memory": "8MiB"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_blocks, "BLOCK_ELEMENTS", 40)
        lora_merge.merge(base, adapters, tmp_path / "b.safetensors", **options)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    lora_merge.replay(tmp_path / "a.safetensors", tmp_path / "c.safetensors", search=[base.parent])
    assert (tmp_path / "c.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()
    held = load(tmp_path / "a.safetensors")
    options.pop("max_memory")
    for key, value in lora_merge.merge_state_dict(load(base), adapters, **options).items():
        assert torch.equal(held[key], value)


MUTANTS = {
    "one entry too many is kept": lambda make: lambda change, count: make(change, count + 1),
    "one entry too few is kept": lambda make: lambda change, count: make(change, count - 1),
    "the smallest are kept": lambda make: lambda change, count: SimpleNamespace(
        of=lambda block, first: ~make(change, change.numel() - count).of(block, first)
    ),
    "each row has a threshold of its own": lambda make: lambda change, count: SimpleNamespace(
        of=lambda block, _: torch.cat(
            [make(RowMatrix.of(row[None]), count * row.numel() // change.numel()).of(row[None], 0) for row in block]
        )
    ),
}  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("wrong", MUTANTS)
def test_full_proof_finds_a_wrong_threshold(wrong: str, files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, *adapters = files
    options: Any = {"method": "ties", "density": 0.4, "verify": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(combination, "largest", MUTANTS[wrong](combination.largest))
        lora_merge.merge(base, adapters, tmp_path / "o.safetensors", **options)
    with pytest.raises(VerificationFailed, match=f"of {CHANGED} merged tensors are not what"):
        prove(tmp_path / "o.safetensors", full=True, search=[base.parent])


def changes(count: int) -> list[torch.Tensor]:
    return [rand(12, 20, seed=n).double() for n in range(count)]


def proof_rows(change: torch.Tensor) -> combination_methods.ReferenceRows:
    """A change as the proof has it, five rows at a time."""
    numbers = change.numpy()
    return combination_methods.ReferenceRows((len(numbers), numbers.shape[1]), lambda some: numbers[some], 5)


@pytest.mark.parametrize("method", METHODS)
def test_implementations_agree(method: str) -> None:
    given = changes(2 if method == "slerp" else 3)
    strengths, seeds = [1.0, 0.5, -0.7][: len(given)], ["a", "b", "c"]
    for more in ({}, {"elect": "count", "normalise": "weight"}, {"normalise": "none", "scale": 0.5}):
        n = MethodParameters(**{**numbers(method), **more})
        one = combination.combined(method, [g.clone() for g in given], strengths, n, seeds)
        parts, slack = combination_methods.combined(
            COMBINATIONS[method], [proof_rows(g) for g in given], strengths, n, seeds, rows=np.arange(12), vector=False
        )
        assert (slack <= 1e-6).all()
        np.testing.assert_allclose(one.numpy(), np.sum(parts, axis=0), atol=1e-11)


@pytest.mark.parametrize("method", ["ties", "prune", "breadcrumbs", "della"])
def test_entries_whose_choice_depends_on_rounding_are_within_the_slack(method: str) -> None:
    """Whole numbers, of which many are equal, beside the same numbers with other last digits."""
    rng, n = np.random.default_rng(5), MethodParameters(density=0.5, gamma=0.1, epsilon=0.2, seed=3)
    exact = [rng.integers(-3, 4, (12, 7)).astype(np.float64) for _ in range(2)]
    rounded = [change * (1 + rng.choice([-1e-15, 1e-15], change.shape)) for change in exact]
    (sums, slack), (others, _) = (
        (np.sum(parts, axis=0), bound)
        for parts, bound in (
            combination_methods.combined(
                COMBINATIONS[method], [proof_rows(torch.from_numpy(change)) for change in changes], [1.0, 0.5], n,
                ["a", "b"], rows=np.arange(12), vector=False
            )
            for changes in (exact, rounded)
        )
    )  # fmt: skip
    assert np.abs(sums - others).max() > 0.1, "the digits decide about none"
    assert (np.abs(sums - others) <= slack + 1e-9).all()


ONE = st.tuples(st.sampled_from(KINDS), st.sampled_from([FUSED, *PARTS]), st.sampled_from([1.0, 0.6, -0.5, 0.0]))
CERTAIN = sorted(m for m in METHODS if not COMBINATIONS[m].draws and m not in ("slerp", "mean"))


@settings(max_examples=examples(12), deadline=None)
@given(
    chosen=st.lists(ONE, min_size=2, max_size=3), whole=st.booleans(), method=st.sampled_from(CERTAIN),
    normalise=st.sampled_from(DIVISORS),
)  # fmt: skip
def test_changes_of_one_weight_meet_whatever_makes_them(
    chosen: list[Any],
    whole: bool,  # noqa: FBT001
    method: str,
    normalise: str,
) -> None:
    """Thresholds, norms and cosines are those of a whole weight of the base; formulas read the unchanged base."""
    base = flux(fused=whole)
    adapters = [(module(kind, name, seed=10 * n), s) for n, (kind, name, s) in enumerate(chosen)]
    options: Any = numbers(method) | ({"normalise": normalise} if COMBINATIONS[method].elects else {})
    got = lora_merge.merge_state_dict(base, adapters, method=method, **options)
    alone = [lora_merge.merge_state_dict(base, [(a, 1.0)], compute_dtype="fp64") for a, _ in adapters]
    for key, before in base.items():
        own = [
            (s, a[key] - before) for a, (_, s) in zip(alone, adapters, strict=True) if s and (a[key] != before).any()
        ]
        right = before.clone()
        if own:
            given = [proof_rows(t.flatten(1)) for _, t in own]
            parts, _ = combination_methods.combined(COMBINATIONS[method], given, [s for s, _ in own], MethodParameters(**options),
                                         [""] * len(own), rows=np.arange(len(before)), vector=False)  # fmt: skip
            right += torch.from_numpy(np.sum(parts, axis=0)).view(before.shape)
        torch.testing.assert_close(got[key], right, rtol=1e-9, atol=1e-11, msg=key)


@pytest.mark.few(2)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("method", ["ties", "della", "karcher"])
def test_every_kind_of_change_is_proven(method: str, whole: bool, tmp_path: Path) -> None:  # noqa: FBT001
    base = {k: v.float() for k, v in flux(fused=whole).items()}
    some = [{k: v.float() for k, v in module(kind, FUSED, seed=n).items()} for n, kind in enumerate(KINDS)]
    files = [save(tensors, tmp_path / f"{n}.safetensors") for n, tensors in enumerate([base, *some])]
    lora_merge.merge(files[0], files[1:], tmp_path / "o.safetensors", method=method, dtype="bf16", **numbers(method))  # type: ignore[arg-type]
    assert prove(tmp_path / "o.safetensors", full=True)["tensors"] == (1 if whole else 3)


def test_value_that_replaces_a_parameter_is_a_change_too(tmp_path: Path) -> None:
    base = {"a.weight": rand(6, 8, seed=1), "a.bias": rand(6, seed=2), "b.weight": rand(6, 8, seed=3)}
    other = {"b.lora_up.weight": rand(6, 2, seed=5), "b.lora_down.weight": rand(2, 8, seed=6)}
    values = [{"a.weight": rand(6, 8, seed=7 + n), "a.bias": rand(6, seed=9 + n), **other} for n in range(2)]
    files = [save(tensors, tmp_path / f"{n}.safetensors") for n, tensors in enumerate((base, *values))]
    lora_merge.merge(files[0], files[1:], tmp_path / "o.safetensors", method="ties", density=0.5)
    got = load(tmp_path / "o.safetensors")
    for key in ("a.weight", "a.bias"):
        given = [(v[key] - base[key]).double().view(len(base[key]), -1) for v in values]
        right = combination.combined("ties", given, [1.0, 1.0], MethodParameters(density=0.5), ["", ""], vector=False)
        torch.testing.assert_close(got[key], (base[key] + right.view_as(base[key])).float())
    assert prove(tmp_path / "o.safetensors", full=True)["tensors"] == 3
    lora_merge.combine(files[1:], tmp_path / "c.safetensors", base=files[0], method="ties", density=0.5,
                       algorithm="full", dtype="fp32")  # fmt: skip
    lora_merge.merge(files[0], tmp_path / "c.safetensors", tmp_path / "two.safetensors")
    for key, value in load(tmp_path / "two.safetensors").items():
        torch.testing.assert_close(got[key], value)


def test_scale_holds_for_a_value_that_one_adapter_gives(tmp_path: Path) -> None:
    base, value = {"a.weight": rand(6, 8, seed=1), "b.weight": rand(6, 8, seed=3)}, rand(6, 8, seed=7)
    other = {"b.lora_up.weight": rand(6, 2, seed=5), "b.lora_down.weight": rand(2, 8, seed=6)}
    files = [save(t, tmp_path / f"{n}.safetensors") for n, t in enumerate((base, {"a.weight": value, **other}, other))]
    lora_merge.merge(files[0], files[1:], tmp_path / "o.safetensors", method="consensus", scale=0.5)
    got = load(tmp_path / "o.safetensors")["a.weight"]
    torch.testing.assert_close(got, base["a.weight"] + 0.5 * (value - base["a.weight"]))


def test_weight_whose_changes_take_more_than_the_limit_is_refused_from_headers(tmp_path: Path) -> None:
    """The message names the limit that is enough."""
    weight = {"a.weight": rand(512, 512, seed=1)}
    module = {"a.lora_up.weight": rand(512, 2, seed=2), "a.lora_down.weight": rand(2, 512, seed=3)}
    files = [save(weight, tmp_path / "base.safetensors"), save(module, tmp_path / "a.safetensors")]
    options: Any = {"method": "ties", "density": 0.5, "overwrite": True}
    with pytest.raises(ResourceError, match="all changes of a weight at once") as told:
        lora_merge.plan(files[0], [files[1]] * 2, tmp_path / "o.safetensors", max_memory="8MiB", **options)
    enough = told.value.fix.removeprefix("give max_memory=").strip('"')
    assert lora_merge.merge(files[0], [files[1]] * 2, tmp_path / "o.safetensors", max_memory=enough, **options)
    assert lora_merge.merge(files[0], [files[1]] * 2, tmp_path / "p.safetensors", max_memory="8MiB")


@pytest.mark.parametrize("method", ["della"])
def test_draws_are_those_of_the_adapter_and_its_module(
    method: str, files: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    """With a base or without one, in either order, under any name of the file."""
    base, *adapters = files
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(adapters[0].read_bytes())
    options: Any = {"method": method, "algorithm": "full", "dtype": "fp32", **numbers(method)}
    made = [
        load(Path(lora_merge.combine(some, tmp_path / f"{n}.safetensors", base=given, **options).output))
        for n, (some, given) in enumerate(
            ((adapters, base), (adapters, None), (adapters[::-1], base), ([copy, adapters[1]], None))
        )
    ]
    for other in made[1:]:
        assert made[0].keys() == other.keys()
        for key, value in made[0].items():
            torch.testing.assert_close(value, other[key], rtol=1e-6, atol=1e-9)
    twice = load(Path(lora_merge.combine([copy, adapters[0]], tmp_path / "t.safetensors", **options).output))
    once = load(Path(lora_merge.combine([copy], tmp_path / "o.safetensors", **options).output))
    assert any(not torch.allclose(twice[key], 2 * once[key]) for key in once), "the second one draws for itself"


def test_biases_that_have_no_direction_are_reported(tmp_path: Path) -> None:
    base = {"a.weight": rand(6, 8, seed=1), "a.bias": rand(6, seed=2)}
    module = {"a.diff": rand(6, 8, seed=3), "a.diff_b": rand(6, seed=4)}
    files = [save(t, tmp_path / f"{n}.safetensors") for n, t in enumerate((base, module))]
    for method, told in (("slerp", True), ("ties", False)):
        options: Any = {"method": method, **({"t": 0.5} if told else {"density": 0.5})}
        report = lora_merge.merge(files[0], [files[1], (files[1], 0.5)], tmp_path / f"{method}.safetensors", **options)
        assert any("they are added" in note for note in report.notes) == told


def test_state_dicts_draw_by_their_content(files: tuple[Path, Path, Path]) -> None:
    base, first, second = (load(f) for f in files)
    options: Any = {"method": "dare", "density": 0.5}

    def made(*adapters: Any) -> dict[str, torch.Tensor]:
        return lora_merge.merge_state_dict(base, [*adapters], **options)

    one, again, seeded = made(first, second), made({**first}, {**second}), made(first, second)
    assert all(value.equal(again[key]) and value.equal(seeded[key]) for key, value in one.items())
    options["seed"] = 1
    other = made(first, second)
    assert any(not value.equal(other[key]) for key, value in one.items())
    changed = {key: value.clone() for key, value in first.items()}
    key = next(k for k in changed if k.endswith("lora_up.weight"))
    changed[key][0, 0] += 1e-3
    assert sum(not torch.allclose(value, other[k]) for k, value in made(changed, second).items()) > 1, "other draws"

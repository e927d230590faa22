"""What a merge records of its changes while it folds, held against numpy on the whole tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lora_merge
from lora_merge.change_statistics import Measurement
from lora_merge.engine import change_sample
from lora_merge.engine.change_sample import RowSample, Sampling
from lora_merge.files.safetensors import parse_file
from tests.kit.adapters import kohya
from tests.kit.files import load, save
from tests.kit.measured import NAMES, STRENGTHS, assert_same, lora, numbers_of, survival_of
from tests.kit.models import sd1
from tests.kit.tensors import Tensors, rand

KEYS = [f"{name}.weight" for name in NAMES]


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["keep", "bf16", "fp32", "fp8_e4m3fn"])
@pytest.mark.parametrize(("count", "method"), [(1, "sum"), (2, "sum"), (2, "compose")])
def test_every_number_is_what_numpy_says(count: int, method: str, dtype: str, tmp_path: Path) -> None:
    """Without the proof: in all, by part, by block, by tensor."""
    base, out = sd1(), tmp_path / "out.safetensors"
    save(base, tmp_path / "base.safetensors")
    files = [tmp_path / f"{n}.safetensors" for n in range(count)]
    made = [lora(file, NAMES[n:], 0.002, 10 * n) for n, file in enumerate(files)]
    changes = [{k: s * v for k, v in change.items()} for change, s in zip(made, STRENGTHS, strict=False)]
    pairs = list(zip(files, STRENGTHS, strict=False))
    report = lora_merge.merge(
        tmp_path / "base.safetensors", pairs, out, dtype=dtype, method=method, verify=False, compute_dtype="fp64"
    )
    numbers, after = report.numbers, load(out)
    for key in KEYS:
        assert_same(numbers["tensors"][key], numbers_of(base, after, changes, [key]))
    assert_same(numbers["all"], numbers_of(base, after, changes, KEYS))
    assert numbers["components"]["unet"] == numbers["all"]
    first, second = numbers["blocks"].values()
    assert_same(first, numbers_of(base, after, changes, KEYS[:2]))
    assert_same(second, numbers_of(base, after, changes, KEYS[2:]))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One number in 16 is looked at, also of small weights."""
    monkeypatch.setattr(Sampling.__init__, "__defaults__", (16, 1, False, frozenset()))
    yield


@pytest.mark.usefixtures("few")
def test_norms_of_factors_are_exact_whatever_is_looked_at(tmp_path: Path) -> None:
    """Of each adapter and of their sum, also where they cancel in part; the rest is an estimate."""
    name = "model.layers.0.self_attn.q_proj"
    base = {f"{name}.weight": rand(2048, 64, seed=3)}
    save(base, tmp_path / "base.safetensors")
    deltas = []
    for n in range(2):
        factors = {f"{name}.lora_A.weight": rand(4, 64, seed=1), f"{name}.lora_B.weight": rand(2048, 4, seed=n)}
        save(factors, tmp_path / f"{n}.safetensors")
        deltas.append(
            STRENGTHS[n] * factors[f"{name}.lora_B.weight"].double() @ factors[f"{name}.lora_A.weight"].double()
        )
    pairs = [(tmp_path / f"{n}.safetensors", STRENGTHS[n]) for n in range(2)]
    report = lora_merge.merge(tmp_path / "base.safetensors", pairs, tmp_path / "out.safetensors", verify=False)
    every = report.numbers["all"]
    assert (every["of"], every["elements"]) == (2048 * 64, 2048 * 64 // 16)
    assert every["change"] == pytest.approx(float(sum(deltas).norm()), rel=1e-5)
    assert [a["change"] for a in every["adapters"]] == pytest.approx([float(d.norm()) for d in deltas], rel=1e-5)
    assert every["weight"] == pytest.approx(float(base[f"{name}.weight"].norm()), rel=0.5)
    assert every["retained"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("runs", [False, True])
def test_blocks_in_a_row_are_sampled_by_every_fourth(
    *, runs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums stand for every number, whether parts of a weight have many blocks, one, or a short last one."""
    monkeypatch.setattr("lora_merge.engine.row_blocks.BLOCK_ELEMENTS", 64 * 16)  # 16 rows
    monkeypatch.setattr(Sampling.__init__, "__defaults__", (8, 1, runs, frozenset()))
    monkeypatch.setattr("lora_merge.engine.window_merger.checked", lambda _: frozenset())
    for name, size in (("RUN", 8), ("PERIOD", 2048), ("LEAST_BLOCK", 64)):
        monkeypatch.setattr(change_sample, name, size)
    name, rows = "model.layers.0.self_attn.q_proj", 16 * 9 + 5
    save({f"{name}.weight": torch.ones(rows, 64)}, tmp_path / "base.safetensors")
    save(
        {f"{name}.lora_A.weight": torch.ones(2, 64), f"{name}.lora_B.weight": torch.ones(rows, 2)},
        tmp_path / "a.safetensors",
    )
    report = lora_merge.merge(
        tmp_path / "base.safetensors", tmp_path / "a.safetensors", tmp_path / "out.safetensors", verify=False
    )
    every = report.numbers["all"]
    assert (every["of"], every["changed"]) == (rows * 64, 1.0)
    assert every["elements"] < rows * 64 / 4
    assert every["weight"] == pytest.approx((rows * 64) ** 0.5, rel=1e-5)
    assert every["change"] == pytest.approx(2 * (rows * 64) ** 0.5, rel=1e-5)


def other_formulas() -> Tensors:
    """A whole difference, LoHa, LoKr and DoRA, one layer each."""
    return {
        "m.full.diff": rand(24, 16) * 0.1,
        "m.loha.hada_w1_a": rand(24, 2), "m.loha.hada_w1_b": rand(2, 16),
        "m.loha.hada_w2_a": rand(24, 2, seed=1), "m.loha.hada_w2_b": rand(2, 16, seed=1),
        "m.lokr.lokr_w1": rand(4, 4), "m.lokr.lokr_w2": rand(6, 4),
        "m.dora.lora_up.weight": rand(24, 2), "m.dora.lora_down.weight": rand(2, 16), "m.dora.dora_scale": rand(24, 1).abs() + 1,
    }  # fmt: skip


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_formula_is_measured(dtype: str, tmp_path: Path) -> None:
    adapter = other_formulas()
    base = {f"m.{kind}.weight": rand(24, 16, seed=n) for n, kind in enumerate(("full", "loha", "lokr", "dora"))}
    save(base, tmp_path / "base.safetensors")
    save(adapter, tmp_path / "a.safetensors")
    out = tmp_path / "o.safetensors"
    found = lora_merge.merge(tmp_path / "base.safetensors", tmp_path / "a.safetensors", out, dtype=dtype, verify=False)
    exact = lora_merge.merge(
        tmp_path / "base.safetensors",
        tmp_path / "a.safetensors",
        tmp_path / "e.safetensors",
        dtype="fp32",
        compute_dtype="fp64",
        verify=False,
    )
    assert exact.numbers["all"]["retained"] == pytest.approx(1, abs=1e-6)
    written, wanted = load(out), load(tmp_path / "e.safetensors")
    for key, weight in base.items():
        change = wanted[key].double() - weight.double()
        applied = written[key].double() - weight.to(written[key].dtype).double()
        numbers: Any = found.numbers["tensors"][key]
        assert numbers["change"] == pytest.approx(float(change.norm()), rel=1e-4), key
        want = survival_of(change, written[key].double() - wanted[key].double())
        assert {entry: numbers[entry] for entry in want} == pytest.approx(want, rel=1e-4, abs=1e-6)
        assert numbers["changed"] == pytest.approx(float((applied != 0).double().mean()), abs=1e-6)


def test_numbers_that_are_not_finite_or_were_cut_are_left_out(tmp_path: Path) -> None:
    base = {"m.a.weight": rand(24, 16)}
    base["m.a.weight"][0, 0], base["m.a.weight"][1, 1] = float("nan"), float("inf")
    save(base, tmp_path / "base.safetensors")
    diff = torch.full((24, 16), 0.5)
    diff[2, 2] = 1e6
    save({"m.a.diff": diff}, tmp_path / "a.safetensors")
    report = lora_merge.merge(
        tmp_path / "base.safetensors", tmp_path / "a.safetensors", tmp_path / "o.safetensors", dtype="fp16",
        on_overflow="saturate", verify=False,
    )  # fmt: skip
    every = report.numbers["all"]
    assert every["saturated"] == 1 and every["largest"] == pytest.approx(0.5, rel=1e-3)
    assert every["change"] == pytest.approx(0.5 * np.sqrt(24 * 16 - 3), rel=1e-4)
    assert every["retained"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("method", ["ties", "dare"])
def test_changes_that_become_one_are_reported_before_that(method: str, tmp_path: Path) -> None:
    base, name = sd1(), NAMES[0]
    save(base, tmp_path / "base.safetensors")
    files = [tmp_path / f"{n}.safetensors" for n in range(2)]
    made = [lora(file, [name], 0.2, 10 * n) for n, file in enumerate(files)]
    report = lora_merge.merge(
        tmp_path / "base.safetensors", [*zip(files, STRENGTHS, strict=True)], tmp_path / "o.safetensors", method=method,
        dtype="fp32", verify=False,
    )  # fmt: skip
    key = f"{name}.weight"
    every = report.numbers["tensors"][key]
    wanted = [abs(s) * float(d[key].norm()) for s, d in zip(STRENGTHS, made, strict=True)]
    assert [a["change"] for a in every["adapters"]] == pytest.approx(wanted, rel=1e-4)
    assert [a["retained"] for a in every["adapters"]] == [None, None]
    change = load(tmp_path / "o.safetensors")[key].double() - base[key].double()
    assert every["change"] == pytest.approx(float(change.norm()), rel=1e-4)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["fp8_scaled", "int8", "nvfp4", "mxfp8"])
def test_codes_are_measured_as_they_are_decoded(dtype: str, tmp_path: Path) -> None:
    """Of a plain base, and of the quantised one that comes of it: held against the proof, which looks at all rows."""
    name = "model.layers.0.self_attn.q_proj"
    save({f"{name}.weight": rand(128, 256, seed=3) * 0.05}, tmp_path / "plain.safetensors")
    lora_factors = {
        f"{name}.lora_A.weight": rand(4, 256, seed=1),
        f"{name}.lora_B.weight": rand(128, 4, seed=2) * 0.002,
    }
    save(lora_factors, tmp_path / "a.safetensors")
    base = tmp_path / "plain.safetensors"
    for step in ("first", "second"):
        out = tmp_path / f"{step}.safetensors"
        report = lora_merge.merge(base, tmp_path / "a.safetensors", out, dtype=dtype if step == "first" else "keep")
        want = lora_merge.verify(out, full=True)["numbers"]["all"]
        found = report.numbers["all"]
        assert 0 < found["elements"] <= found["of"] == 128 * 256
        entries = ["weight", "retained", "noise", *(["changed"] if step == "second" and dtype != "int8" else [])]
        assert found["change"] == pytest.approx(want["change"], rel=1e-4)
        for entry in entries:
            assert found[entry] == pytest.approx(want[entry], rel=0.3), (step, entry)
        base = out


def test_blocks_that_are_folded_in_one_call_are_measured_where_a_scale_does_not_cover_one_of_them(
    tmp_path: Path,
) -> None:
    names = [f"model.layers.{n}.self_attn.q_proj" for n in range(3)]
    save({f"{n}.weight": rand(32, 64, seed=k) * 0.05 for k, n in enumerate(names)}, tmp_path / "plain.safetensors")
    factors = {f"{n}.lora_A.weight": rand(4, 64, seed=k) for k, n in enumerate(names)}
    for k, name in enumerate(names):
        factors[f"{name}.lora_B.weight"] = rand(32, 4, seed=k + 9) * (3.0 if k == 1 else 0.0005)
    save(factors, tmp_path / "a.safetensors")
    base, out = tmp_path / "fp8.safetensors", tmp_path / "out.safetensors"
    lora_merge.merge(tmp_path / "plain.safetensors", tmp_path / "a.safetensors", base, dtype="fp8_scaled", verify=False)
    report = lora_merge.merge(base, [(tmp_path / "a.safetensors", 20.0)], out, verify=False)
    want = lora_merge.verify(out, full=True)["numbers"]["tensors"]
    assert len(want) == len(names)
    for key, numbers in report.numbers["tensors"].items():
        kept = () if names[1] in key else ("retained", "noise", "changed")
        own = {entry: numbers[entry] for entry in ("elements", "weight", "change", *kept)}
        assert own == pytest.approx({entry: want[key][entry] for entry in own}, rel=1e-3)


@pytest.mark.parametrize("dtype", ["keep", "fp32"])
def test_numbers_are_in_the_order_of_the_tensors_of_the_output(dtype: str, tmp_path: Path) -> None:
    """Threads add up their samples at different times, and windows of several dtypes are not folded in file order."""
    base = sd1()
    base |= {name: value.float() for name, value in [*base.items()][::3]}
    files = save(base, tmp_path / "b.safetensors"), save(kohya(base), tmp_path / "a.safetensors")
    report, got = lora_merge.merge(*files, out := tmp_path / "o.safetensors", dtype=dtype), dict[str, Any]()
    merged = lora_merge.merge_state_dict(base, [files[1]], dtype=dtype, numbers=got)
    order = sorted(parse_file(out).tensors.values(), key=lambda info: info.offset)
    assert [*report.numbers["tensors"]] == [info.name for info in order if info.name in report.numbers["tensors"]]
    assert [*got["tensors"]] == [name for name in merged if name in got["tensors"]]
    assert got["tensors"].keys() == report.numbers["tensors"].keys()


def test_tensors_in_memory_are_measured_too(tmp_path: Path) -> None:
    """A live model has the numbers of the merge; changes that are lost in the rounding are told."""
    layer = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(16, 16, bias=False, dtype=torch.bfloat16)})
    small = {"q_proj.lora_A.weight": rand(2, 16, seed=1), "q_proj.lora_B.weight": rand(16, 2, seed=2) * 1e-5}
    save(small, tmp_path / "a.safetensors")
    with pytest.warns(UserWarning, match="of the change of a.safetensors is lost"):
        merged = lora_merge.merge_into(layer, tmp_path / "a.safetensors")
    delta = small["q_proj.lora_B.weight"].double() @ small["q_proj.lora_A.weight"].double()
    assert merged.numbers["all"]["change"] == pytest.approx(float(delta.norm()), rel=1e-4)
    assert merged.numbers["all"]["retained"] < 0.9
    with pytest.warns(UserWarning, match="of the change of a.safetensors is lost"):
        numbers: dict[str, Any] = {}
        layer["q_proj"].weight.data.zero_()
        merged.undo()
        lora_merge.merge_state_dict(layer.state_dict(), tmp_path / "a.safetensors", numbers=numbers)
    assert numbers == merged.numbers


@pytest.mark.parametrize("wrong", [False, True])
def test_proof_confirms_what_was_recorded(*, wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning names a tensor of which other numbers were recorded than its rows have."""
    if wrong:
        own = RowSample._measure

        def half(self: RowSample, n: int, sums: Sequence[float], *, known: bool) -> Measurement:
            return own(self, n, [s / 2 for s in sums], known=known)

        monkeypatch.setattr(RowSample, "_measure", half)
    save(sd1(), tmp_path / "base.safetensors")
    lora(tmp_path / "a.safetensors", NAMES, 0.02, 0)
    report = lora_merge.merge(*(tmp_path / f"{n}.safetensors" for n in ("base", "a", "out")), dtype="bf16")
    assert report.verified is not None
    told = [w for w in report.verified["warnings"] if "the report's values of" in w]
    assert bool(told) is wrong
    assert not wrong or KEYS[0] in told[0]


@pytest.mark.parametrize("field", ["weight", "change", "changed"])
def test_each_number_that_was_recorded_is_computed_again(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = RowSample._measure

    def one_wrong(self: RowSample, n: int, sums: Sequence[float], *, known: bool) -> Measurement:
        found = own(self, n, sums, known=known)
        less = getattr(found.checked, field)
        return found._replace(checked=found.checked._replace(**{field: less - 1 if field == "changed" else less / 2}))

    monkeypatch.setattr(RowSample, "_measure", one_wrong)
    assert doubted(sd1(), 0.02, tmp_path)


def doubted(base: Tensors, size: float, folder: Path) -> list[str]:
    """Return the warnings of a merge on what it recorded."""
    save(base, folder / "base.safetensors")
    lora(folder / "a.safetensors", NAMES, size, 0)
    report = lora_merge.merge(*(folder / f"{n}.safetensors" for n in ("base", "a", "out")))
    assert report.verified is not None
    return [w for w in report.verified["warnings"] if "the report's values of" in w]


def test_tiles_encoded_together_are_sampled_by_few_rows(tmp_path: Path) -> None:
    """A tile of nvfp4 is half a block here: to look at one in each block would encode most of a weight twice, and sums
    over whole tiles, which the proof repeats, would take longer than the proof of all else."""
    key, (rows, cols) = "double_blocks.0.img_mlp.0", (2048, 4096)
    base = save({f"{key}.weight": rand(rows, cols, scale=0.02).bfloat16()}, tmp_path / "base.safetensors")
    factors = {"lora_down.weight": rand(4, cols, scale=0.1), "lora_up.weight": rand(rows, 4, scale=0.1)}
    lora = save(
        {f"lora_unet_{key.replace('.', '_')}.{k}": t for k, t in factors.items()}, tmp_path / "lora.safetensors"
    )
    report = lora_merge.merge(base, lora, tmp_path / "out.safetensors", dtype="nvfp4", verify=False)
    assert report.numbers is not None
    found = report.numbers["tensors"][f"{key}.weight"]
    assert found["of"] == rows * cols
    assert 0 < found["elements"] <= rows * cols // 128
    assert found["weight"] == pytest.approx(float(load(base)[f"{key}.weight"].float().norm()), rel=0.03)
    assert 0.9 < found["retained"] < 1.1

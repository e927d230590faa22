"""Finite stays finite: no cast turns a number into inf, NaN or the largest one unless that is asked for, and then it is
counted. Run: pytest tests/engine/test_overflow.py"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from inspect import signature
from math import inf, isfinite, nan, nextafter
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lora_merge
from lora_merge.batch.schema import Options
from lora_merge.cli import main as program
from lora_merge.cli import verify_commands as cli_proof
from lora_merge.disk.reader import Reader
from lora_merge.dtypes import FLOATS
from lora_merge.engine.tensor_moves import CAST_VALUES, convert, odd
from lora_merge.errors import InputError, TooLarge, VerificationFailed
from lora_merge.files.safetensors import parse_file
from lora_merge.options import OnOverflow
from lora_merge.planning.plan import Plan
from lora_merge.planning.recipe import KEY
from lora_merge.proof.reference import floats
from lora_merge.proof.verify import verify
from lora_merge.recipes.replay import prove
from tests.kit.command_line import run
from tests.kit.files import load, save, strays
from tests.kit.pairs import examples
from tests.kit.tensors import Tensors, rand

pytestmark = pytest.mark.filterwarnings("ignore:.*the change of .* is lost")  # changes that are too small

FP8_E4M3, FP8_E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LIMITS = {  # dtype → its largest number, and the smallest one that is nearer to what would come after it
    torch.float32: (3.4028234663852886e38, 3.4028235677973366e38),
    torch.bfloat16: (3.3895313892515355e38, 3.39617752923046e38),
    torch.float16: (65504.0, 65520.0),
    FP8_E5M2: (57344.0, 61440.0),
    FP8_E4M3: (448.0, nextafter(464.0, inf)),
}
OPTIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", FP8_E5M2: "fp8_e5m2",
           FP8_E4M3: "fp8_e4m3fn"}  # fmt: skip
NARROW = [torch.bfloat16, torch.float16, FP8_E5M2, FP8_E4M3]


def lora(rows: int = 8, cols: int = 8, scale: float = 0.01) -> Tensors:
    return {"x.m.lora_up.weight": rand(rows, 2, scale=scale), "x.m.lora_down.weight": rand(2, cols, scale=scale)}


def merged(plain: Tensor, dtype: torch.dtype, **options: Any) -> Tensor:
    """An untouched tensor, merged in memory beside one that is changed."""
    base = {"x.m.weight": rand(8, 8), "x.plain": plain}
    return lora_merge.merge_state_dict(base, lora(), dtype=OPTIONS[dtype], **options)["x.plain"]


# ------------------------------------------------ the rule, at its edges


@pytest.mark.few(5)
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_that_round_to_a_finite_one_are_written_and_others_refused(dtype: torch.dtype, sign: int) -> None:
    largest, first = LIMITS[dtype]
    last = nextafter(first, 0)
    held = merged(torch.tensor([sign * last, 1.0], dtype=torch.float64), dtype)
    assert held.double().tolist() == [sign * largest, 1.0]
    with pytest.raises(TooLarge, match=f"too large for {OPTIONS[dtype]}") as caught:
        merged(torch.tensor([1.0, sign * first], dtype=torch.float64), dtype)
    assert (caught.value.where, caught.value.exit_code) == ("x.plain", 3)
    assert 'on_overflow="saturate"' in caught.value.fix
    with pytest.warns(UserWarning, match=r"1 number was .* 1 of x\.plain"):
        cut = merged(torch.tensor([1.0, sign * first], dtype=torch.float64), dtype, on_overflow="saturate")
    assert cut.double().tolist() == [1.0, sign * largest]


@pytest.mark.few(2)
@pytest.mark.parametrize("stored", [torch.float64, *LIMITS])
@pytest.mark.parametrize("dtype", LIMITS)
@given(data=st.data())
@settings(max_examples=examples(8))
def test_rule_for_every_pair_of_dtypes(stored: torch.dtype, dtype: torch.dtype, data: st.DataObject) -> None:
    """By the definition of rounding, on numbers around every limit: refused if one has no room, else the nearest."""
    limit = data.draw(st.sampled_from([v for pair in LIMITS.values() for v in pair] + [1.0]))
    factors = data.draw(st.lists(st.floats(-1.5, 1.5), min_size=1, max_size=12))
    source = torch.tensor([limit * f for f in factors], dtype=torch.float64).to(stored)
    source = source[source.double().isfinite()]
    if not len(source):
        return
    largest, first = LIMITS[dtype]
    lost = [abs(v) >= first for v in source.double().tolist()]
    if not any(lost):
        got = merged(source, dtype).double()
        assert got.isfinite().all()
        near = torch.from_numpy(floats.Floats(next(
            n for n in FLOATS if floats.Floats(n).largest == largest)).rounded(source.double().numpy()))  # fmt: skip
        assert torch.equal(got, near)
        return
    with pytest.raises(TooLarge):
        merged(source, dtype)
    with pytest.warns(UserWarning, match=f"^{sum(lost)} numbers? w"):
        got = merged(source, dtype, on_overflow="saturate").double()
    for value, was, is_lost in zip(got.tolist(), source.double().tolist(), lost, strict=True):
        assert (value == (largest if was > 0 else -largest)) if is_lost else isfinite(value)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("mode", ["error", "saturate"])
def test_nan_in_the_base_stays_what_it_is(dtype: torch.dtype, mode: str) -> None:
    values = torch.tensor([nan, 1.0, inf, -inf])
    if dtype != FP8_E4M3:
        got = merged(values, dtype, on_overflow=mode).double()
        assert torch.equal(got.nan_to_num(7.0, posinf=inf, neginf=-inf), torch.tensor([7.0, 1, inf, -inf]).double())
        return
    got = merged(values[:2], dtype, on_overflow=mode).double()
    assert got[0].isnan() and got[1] == 1
    if mode == "error":  # it has no infinity
        with pytest.raises(TooLarge):
            merged(values, dtype)
        return
    with pytest.warns(UserWarning, match="^2 numbers"):
        assert merged(values, dtype, on_overflow=mode).double()[1:].tolist() == [1, 448, -448]


@pytest.mark.parametrize("dtype", LIMITS)
def test_number_too_large_is_detected_wherever_it_is(dtype: torch.dtype) -> None:
    """The cheap look at bits and sums misses none, and a large sum of small numbers is no reason to refuse."""
    source = torch.ones(CAST_VALUES + 100, dtype=torch.float64) * LIMITS[dtype][0] / 2
    assert convert(source, torch.empty(source.shape, dtype=dtype))
    for at in (0, 17, CAST_VALUES - 1, CAST_VALUES, CAST_VALUES + 99):
        for value in (LIMITS[dtype][1], -LIMITS[dtype][1]):
            wrong = source.clone()
            wrong[at] = value
            assert not convert(wrong, torch.empty(source.shape, dtype=dtype))
    assert not odd(torch.empty(0, dtype=dtype))


# ------------------------------------------------ whole merges


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """The reported case: an untouched tensor whose numbers fp16 cannot hold."""
    base = {"x.m.weight": rand(8, 8), "plain": torch.tensor([1e6, 1, -7e4])}
    return save(base, tmp_path / "base.safetensors"), save(lora(), tmp_path / "a.safetensors")


def test_untouched_numbers_too_large_are_refused_by_name_and_cut_on_demand(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out.safetensors"
    code, _, told = run(*files, "-o", out, "--dtype", "fp16")
    assert code == 3
    assert "error: a number is too large for fp16: 1e+06" in told
    assert f"where: {out}: plain\n" in told
    assert "fix:   write --dtype bf16, or --on-overflow saturate" in told
    assert not out.exists()
    asked = ["-o", out, "--dtype", "fp16", "--on-overflow", "saturate", "--report", tmp_path / "r.json"]
    code, said, told = run(*files, *asked)
    assert code == 0, told
    assert "cut      2 numbers too large for the output's dtype: 2 of plain" in said
    assert json.loads((tmp_path / "r.json").read_text())["saturated"] == {"plain": 2}
    assert load(out)["plain"].tolist() == [65504, 1, -65504]
    assert json.loads(parse_file(out).metadata[KEY])["on_overflow"] == "saturate"
    proof = prove(out, full=True)
    assert (proof["saturated"], proof["warnings"]) == (2, [])
    code, _, told = run("replay", out, "-o", tmp_path / "again.safetensors")
    assert code == 0, told
    assert out.read_bytes() == (tmp_path / "again.safetensors").read_bytes()


def large(kind: str) -> tuple[Tensors, Tensors, str]:
    """Base, adapter, and the tensor of which some numbers have no room in 16 and 8 bits."""
    base = {"x.m.weight": rand(8, 8), "x.plain": rand(4)}
    adapter, name = lora(), "x.m.weight"
    if kind == "merged":
        base["x.m.weight"][3, 5] = 1e7
    if kind == "replaced":
        adapter["x.plain"], name = torch.tensor([1.0, -1e7, 2.0, 1e6]), "x.plain"
    if kind == "dora":
        adapter["x.m.dora_scale"] = torch.full((8, 1), 1e7)
    if kind == "part of a tensor":  # rows that no adapter changes
        base["x.m.weight"] = rand(9, 8)
        base["x.m.weight"][8] = -1e7
    return base, adapter, name


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", ["merged", "replaced", "dora", "part of a tensor"])
@pytest.mark.parametrize("dtype", NARROW[1:])
def test_overflow_in_every_kind_of_output(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    base, adapter, name = large(kind)
    if kind == "part of a tensor":
        adapter = {"x.m.lora_up.weight": torch.cat([rand(8, 2), torch.zeros(1, 2)]), "x.m.lora_down.weight": rand(2, 8)}
    paths = save(base, tmp_path / "b.safetensors"), save(adapter, tmp_path / "a.safetensors")
    out, option = tmp_path / "o.safetensors", OPTIONS[dtype]
    for merge in (
        lambda: lora_merge.merge(*paths, out, dtype=option),
        lambda: lora_merge.merge_state_dict(base, adapter, dtype=option),
    ):
        with pytest.raises(TooLarge, match=f"too large for {option}") as caught:
            merge()
        assert caught.value.where.endswith(name)
    assert not out.exists()
    exact = lora_merge.merge_state_dict(base, adapter, compute_dtype="fp64", dtype="fp32")
    want = {k: int((v.double().abs() >= LIMITS[dtype][1]).sum()) for k, v in exact.items()}
    report = lora_merge.merge(*paths, out, dtype=option, on_overflow="saturate")
    assert report.saturated == {k: n for k, n in want.items() if n}
    assert prove(out, full=True)["saturated"] == sum(want.values())
    with pytest.warns(UserWarning, match=f"^{sum(want.values())} numbers? w"):
        held = lora_merge.merge_state_dict(base, adapter, dtype=option, on_overflow="saturate")
    for key, tensor in load(out).items():
        assert torch.equal(tensor.double(), held[key].double())
        assert torch.equal(tensor.double().abs() == LIMITS[dtype][0], exact[key].double().abs() >= LIMITS[dtype][1])


def test_counts_are_exact_over_blocks_and_windows(tmp_path: Path) -> None:
    """Merged and converted, in tensors of several blocks, pieces and windows; the full proof counts the same."""
    torch.manual_seed(0)
    base = {n: torch.rand(2500, 1024) * 100 for n in ("x.m.weight", "x.plain")}
    for tensor in base.values():
        tensor.view(-1)[torch.randperm(tensor.numel())[:1000]] = torch.rand(1000) * 4e4 + 1e5
        tensor[7] *= -1
    adapter = lora(2500, 1024)
    paths = save(base, tmp_path / "b.safetensors"), save(adapter, tmp_path / "a.safetensors")
    report = lora_merge.merge(
        *paths, tmp_path / "o.safetensors", dtype="fp16", on_overflow="saturate", max_memory="64MiB"
    )
    assert report.saturated == {"x.m.weight": 1000, "x.plain": 1000}
    assert prove(tmp_path / "o.safetensors", full=True)["saturated"] == 2000


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["strength", "alpha", "factors"])
def test_sums_that_overflow_end_with_3_and_name_the_output(dtype: torch.dtype, how: str, tmp_path: Path) -> None:
    strength = 1e38 if how == "strength" else 1.0
    adapter = lora(scale=3e19 if how == "factors" else 10.0)
    if how == "alpha":
        adapter["x.m.alpha"] = torch.tensor(3e38)
    base = save({"x.m.weight": rand(8, 8).to(dtype)}, tmp_path / "b.safetensors")
    out = tmp_path / "o.safetensors"
    inputs = base, (save(adapter, tmp_path / "a.safetensors"), strength), out
    for mode in ("error", "saturate"):
        with pytest.raises(TooLarge, match="too large for fp32, the compute dtype") as caught:
            lora_merge.merge(*inputs, on_overflow=mode)
        assert (caught.value.exit_code, caught.value.where) == (3, f"{out}: x.m.weight")
        assert 'compute_dtype="fp64"' in caught.value.fix
        assert not out.exists() and not strays(tmp_path)
    with pytest.raises(TooLarge, match=f"too large for {OPTIONS[dtype]}"):
        lora_merge.merge(*inputs, compute_dtype="fp64")
    report = lora_merge.merge(*inputs, compute_dtype="fp64", on_overflow="saturate")
    assert 0 < report.saturated["x.m.weight"] <= 64
    assert load(out)["x.m.weight"].isfinite().all()


def test_sums_that_overflow_beside_a_scale_of_the_weight_end_with_3(tmp_path: Path) -> None:
    """There the new codes tell of them: no scale is made for the numbers that are left."""
    codes = rand(8, 8, scale=100.0).to(torch.float8_e4m3fn)
    base = {"scaled_fp8": torch.zeros(2).to(codes.dtype), "x.m.weight": codes, "x.m.scale_weight": torch.tensor(0.05)}
    inputs = save(base, tmp_path / "b.safetensors"), (save(lora(scale=10.0), tmp_path / "a.safetensors"), 1e38)
    with pytest.raises(TooLarge, match="too large for fp32, the compute dtype"):
        lora_merge.merge(*inputs, tmp_path / "o.safetensors")


def test_lengths_that_overflow_end_with_3_in_files_and_in_memory(tmp_path: Path) -> None:
    """Divided by an infinite length, all factors are 0, and DeLoRA seems to change nothing."""
    ends = {"delora_A": (2, 8), "delora_B": (8, 2), "delora_lambda": (1,), "delora_w_norm": (8,)}
    adapter = {f"x.m.{end}": rand(*shape, seed=n) * 2.0**100 for n, (end, shape) in enumerate(ends.items())}
    adapter |= {f"x.m.{end}": adapter[f"x.m.{end}"] * 2.0**-100 for end in ("delora_lambda", "delora_w_norm")}
    base = {"x.m.weight": rand(8, 8)}
    files = (
        save(base, tmp_path / "b.safetensors"),
        save(adapter, tmp_path / "a.safetensors"),
        tmp_path / "o.safetensors",
    )
    for end in (
        lambda: lora_merge.merge(*files),
        lambda: lora_merge.merge_state_dict(base, adapter),
        lambda: lora_merge.load_adapter(files[1]).delta("x.m", base["x.m.weight"]),
    ):
        with pytest.raises(TooLarge):
            end()
    assert not files[2].exists()
    lora_merge.merge(*files, compute_dtype="fp64")
    assert prove(files[2], full=True)["proven"]
    assert not torch.equal(load(files[2])["x.m.weight"], base["x.m.weight"])


@pytest.mark.parametrize(
    ("stored", "compute"), [(torch.float64, "fp32"), (torch.float32, "fp16"), (torch.float32, "bf16")]
)
def test_base_that_the_compute_dtype_cannot_hold_is_refused(stored: torch.dtype, compute: str) -> None:
    weight = rand(8, 8).to(stored)
    weight[2, 2] = {"fp32": 1e300, "fp16": 1e5, "bf16": 3.4e38}[compute]
    for mode in ("error", "saturate"):
        with pytest.raises(TooLarge, match=f"too large for {compute}, the compute dtype") as caught:
            lora_merge.merge_state_dict({"x.m.weight": weight}, lora(), compute_dtype=compute, on_overflow=mode)
        assert 'compute_dtype="fp' in caught.value.fix


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_nan_in_a_merged_tensor_stays_and_overflow_beside_it_is_detected(stored: torch.dtype, tmp_path: Path) -> None:
    """Also where base values lie in the place of the result, and are read again to tell the two apart."""
    weight = rand(8, 8).to(stored)
    weight[0, 0], weight[1, 1] = nan, inf
    adapter = save(lora(), tmp_path / "a.safetensors")
    out = tmp_path / "o.safetensors"
    lora_merge.merge(save({"x.m.weight": weight}, tmp_path / "b.safetensors"), adapter, out)
    assert torch.equal(load(out)["x.m.weight"].isfinite(), weight.isfinite())
    weight[2, 2] = torch.finfo(stored).max
    base = save({"x.m.weight": weight}, tmp_path / "b.safetensors")
    strong = (save(lora(scale=10), adapter), torch.finfo(torch.float32).max if stored != torch.float16 else 1e7)
    with pytest.raises(TooLarge):
        lora_merge.merge(base, strong, out, overwrite=True)


@pytest.mark.parametrize("axis", [(8, 1), (1, 8)])
def test_norm_that_overflows_makes_no_zeros(axis: tuple[int, int]) -> None:
    """Regression: a magnitude over an infinite norm is 0, and so was every weight, which is finite."""
    base, adapter = {"x.m.weight": rand(8, 8)}, lora(scale=1e10) | {"x.m.dora_scale": torch.ones(axis)}
    with pytest.raises(TooLarge, match="too large for fp32, the compute dtype"):
        lora_merge.merge_state_dict(base, adapter)
    held = lora_merge.merge_state_dict(base, adapter, compute_dtype="fp64")["x.m.weight"]
    norms = torch.linalg.vector_norm(held, dim=0 if axis[0] == 1 else 1)
    assert torch.allclose(norms, torch.ones(8), atol=1e-5)


def test_change_that_is_no_number_is_refused(tmp_path: Path) -> None:
    path = save(lora(scale=1e30), tmp_path / "a.safetensors")
    with pytest.raises(TooLarge, match="too large"):
        lora_merge.load_adapter(path).delta("x.m", rand(8, 8))


def test_jobs_that_differ_in_it_alone_each_get_their_own(files: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = files
    jobs = [
        {"base": str(base), "adapters": [str(adapter)], "dtype": "fp16", "output": str(tmp_path / f"{n}.safetensors"), **o}
        for n, o in enumerate([{"on_overflow": "saturate"}, {}, {"on_overflow": "error"}, {"on_overflow": "saturate"}])
    ]  # fmt: skip
    ended = sorted(lora_merge.run_batch(jobs), key=lambda r: r.number)
    assert [r.status for r in ended] == ["merged", "failed", "failed", "merged"]
    assert [r.report.saturated for r in ended if r.report] == [{"plain": 2}] * 2
    assert all(isinstance(r.error, TooLarge) and "1.safetensors" in r.error.where for r in ended[1:2])
    lora_merge.merge(base, adapter, tmp_path / "bf.safetensors", dtype="bf16")
    jobs = [{**jobs[0], "dtype": "bf16", "output": str(tmp_path / "bf.safetensors")}]
    (other,) = lora_merge.run_batch(jobs)
    assert other.error is not None and "another recipe" in other.error.what


# ------------------------------------------------ the proof


def planted(path: Path, name: str, at: int, value: float) -> None:
    """One number of a written file replaced."""
    info, raw = parse_file(path).tensors[name], bytearray(path.read_bytes())
    dtype = load(path)[name].dtype
    data = torch.tensor([value]).to(dtype).view(torch.uint8).numpy().tobytes()
    raw[info.offset + at * dtype.itemsize :][: len(data)] = data
    raw = raw[: info.offset + at * dtype.itemsize] + data + raw[info.offset + (at + 1) * dtype.itemsize :]
    path.write_bytes(raw)


def wrongs(dtype: torch.dtype, right: float) -> Iterator[float]:
    """Numbers of a dtype that are not `right`: its neighbours, others, and what is none."""
    one = torch.tensor([right]).to(dtype)
    bits = one.view(torch.uint8 if dtype.itemsize == 1 else torch.int16)
    yield from ((bits + step).view(dtype).double().item() for step in (1, -1))
    yield from (-right, 0.0, nan, LIMITS[dtype][0])
    if dtype != FP8_E4M3:
        yield inf


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("stored", [torch.float64, torch.float32])
def test_every_wrong_number_in_a_converted_tensor_is_detected(
    dtype: torch.dtype, stored: torch.dtype, tmp_path: Path
) -> None:
    base = {"x.m.weight": rand(8, 8), "x.plain": rand(40, 3, scale=1.0).to(stored)}
    paths = save(base, tmp_path / "b.safetensors"), save(lora(), tmp_path / "a.safetensors")
    out = tmp_path / "o.safetensors"
    lora_merge.merge(*paths, out, dtype=OPTIONS[dtype])
    sound = out.read_bytes()
    assert prove(out)["proven"]
    for at in (0, 119):
        for wrong in wrongs(dtype, float(base["x.plain"].view(-1)[at])):
            planted(out, "x.plain", at, wrong)
            with pytest.raises(VerificationFailed, match=rf"wrongly converted(?s:.*)x\.plain, element {at}:"):
                prove(out)
            out.write_bytes(sound)


@pytest.mark.parametrize("fault", ["plain", "x.m.weight", "header", "disk"])
def test_no_message_names_the_temporary_file(
    fault: str, files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "o.safetensors"

    def late(plan: Plan, part: Path, reader: Reader, **more: Any) -> dict[str, Any]:
        if fault == "disk":
            raise OSError(errno.EIO, "Input/output error", str(part))
        if fault == "header":
            part.write_bytes(part.read_bytes()[:-1])
        else:
            planted(part, fault, 1, 0.25)
        return verify(plan, part, reader, **more)

    monkeypatch.setattr("lora_merge.engine.merge.verify", late)
    with pytest.raises(lora_merge.MergeError if fault == "disk" else VerificationFailed) as caught:
        lora_merge.merge(*files, out)
    assert isinstance(caught.value.__cause__, OSError) == (fault == "disk")
    assert "lora-merge.part" not in str(caught.value)
    assert str(out) in str(caught.value) or fault == "plain"
    assert not out.exists() and not strays(tmp_path)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", ["plain", "x.m.weight"])
def test_file_that_was_cut_without_a_word_of_it_in_its_recipe_is_refused_with_the_reason(
    dtype: torch.dtype, name: str, tmp_path: Path
) -> None:
    """As earlier versions cut them: cut in 8 bits, infinite in 16."""
    big = {torch.bfloat16: 3.4e38}.get(dtype, 1e6)
    base = {"x.m.weight": rand(8, 8), "plain": rand(8)}
    base[name].view(-1)[5] = big
    paths = save(base, tmp_path / "b.safetensors"), save(lora(), tmp_path / "a.safetensors")
    out = tmp_path / "o.safetensors"
    lora_merge.merge(*paths, out, dtype=OPTIONS[dtype], on_overflow="saturate")
    assert prove(out, full=True)["saturated"] == 1
    kept = dict(parse_file(out).metadata)
    kept[KEY] = json.dumps({k: v for k, v in json.loads(kept[KEY]).items() if k != "on_overflow"})
    for value in (LIMITS[dtype][0], inf if dtype.itemsize == 2 or dtype == FP8_E5M2 else nan):
        tensors = load(out)
        tensors[name].view(-1)[5] = value
        save(tensors, tmp_path / "old.safetensors", kept)
        with pytest.raises(VerificationFailed, match="earlier versions cut") as caught:
            prove(tmp_path / "old.safetensors", full=True)
        assert "--on-overflow saturate" in str(caught.value)
    with pytest.raises(InputError, match="damaged"):
        kept[KEY] = json.dumps(json.loads(kept[KEY]) | {"on_overflow": "perhaps"})
        save(load(out), tmp_path / "old.safetensors", kept)
        prove(tmp_path / "old.safetensors")


def test_file_without_a_recipe_is_proven_with_the_option(files: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "o.safetensors"
    lora_merge.merge(*files, out, dtype="fp16", on_overflow="saturate")
    save(load(out), out)
    base, adapter = files
    named = ["verify", out, "--base", base, "--adapter", adapter]
    assert run(*named)[0] == 6
    code, said, told = run(*named, "--on-overflow", "saturate")
    assert code == 0, told
    assert "cut      2 of the numbers compared" in said


def test_overflow_is_an_option_everywhere() -> None:
    (field,) = [a for a in get_args(Options.model_fields["on_overflow"].annotation) if get_args(a)]
    assert get_args(get_args(field)[0]) == get_args(OnOverflow) == ("error", "saturate")
    for command in (program.merge, cli_proof.verify):
        assert "on_overflow" in signature(command).parameters


@pytest.mark.parametrize("value", ["errors", "clip", "", None, True])
def test_unknown_values_are_refused(value: Any) -> None:
    with pytest.raises(lora_merge.MergeError) as caught:
        lora_merge.merge_state_dict({"x.m.weight": rand(8, 8)}, lora(), on_overflow=value)
    assert caught.value.exit_code == 2
    assert caught.value.where == "on_overflow"

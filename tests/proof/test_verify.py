"""Planted faults are found, sound files pass, and a failed proof leaves no file. Run: pytest tests/proof/test_verify.py"""

from __future__ import annotations

import json
import os
import shutil
import time
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import lora_merge
import lora_merge.engine.merge
from lora_merge.cli.reports import plain_lines
from lora_merge.engine.tensor_moves import convert
from lora_merge.errors import FitError, InputError, UsageError, VerificationFailed
from lora_merge.files.safetensors import parse_file
from lora_merge.proof import row_comparison
from lora_merge.proof.reference import floats
from lora_merge.recipes.replay import prove
from lora_merge.report import proof_rows
from tests.kit.adapters import kohya
from tests.kit.command_line import run
from tests.kit.files import load, metadata, save
from tests.kit.models import UNET, sd1
from tests.kit.tensors import rand

QUERY = f"{UNET}input_blocks.1.1.transformer_blocks.0.attn1.to_q.weight"
UP = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q.lora_up.weight"


@pytest.fixture(scope="module")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base, folder = sd1(), tmp_path_factory.mktemp("made")
    save(base, folder / "base.safetensors")
    save(kohya(base), folder / "style.safetensors")
    save(kohya(base, te=False, seed=300), folder / "detail.safetensors")
    merge(folder, "out")
    return folder


@pytest.fixture
def made(_made: Path, tmp_path: Path) -> Path:
    """A folder with base, two adapters and their merge."""
    shutil.copytree(_made, tmp_path, dirs_exist_ok=True)
    return tmp_path


def merge(folder: Path, name: str, strengths: tuple[float, float] = (0.7, 0.3), **options: Any) -> Path:
    pairs = [(folder / "style.safetensors", strengths[0]), (folder / "detail.safetensors", strengths[1])]
    out = folder / f"{name}.safetensors"
    lora_merge.merge(folder / "base.safetensors", pairs, out, **options)
    return out


def inputs(folder: Path, strengths: tuple[float | None, float | None] = (None, None)) -> dict[str, Any]:
    pairs = [(folder / "style.safetensors", strengths[0]), (folder / "detail.safetensors", strengths[1])]
    return {"base": folder / "base.safetensors", "adapters": pairs}


def flip(path: Path, tensor: str, byte: int, bit: int) -> None:
    """One bit of one tensor, in place."""
    at = parse_file(path).tensors[tensor].offset + byte
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1 << bit
    path.write_bytes(raw)


def replace_tensors(path: Path, new: dict[str, torch.Tensor]) -> None:
    """The file with other values, header and metadata as they were."""
    raw = bytearray(path.read_bytes())
    for name, value in new.items():
        info = parse_file(path).tensors[name]
        data = value.contiguous().view(torch.uint8).numpy().tobytes()
        raw[info.offset : info.offset + info.nbytes] = data
    path.write_bytes(raw)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["keep", "fp32", "bf16", "fp8_e4m3fn", "fp8_e5m2"])
def test_sound_file_passes(made: Path, dtype: str) -> None:
    out = merge(made, dtype, dtype=dtype)
    for full, named in product((False, True), ({}, inputs(made), inputs(made, (0.7, 0.3)))):
        proof = prove(out, full=full, **named)
        assert proof["proven"]
        assert proof["tensors"] == proof["changed"] == 20
        assert proof["worst_ulp"] < (4 if dtype == "fp32" else 0.6)
        assert all(min(s["retained"], 1.0) > 0.95 for s in proof["retained"])  # noise of few rows may add to it
        assert proof["untouched"]["bytes"] == proof["untouched"]["of"] > 0


@pytest.mark.slow
def test_parts_side_by_side_give_what_one_after_the_other_gives(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, wrong = merge(made, "sound", dtype="bf16"), merge(made, "wrong", dtype="bf16")
    last = parse_file(wrong).tensors[QUERY]
    flip(wrong, QUERY, byte=last.nbytes - 1, bit=4)
    proofs, errors = [], []
    for chunk in (2**18, 64):
        monkeypatch.setattr(row_comparison, "ELEMENTS_AT_ONCE", chunk)
        proofs.append(prove(out, full=True) | {"seconds": 0, "retained": 0, "survival": 0})
        with pytest.raises(VerificationFailed, match=f"row {last.shape[0] - 1}, column") as failed:
            prove(wrong, full=True)
        errors.append(str(failed.value))
    assert proofs[0] == proofs[1]
    assert errors[0] == errors[1]


def test_progress_of_a_tensor_in_parts_is_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save({"a.weight": rand(100, 7)}, tmp_path / "base.safetensors")
    lora = save({"a.lora_A.weight": rand(2, 7), "a.lora_B.weight": rand(100, 2)}, tmp_path / "lora.safetensors")
    lora_merge.merge(base, lora, tmp_path / "out.safetensors")
    monkeypatch.setattr(row_comparison, "ELEMENTS_AT_ONCE", 7 * 33)
    steps: list[lora_merge.Step] = []
    lora_merge.verify(tmp_path / "out.safetensors", full=True, progress=steps.append)
    done = [step.done for step in steps if step.stage == "prove" and step.done]
    assert sum(done) == steps[-1].total and done.count(100 * 7 * 4 // 4) == 4


def test_error_of_sums_that_cancel_is_in_units_of_the_terms(tmp_path: Path) -> None:
    up, down = rand(64, 8, seed=1), rand(8, 64, seed=2)
    base = save({"a.weight": -(up.double() @ down.double()).float()}, tmp_path / "base.safetensors")
    lora = save({"a.lora_A.weight": down, "a.lora_B.weight": up}, tmp_path / "lora.safetensors")
    lora_merge.merge(base, lora, tmp_path / "out.safetensors", dtype="bf16")
    assert load(tmp_path / "out.safetensors")["a.weight"].abs().max() < 1e-5
    assert prove(tmp_path / "out.safetensors", full=True)["worst_ulp"] < 0.6


@pytest.mark.few(1)
@pytest.mark.parametrize("compute", ["fp32", "fp64", "bf16", "fp16"])
def test_every_compute_dtype_passes_by_its_own_bound(made: Path, compute: str) -> None:
    """The bound of fp32 is allowed without a word of the user, whatever the recipe says."""
    out = merge(made, compute, (7.0, 3.0), compute_dtype=compute)  # less than the rounding of bf16 is not proven
    if compute in ("bf16", "fp16"):
        with pytest.raises(VerificationFailed, match="by the bound of fp32") as failed:
            prove(out, full=True)
        assert f"--compute-dtype {compute}" in failed.value.fix
    proof = prove(out, full=True, options={"compute_dtype": compute})
    assert proof["proven"] and proof["bound"]["compute_dtype"] == compute


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dora", [False, True])
def test_base_that_holds_nan_is_reported_and_counts_for_nothing(
    tmp_path: Path,
    dtype: torch.dtype,
    dora: bool,  # noqa: FBT001
) -> None:
    """What is lost there is not what the adapter lost; and the report is JSON, which has no NaN."""
    weight = rand(32, 32, scale=1.0).to(dtype)
    weight[3], weight[9, 9] = float("nan"), float("inf")
    base = save({"a.weight": weight, "b.weight": torch.full((4, 4), float("nan"))}, tmp_path / "base.safetensors")
    factors = {f"{m}.lora_{s}.weight": rand(*shape, seed=7, scale=1.0)
               for m, n in (("a", 32), ("b", 4)) for s, shape in (("up", (n, 2)), ("down", (2, n)))}  # fmt: skip
    adapter = save(factors | ({"a.dora_scale": torch.ones(32, 1)} if dora else {}), tmp_path / "a.safetensors")
    out = tmp_path / "out.safetensors"
    report = json.loads(lora_merge.merge(base, adapter, out).to_json(), parse_constant=pytest.fail)
    for proof in (report["verified"], prove(out, full=True)):
        assert abs(proof["retained"][0]["retained"] - 1) < 0.02
        assert [("NaN or infinite" in w, "smaller" in w) for w in proof["warnings"]] == [(True, False)]


def test_flipped_bit_in_an_untouched_tensor_is_detected(made: Path) -> None:
    out = made / "out.safetensors"
    flip(out, "first_stage_model.decoder.conv_out.weight", 17, 0)
    with pytest.raises(VerificationFailed, match=r"no adapter changes.*\n.*conv_out\.weight, byte 17"):
        prove(out)


@pytest.mark.few(2)
@pytest.mark.parametrize("bit", [0, 3, 7])
def test_flipped_bit_in_a_merged_tensor_is_detected(made: Path, bit: int) -> None:
    out = made / "out.safetensors"
    flip(out, QUERY, 2 * (3 * 16 + 5), bit)
    with pytest.raises(VerificationFailed, match=r"1 of \d+ merged tensors(?s:.*)to_q\.weight, row 3, column 5"):
        prove(out, full=True)


@pytest.mark.parametrize(("dtype", "named"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16")])
def test_neighbour_on_the_other_side_of_the_exact_value_is_detected(
    dtype: torch.dtype, named: str, tmp_path: Path
) -> None:
    """It is less than one unit away, and no rounding gives it: the proof allows half a unit."""
    base, up, down = rand(8, 8), rand(8, 2, seed=1), rand(2, 8, seed=2)
    save({"x.weight": base}, tmp_path / "base.safetensors")
    save({"x.lora_up.weight": up, "x.lora_down.weight": down}, tmp_path / "a.safetensors")
    out = tmp_path / "out.safetensors"
    lora_merge.merge(tmp_path / "base.safetensors", tmp_path / "a.safetensors", out, dtype=named, compute_dtype="fp64")
    exact, written = base.double() + up.double() @ down.double(), load(out)["x.weight"]
    side = torch.where(exact > written.double(), torch.inf, -torch.inf).to(dtype)
    replace_tensors(out, {"x.weight": torch.nextafter(written, side)})
    with pytest.raises(VerificationFailed, match=r"1 of 1 merged tensor is"):
        prove(out, full=True)


def test_short_reads_go_on_where_they_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(bytes(range(40)))
    whole = row_comparison.read_at
    monkeypatch.setattr(row_comparison, "read_at", lambda fd, into, at: whole(fd, into[:3], at))
    with (tmp_path / "x").open("rb") as f:
        assert row_comparison.read_exactly(f.fileno(), 10, 5) == bytes(range(5, 15))
        assert row_comparison.read_exactly(f.fileno(), 10, 35) == bytes(range(35, 40))


def test_missing_module_is_detected(made: Path) -> None:
    out = made / "out.safetensors"
    replace_tensors(out, {QUERY: load(made / "base.safetensors")[QUERY]})
    with pytest.raises(VerificationFailed, match=r"1 of \d+ merged tensors"):
        prove(out)


def test_missing_adapter_is_detected_and_named(made: Path) -> None:
    other = merge(made, "other", (0.7, 0.0))
    replace_tensors(made / "out.safetensors", load(other))
    with pytest.raises(VerificationFailed, match=r"the file holds -?0\.00 of detail\.safetensors"):
        prove(made / "out.safetensors")


def test_wrong_strength_is_detected_and_named(made: Path) -> None:
    replace_tensors(made / "out.safetensors", load(merge(made, "other", (0.35, 0.3))))
    with pytest.raises(VerificationFailed, match=r"the file holds 0\.50 of style\.safetensors"):
        prove(made / "out.safetensors")


def test_strength_that_is_stated_wrong_is_reported_with_the_right_one(made: Path) -> None:
    out = made / "out.safetensors"
    with pytest.raises(VerificationFailed, match=r"made with strength 0\.7 of 'style\.safetensors', not 0\.5") as told:
        prove(out, **inputs(made, (0.5, 0.3)))
    assert told.value.fix.startswith("give 0.7")
    bare = save(load(out), made / "bare.safetensors")
    with pytest.raises(VerificationFailed, match=r"the file holds 1\.40 of style\.safetensors") as told:
        prove(bare, **inputs(made, (0.5, 0.3)))
    assert told.value.fix.startswith("if it was made at other strengths, give those; else merge again")


def test_swapped_half_is_detected(made: Path) -> None:
    out = made / "out.safetensors"
    key = f"{UNET}input_blocks.1.1.transformer_blocks.0.ff.net.0.proj.weight"
    upper, lower = load(out)[key].chunk(2)
    replace_tensors(out, {key: torch.cat([lower, upper])})
    with pytest.raises(VerificationFailed, match=r"1 of \d+ merged tensors"):
        prove(out)


def test_output_that_is_older_than_its_adapter_is_detected(made: Path) -> None:
    tensors = load(made / "style.safetensors")
    save(tensors | {UP: tensors[UP] * 1.5}, made / "style.safetensors")
    for named in ({}, inputs(made)):
        with pytest.raises(VerificationFailed, match=r"style\.safetensors"):
            prove(made / "out.safetensors", **named)


def test_wrong_dtype_shape_or_tensor_is_detected(made: Path) -> None:
    out = made / "out.safetensors"
    good, recipe = load(out), metadata(out)
    for change in (
        {QUERY: good[QUERY].float()},
        {QUERY: good[QUERY].reshape(-1)},
        {"extra": torch.zeros(1)},
    ):
        save_file(good | change, out, recipe)
        with pytest.raises(VerificationFailed):
            prove(out)
    save_file({k: v for k, v in good.items() if k != QUERY}, out, recipe)
    with pytest.raises(VerificationFailed, match="other tensors"):
        prove(out)


def test_files_of_other_programs_are_proven_from_named_inputs(made: Path) -> None:
    """Tensors in another order, no recipe, base metadata lost."""
    out = made / "foreign.safetensors"
    save_file(dict(sorted(load(merge(made, "bf16", dtype="bf16")).items(), reverse=True)), out)
    assert prove(out, **inputs(made, (0.7, 0.3)), full=True)["proven"]
    with pytest.raises(VerificationFailed):
        prove(out, **inputs(made, (0.6, 0.3)))
    with pytest.raises(InputError, match="says nothing about how it was made"):
        prove(out)
    with pytest.raises(UsageError, match="only some of the inputs"):
        prove(out, base=made / "base.safetensors")


def test_options_of_a_file_without_a_recipe_are_given_with_its_inputs(made: Path) -> None:
    table = made / "names.yaml"
    shutil.copy(Path(lora_merge.__file__).parent / "models" / "architectures" / "sd1.yaml", table)
    foreign = {"te": 0.5, "unet": 0.0}, made / "foreign.safetensors"
    save(kohya(sd1()) | {"lora_unet_nowhere.lora_up.weight": rand(4, 2), "lora_unet_nowhere.lora_down.weight": rand(2, 4)},
         made / "style.safetensors")  # fmt: skip
    out = merge(made, "some", strength_for=foreign[0], unmatched="skip")
    save_file(load(out), foreign[1])
    options = {"strength_for": [("te", 0.5), ("unet", 0.0)], "unmatched": "skip", "map": table}
    named = inputs(made, (0.7, 0.3))
    assert prove(foreign[1], **named, full=True, options=options)["proven"]
    with pytest.raises(VerificationFailed):
        prove(foreign[1], **named, full=True, options={"unmatched": "skip"})
    with pytest.raises(FitError):
        prove(foreign[1], **named)
    for said in ({}, named):
        with pytest.raises(UsageError, match="the recipe states"):
            prove(out, **said, options=options)
    words = [f"--{k.replace('adapters', 'adapter')}={v}" for k, v in (("base", named["base"]), *(
        ("adapters", f"{path}:{strength}") for path, strength in named["adapters"]))]  # fmt: skip
    done = run("verify", foreign[1], *words, "--strength-for", "te=0.5", "--strength-for", "unet=0", "--unmatched", "skip", "--map", table)  # fmt: skip
    assert done.code == 0, done.err


def test_file_that_was_put_into_a_folder_is_named_itself(made: Path) -> None:
    folder = made / "model"
    folder.mkdir()
    shutil.copy(made / "out.safetensors", folder / "model.safetensors")
    with pytest.raises(VerificationFailed, match="base is a file") as failure:
        prove(folder, search=[made])
    assert failure.value.fix == "name the file itself"
    assert prove(folder / "model.safetensors", search=[made])["proven"]


def test_renamed_inputs_are_found_by_content(made: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (made / "style.safetensors").rename(tmp_path / "elsewhere" / "deep" / "renamed.st")
    assert prove(made / "out.safetensors")["proven"]  # the folder below the output's is searched, too


def test_failed_proof_leaves_no_file(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that forgets the strength: the file does not get its name, the old one stays."""
    import lora_merge.engine.fold as kernels

    original = kernels.fold
    wrong = lambda base, stacks, *_: original(base, [*stacks, *stacks])  # noqa: E731
    monkeypatch.setattr("lora_merge.engine.fold.FOLD_RULES", {"sum": wrong})
    before = (made / "out.safetensors").read_bytes()
    with pytest.raises(VerificationFailed) as failure:
        merge(made, "out", overwrite=True)
    assert failure.value.exit_code == 6
    with pytest.raises(VerificationFailed):
        merge(made, "new")
    assert (made / "out.safetensors").read_bytes() == before
    assert sorted(p.name for p in made.iterdir()) == [
        "base.safetensors", "detail.safetensors", "out.safetensors", "style.safetensors",
    ]  # fmt: skip
    merge(made, "unproven", verify=False)


@pytest.mark.parametrize(
    ("dtype", "scale", "wider"),
    [("bf16", 0.002, "fp32"), ("fp8_e4m3fn", 0.01, "fp32"), ("fp8_e4m3fn", 2.0, "bf16 or fp32")],
)
def test_dtype_that_swallows_the_change_is_reported(tmp_path: Path, dtype: str, scale: float, wider: str) -> None:
    base = {"block.weight": rand(64, 64, seed=1).to(torch.float8_e4m3fn).float()}
    up = {"block.lora_up.weight": rand(64, 4, seed=2) * scale, "block.lora_down.weight": rand(4, 64, seed=3) * 0.05}
    save(base, tmp_path / "b.safetensors")
    save(up, tmp_path / "a.safetensors")
    paths = tmp_path / "b.safetensors", tmp_path / "a.safetensors", tmp_path / "o.safetensors"
    report = lora_merge.merge(*paths, dtype=dtype)
    assert report.verified is not None
    assert report.survival[0]["share"] < 0.6
    first, *others = wider.split(" or ")
    assert "; write " + " or ".join([f'dtype="{first}"', *others]) in report.verified["warnings"][0]
    numbers = report.numbers
    assert (numbers["below"], numbers["worst"]) == (1, "block.weight")
    said = [*plain_lines(proof_rows({**report.verified, "numbers": numbers, "counted": True}))]
    assert said[1].endswith("less than 90 % of it is in 1 weight, least in block.weight")
    said = [row.value for row in proof_rows({**report.verified, "numbers": numbers}) if row.name == "change"]
    assert said[-1].endswith(f"in the {report.verified['rows']} rows that were read")
    rounded = lora_merge.merge(*paths[:2], tmp_path / "drawn.safetensors", dtype=dtype, rounding="stochastic")
    assert rounded.verified is not None
    assert not any("rounding=" in text for text in rounded.verified["warnings"])
    report = lora_merge.merge(
        tmp_path / "b.safetensors", tmp_path / "a.safetensors", tmp_path / "wide.safetensors", dtype="fp32"
    )
    assert report.verified is not None
    assert abs(report.verified["retained"][0]["retained"] - 1) < 1e-3
    assert not report.verified["warnings"]


def test_report_is_json(made: Path) -> None:
    report = lora_merge.merge(made / "base.safetensors", made / "style.safetensors", made / "json.safetensors")
    assert json.loads(report.to_json())["verified"]["tensors"] == 20


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("BF16", torch.bfloat16), ("F16", torch.float16), ("F8_E4M3", torch.float8_e4m3fn),
     ("F8_E5M2", torch.float8_e5m2), ("F32", torch.float32), ("F64", torch.float64)],
)  # fmt: skip
def test_decoding_and_rounding_are_the_dtypes_own(name: str, dtype: torch.dtype) -> None:
    """All 8-bit and 16-bit patterns, and random wider ones, against torch."""
    count = 2 ** min(16, 8 * dtype.itemsize)
    patterns = torch.arange(count, dtype=torch.int32)
    raw = (
        patterns.to(torch.uint8) if dtype.itemsize == 1
        else patterns.to(torch.uint16).view(torch.uint8) if dtype.itemsize == 2
        else torch.randint(0, 256, (4096,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    )  # fmt: skip
    values = raw.view(dtype).double()
    torch.testing.assert_close(
        torch.from_numpy(floats.decode(raw.numpy().tobytes(), name)), values, rtol=0, atol=0, equal_nan=True
    )
    top = floats.Floats(name).largest
    finite = values[values.isfinite() & (values.abs() < top / 2)][:20000]
    between = finite * (1 + 1e-9) if dtype.itemsize < 4 else finite * (1 + 1e-17)
    near = finite + 0.499 * torch.from_numpy(floats.Floats(name).step(finite.numpy()))
    for exact in (finite, between, near):
        want = exact.to(dtype).double()
        torch.testing.assert_close(torch.from_numpy(floats.Floats(name).rounded(exact.numpy())), want, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("BF16", torch.bfloat16),
        ("F16", torch.float16),
        ("F8_E4M3", torch.float8_e4m3fn),
        ("F8_E5M2", torch.float8_e5m2),
    ],
)
def test_fp64_is_rounded_once(name: str, dtype: torch.dtype) -> None:
    """Regression: torch casts by way of fp32, so numbers just beside a midpoint fell to the wrong side."""
    lower = torch.linspace(-4, 4, 4001, dtype=torch.float64).to(dtype).double()
    half = 0.5 * torch.from_numpy(floats.Floats(name).step(lower.numpy()))
    special = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1e300, 5e-324], dtype=torch.float64)
    for exact in (lower, lower + half, lower + half * (1 + 1e-12), lower + half * (1 - 1e-12), special[:2]):
        into = torch.empty(exact.shape, dtype=dtype)
        convert(exact, into)
        want = torch.from_numpy(floats.Floats(name).rounded(exact.numpy()))
        torch.testing.assert_close(into.double(), want, rtol=0, atol=0)
    if dtype.itemsize == 2:
        into = torch.empty(special.shape, dtype=dtype)
        convert(special, into)
        torch.testing.assert_close(into, special.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_equal_adapters_in_number_are_no_error(tmp_path: Path) -> None:
    """Their sums on the way are larger than any of them, and rounded every time."""
    torch.manual_seed(0)
    base = save({"model.a.weight": torch.randn(64, 32)}, tmp_path / "b.safetensors")
    factors = {"model.a.lora_down.weight": torch.randn(8, 32), "model.a.lora_up.weight": torch.randn(64, 8)}
    adapter = save(factors | {"model.a.alpha": torch.tensor(8.0)}, tmp_path / "a.safetensors")
    for count in (20, 60):
        lora_merge.merge(base, [adapter] * count, tmp_path / f"{count}.safetensors")


def test_large_metadata_of_the_base_costs_little(tmp_path: Path) -> None:
    """It is compared, not searched: a pattern of 8 MB took 15 s and 1.5 GB."""
    text = "([a-z]+)*$" * 800_000
    base = save({"model.a.weight": torch.randn(8, 8)}, tmp_path / "b.safetensors", {"note": text})
    factors = {"model.a.lora_down.weight": torch.randn(2, 8), "model.a.lora_up.weight": torch.randn(8, 2)}
    adapter = save(factors, tmp_path / "a.safetensors")
    started = time.process_time()
    lora_merge.merge(base, adapter, tmp_path / "o.safetensors")
    assert time.process_time() - started < 5
    assert metadata(tmp_path / "o.safetensors")["note"] == text


def test_lost_entry_of_the_metadata_is_detected(made: Path) -> None:
    base = save(load(made / "base.safetensors"), made / "noted.safetensors", {"note": "kept"})
    out = made / "noted-out.safetensors"
    lora_merge.merge(base, made / "style.safetensors", out)
    prove(out)
    save_file(load(out), out, {k: v for k, v in metadata(out).items() if k != "note"})
    with pytest.raises(VerificationFailed, match="note"):
        prove(out)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="no hints to the disk here")
def test_disk_is_asked_for_what_is_looked_at(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[tuple[int, int]] = set()
    looked: set[tuple[int, int]] = set()
    hint, read = os.posix_fadvise, row_comparison.read_exactly
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, at, n, why: (asked.add((at, n)), hint(fd, at, n, why)))
    monkeypatch.setattr(row_comparison, "read_exactly", lambda fd, n, at: (looked.add((at, n)), read(fd, n, at))[1])
    prove(made / "out.safetensors", **inputs(made))
    assert len(looked) > 20
    pages = [
        {page for at, n in ranges for page in range(at // 4096, -(-(at + n) // 4096))} for ranges in (looked, asked)
    ]
    assert pages[0] <= pages[1]


def test_two_changes_of_one_adapter_are_retained_together(tmp_path: Path) -> None:
    """Tied ends: both modules change the one weight that the base has, here by the same."""
    base = {"model.embed_tokens.weight": rand(16, 8), "model.layers.0.mlp.up_proj.weight": rand(8, 8)}
    factors = {"lora_up.weight": rand(16, 2), "lora_down.weight": rand(2, 8)}
    adapter = {
        f"{name}.{ending}": value.clone()
        for name in ("model.embed_tokens", "lm_head")
        for ending, value in factors.items()
    }
    paths = save(base, tmp_path / "b.safetensors"), save(adapter, tmp_path / "a.safetensors")
    proof = lora_merge.merge(*paths, tmp_path / "o.safetensors").verified
    assert proof is not None
    assert abs(proof["retained"][0]["retained"] - 1) < 1e-3


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="nothing tells which files are open")
@pytest.mark.parametrize("damaged", [False, True])
def test_proof_leaves_no_file_open(made: Path, *, damaged: bool) -> None:
    """Programs verify thousands of files in one process."""
    out = made / "out.safetensors"
    if damaged:
        flip(out, QUERY, 0, 6)

    def opened() -> int:
        return len(
            [p for p in Path("/proc/self/fd").iterdir() if p.is_symlink() and str(p.readlink()).startswith(str(made))]
        )

    for _ in range(2):
        with suppress(VerificationFailed):
            prove(out, full=True)
        assert opened() == 0


@pytest.mark.few(3)
@pytest.mark.parametrize("computed", ["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("size", [2e-314, 1e-44, 1e-39, 3e-8])
def test_numbers_that_the_compute_dtype_loses_are_no_fault(size: float, computed: str, tmp_path: Path) -> None:
    base, lora, out = (tmp_path / f"{name}.safetensors" for name in ("base", "lora", "out"))
    save({"a.weight": torch.full((4, 4), size, dtype=torch.float64), "b.weight": rand(4, 4)}, base)
    changing = {"b.lora_down.weight": rand(2, 4), "b.lora_up.weight": rand(4, 2)}
    save({"a.lora_down.weight": rand(2, 4), "a.lora_up.weight": torch.zeros(4, 2), **changing}, lora)
    assert lora_merge.merge(base, lora, out, compute_dtype=computed).verified
    with pytest.raises(VerificationFailed):
        spoiled = load(out)
        save({**spoiled, "a.weight": spoiled["a.weight"] + 1e-3}, out, metadata(out))
        prove(out, search=[tmp_path])


@pytest.mark.parametrize("axis", [(4, 1), (1, 4)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_dora_enlarges_what_underflows_before_it(tmp_path: Path, axis: tuple[int, int], dtype: Any) -> None:
    """The norm of a weight of zeros counts as 2⁻²³, so that magnitudes multiply by millions what was too small."""
    tiny = torch.tensor(1, dtype=torch.int32).view(torch.float32)  # 2⁻¹⁴⁹
    factors = {"a.lora_down.weight": tiny.expand(2, 4).clone(), "a.lora_up.weight": torch.full((4, 2), 0.5)}
    base = save({"a.weight": torch.zeros(4, 4)}, tmp_path / "b.safetensors")
    adapter = save(factors | {"a.dora_scale": torch.full(axis, 0.5)}, tmp_path / "l.safetensors")
    done = lora_merge.merge(base, adapter, tmp_path / "o.safetensors", compute_dtype=dtype)
    assert done.verified is not None
    broken = load(tmp_path / "o.safetensors")
    broken["a.weight"][1, 1] = 1e-30
    save_file(broken, tmp_path / "o.safetensors", metadata(tmp_path / "o.safetensors"))
    with pytest.raises(VerificationFailed, match=r"a\.weight"):
        prove(tmp_path / "o.safetensors", base=base, adapters=[adapter])


def noisy(weight: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    """Noise of 5 % of the largest number of each row."""
    signs = rand(*weight.shape, seed=9).sign().to(weight.dtype)
    return weight + 0.05 * weight.abs().amax(1, keepdim=True) * signs


def without(weight: torch.Tensor, _: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    return before.to(weight.dtype)


def further(weight: torch.Tensor, exact: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """The neighbour of each exact number that is not the nearest one."""
    return torch.nextafter(weight, torch.where(exact > weight, 9.0, -9.0).to(weight.dtype))


def of_recipe(path: Path, **changes: Any) -> dict[str, str]:
    """The metadata of an output whose recipe was edited, sealed again as its author could."""
    entries = metadata(path)
    recipe = json.loads(entries["lora_merge.recipe"])
    for strength in changes.pop("more", ()):
        recipe["adapters"].append({**recipe["adapters"][0], "strength": strength})
    return entries | {"lora_merge.recipe": json.dumps(recipe | changes)}


@pytest.mark.few(2)
@pytest.mark.parametrize(("changes", "forged", "refused"), [
    ({"more": (1e7, -1e7)}, noisy, "not verifiable: the rounding bound is larger than the change"),
    ({"compute_dtype": "bf16"}, noisy, "by the bound of fp32"),
    ({"compute_dtype": "bf16", "rounding": "stochastic"}, noisy, "by the bound of fp32"),
    ({"rounding": "stochastic"}, further, "not what base and adapters give"),
    ({"rounding": "stochastic", "seed": 7}, further, "not what base and adapters give"),
    ({"method": "ties", "density": 1.0, "more": (-1.0,)}, without, "not verifiable: the rounding bound is larger than the change"),
], ids=["cancelling", "bf16", "bf16-stochastic", "stochastic", "seed", "ties"])  # fmt: skip
@pytest.mark.parametrize("named", [False, True])
def test_recipe_does_not_decide_how_strictly_it_is_judged(
    tmp_path: Path, changes: dict[str, Any], forged: Any, refused: str, *, named: bool
) -> None:
    """The weights of a stranger's file are none that an adapter made; its recipe would have each pass."""
    base = save({"a.weight": rand(64, 64)}, tmp_path / "base.safetensors")
    factors = {"a.lora_up.weight": rand(64, 4, seed=1).abs(), "a.lora_down.weight": rand(4, 64, seed=2).abs()}
    lora, out = save(factors, tmp_path / "lora.safetensors"), tmp_path / "out.safetensors"
    lora_merge.merge(base, (lora, 1.0), out, dtype="bf16")
    before = load(base)["a.weight"].double()
    exact = before + factors["a.lora_up.weight"].double() @ factors["a.lora_down.weight"].double()
    save_file({"a.weight": forged(load(out)["a.weight"], exact, before)}, out, of_recipe(out, **changes))
    count = 1 + len(changes.get("more", ()))
    inputs: dict[str, Any] = {"base": base, "adapters": [lora] * count} if named else {}
    with pytest.raises(VerificationFailed, match=refused):
        lora_merge.verify(out, full=True, **inputs)


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8_e4m3fn", "fp8_e5m2"])
@pytest.mark.parametrize("compute", ["fp32", "fp64"])
def test_numbers_drawn_by_the_seed_are_proven_as_drawn(tmp_path: Path, dtype: Any, compute: str) -> None:
    """Tiny and saturated ones too; another seed draws others."""
    sizes = torch.tensor([1.0, 1e-3, 1e-6, 3e4]).repeat_interleave(16)[:, None]
    base = save({"a.weight": rand(64, 48, seed=4) * sizes}, tmp_path / "base.safetensors")
    factors = {"a.lora_up.weight": rand(64, 4, seed=1), "a.lora_down.weight": rand(4, 48, seed=2)}
    lora, out = save(factors, tmp_path / "lora.safetensors"), tmp_path / "out.safetensors"
    options = {"compute_dtype": compute, "rounding": "stochastic", "on_overflow": "saturate"}
    lora_merge.merge(base, lora, out, dtype=dtype, seed=3, **options)  # type: ignore[arg-type]
    assert prove(out, full=True)["proven"]
    with pytest.raises(VerificationFailed, match="not what base and adapters give"):
        save_file(load(out), out, of_recipe(out, seed=4))
        prove(out, full=True)


def test_sums_in_16_bits_that_prove_nothing_are_noted_where_they_were_asked_for(tmp_path: Path) -> None:
    """A file without the change would pass: a note in the merge, which names the output, a refusal for a finished file."""
    base = save({"a.weight": rand(64, 64)}, tmp_path / "base.safetensors")
    factors = {"a.lora_up.weight": rand(64, 4, seed=1), "a.lora_down.weight": rand(4, 64, seed=2)}
    lora, out = save(factors, tmp_path / "lora.safetensors"), tmp_path / "out.safetensors"
    done = lora_merge.merge(base, (lora, 0.1), out, compute_dtype="bf16")
    assert done.verified is not None
    (note,) = [text for text in done.verified["warnings"] if "1 merged tensor is not verifiable" in text]
    assert f"({out}: a.weight," in note
    with pytest.raises(VerificationFailed, match="not verifiable: the rounding bound is larger than the change"):
        lora_merge.verify(out, full=True, compute_dtype="bf16")

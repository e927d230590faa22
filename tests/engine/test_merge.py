"""The main job on files: right numbers, untouched bytes, one rounding. Run: pytest tests/engine/test_merge.py"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lora_merge
from lora_merge.adapters.tensor_values import FileValues
from lora_merge.engine import pipeline
from lora_merge.engine.admission import plan_merge
from lora_merge.engine.block_folder import BlockFolder
from lora_merge.engine.lanes import MemoryPolicy
from lora_merge.engine.pipeline import Pipeline
from lora_merge.engine.stages import WindowTask
from lora_merge.engine.tensor_moves import TORCH_DTYPES
from lora_merge.engine.window_merger import WindowMerger
from lora_merge.engine.windows import SLOTS, window_bytes, windows
from lora_merge.errors import InputError, MergeError, ResourceError
from lora_merge.files.checkpoint import open_checkpoint
from lora_merge.files.safetensors import parse_file
from lora_merge.job import make_job
from tests.kit.adapters import kohya, kohya_names
from tests.kit.files import load, metadata, save
from tests.kit.models import TE, UNET, sd1
from tests.kit.oracles import assert_rounded, expected
from tests.kit.pairs import WHOLE, examples
from tests.kit.tensors import rand

DTYPES = {"keep": torch.float16, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    base = sd1()
    return save(base, tmp_path / "base.safetensors"), save(kohya(base), tmp_path / "style.safetensors")


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tensor_is_the_rounded_fp64_result(files: tuple[Path, Path], tmp_path: Path, dtype: str) -> None:
    base, adapter = files
    report = lora_merge.merge(base, [(adapter, 0.7)], tmp_path / "out.safetensors", dtype=dtype)
    got, exact = load(tmp_path / "out.safetensors"), expected(load(base), [(load(adapter), 0.7)])
    assert list(got) == list(exact)
    for key, value in got.items():
        assert value.dtype == (DTYPES[dtype] if value.is_floating_point() else torch.int64)
        assert_rounded(value, exact[key])
    assert report.coverage["style.safetensors"]["matched"] == len(kohya_names(load(base)))


@pytest.mark.parametrize(
    ("stored", "options"),
    [
        ("F16", {"dtype": "keep"}),
        ("F32", {"dtype": "fp16"}),
        *(("F32", {"dtype": d, "compute_dtype": "fp16"}) for d in ("fp16", "fp32", "bf16", "fp8_e4m3fn")),
    ],
)
def test_number_that_fp16_cannot_hold_is_refused(tmp_path: Path, stored: str, options: dict[str, str]) -> None:
    """Also where it is the sum alone that is made in fp16, and one number that no sample of the proof would meet."""
    base = {"m.a.weight": rand(256, 256), "m.b.weight": rand(256, 256)}
    base["m.b.weight"][100, 7] = 65000.0
    up = torch.zeros(256, 1)
    up[100] = 1000.0
    adapter = {"m.b.lora_up.weight": up, "m.b.lora_down.weight": torch.ones(1, 256), "m.b.alpha": torch.tensor(1.0)}
    path = save({k: v.to(TORCH_DTYPES[stored]) for k, v in base.items()}, tmp_path / "base.safetensors")
    with pytest.raises(InputError, match="too large for fp16") as caught:
        lora_merge.merge(path, save(adapter, tmp_path / "a.safetensors"), tmp_path / "out.safetensors", **options)
    assert caught.value.where == f"{tmp_path / 'out.safetensors'}: m.b.weight"
    assert ('compute_dtype="' in caught.value.fix) == ("compute_dtype" in options)
    assert not (tmp_path / "out.safetensors").exists()


def test_untouched_tensors_keep_their_bytes_and_their_order(tmp_path: Path) -> None:
    base = sd1() | {"odd.nan": torch.tensor([float("nan"), -0.0, float("inf")]), "empty": torch.zeros(0, 4)}
    adapter = {k: v for k, v in kohya(base).items() if "attn1_to_q" in k}
    path = save(base, tmp_path / "base.safetensors", {"format": "pt", "note": "kept", "sshs_model_hash": "stale"})
    lora_merge.merge(path, save(adapter, tmp_path / "a.safetensors"), tmp_path / "out.safetensors")
    got = load(tmp_path / "out.safetensors")
    before = load(path)
    assert list(got) == list(before)
    changed = {k for k in got if not _same_bytes(got[k], before[k])}
    assert changed == {k for k in base if "attn1.to_q" in k}
    kept = metadata(tmp_path / "out.safetensors")
    assert kept["note"] == "kept"
    assert "sshs_model_hash" not in kept


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))


def test_data_keeps_the_alignment_of_the_base(files: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = files
    out = tmp_path / "out.safetensors"
    lora_merge.merge(base, adapter, out)
    starts = [int.from_bytes(p.read_bytes()[:8], "little") + 8 for p in (base, out)]
    assert starts[0] % 4096 == starts[1] % 4096


def test_adapters_commute_and_are_rounded_once(tmp_path: Path) -> None:
    base = sd1(torch.bfloat16)
    paths = [save(kohya(base, seed=s), tmp_path / f"{s}.safetensors") for s in (1, 2, 3)]
    model = save(base, tmp_path / "base.safetensors")
    outputs = []
    for n, order in enumerate(([0, 1, 2], [2, 0, 1])):
        out = tmp_path / f"out{n}.safetensors"
        lora_merge.merge(model, [(paths[i], 0.3 + i / 10) for i in order], out)
        outputs.append(load(out))
    exact = expected(base, [(load(p), 0.3 + i / 10) for i, p in enumerate(paths)])
    for key in exact:
        assert_rounded(outputs[0][key], exact[key])
        assert_rounded(outputs[1][key], exact[key])


def test_strength_zero_is_the_base_bit_for_bit(files: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = files
    lora_merge.merge(base, [(adapter, 0.0)], tmp_path / "out.safetensors")
    got, before = load(tmp_path / "out.safetensors"), load(base)
    assert all(_same_bytes(got[k], before[k]) for k in before)


def test_strength_by_part_of_the_model(files: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = files
    out = tmp_path / "out.safetensors"
    lora_merge.merge(base, adapter, out, strength_for=[("te", 0.0), ("re:attn2", 0.5), ("unet", 2.0)], dtype="fp32")
    got, before, names = load(out), load(base), kohya_names(load(base))
    full = expected(before, [(load(adapter), 1.0)])
    for key in names.values():
        factor = 0.0 if not key.startswith(UNET) else 1.0 if "attn2" in key else 2.0
        assert_rounded(got[key], before[key].double() + factor * (full[key] - before[key].double()))


@given(
    te=st.sampled_from([0.0, 0.5, 1.0, -1.0]), unet=st.sampled_from([0.0, 0.25, 1.0, 2.0]),
    norm=st.sampled_from([0.0, 0.5, 1.0]), strength=st.sampled_from([1.0, 0.5]),
)  # fmt: skip
@settings(max_examples=examples(25))
def test_strength_by_part_holds_for_tensors_that_are_replaced_whole(
    te: float, unet: float, norm: float, strength: float
) -> None:
    """W + s (V − W) with the factor of the part that the tensor is in, by its component and by its key."""
    base = sd1(torch.float32)
    names = [f"{TE}text_model.encoder.layers.0.layer_norm1.weight", f"{UNET}input_blocks.1.1.norm.weight",
             f"{UNET}input_blocks.0.0.bias", f"{UNET}out.2.weight"]  # fmt: skip
    lora = {k: v for k, v in kohya(base).items() if "attn1_to_q" in k}
    own = {name: rand(*base[name].shape, seed=9) for name in names}
    parts = [("te", te), ("unet", unet), (r"re:\.norm\.weight$", norm)]
    got = lora_merge.merge_state_dict(base, [(lora | own, strength)], strength_for=parts)
    for name in names:
        factor = strength * (te if name.startswith(TE) else unet) * (norm if name.endswith(".norm.weight") else 1)
        exact = base[name].double() + factor * (own[name].double() - base[name].double())
        assert_rounded(got[name], exact)
        if factor == 1:
            assert torch.equal(got[name], own[name])
        if factor == 0:
            assert torch.equal(got[name], base[name])


def test_recipe_names_and_hashes_every_input(files: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = files
    lora_merge.merge(base, [(adapter, 0.25)], tmp_path / "out.safetensors", dtype="bf16")
    kept = metadata(tmp_path / "out.safetensors")
    recipe = json.loads(kept["lora_merge.recipe"])
    hashes = {hashlib.sha256(p.read_bytes()).hexdigest() for p in (base, adapter)}
    assert hashes == {f["sha256"] for part in (recipe["base"], *recipe["adapters"]) for f in part["files"]}
    assert recipe["adapters"][0]["strength"] == 0.25
    assert "style.safetensors" in kept["modelspec.merged_from"]


def test_linear_factors_fit_convolutions_and_the_reverse(tmp_path: Path) -> None:
    base = {"a.weight": rand(8, 6, 1, 1), "b.weight": rand(8, 6), "c.weight": rand(8, 6, 3, 3)}
    adapter = {
        "a.lora_up.weight": rand(8, 2), "a.lora_down.weight": rand(2, 6),
        "b.lora_up.weight": rand(8, 2, 1, 1), "b.lora_down.weight": rand(2, 6, 1, 1),
        "c.lora_up.weight": rand(8, 2), "c.lora_down.weight": rand(2, 54),
    }  # fmt: skip
    merged = lora_merge.merge_state_dict(base, adapter)
    for name in "abc":
        delta = adapter[f"{name}.lora_up.weight"].flatten(1) @ adapter[f"{name}.lora_down.weight"].flatten(1)
        torch.testing.assert_close(
            merged[f"{name}.weight"], base[f"{name}.weight"] + delta.reshape(base[f"{name}.weight"].shape)
        )


def test_layer_without_a_bias_gets_one(tmp_path: Path) -> None:
    base = {"m.a.weight": rand(8, 6), "m.z.weight": rand(2, 2)}
    adapter = {"m.a.diff": rand(8, 6), "m.a.diff_b": rand(8)}
    save(base, tmp_path / "b.safetensors")
    lora_merge.merge(
        tmp_path / "b.safetensors", [(save(adapter, tmp_path / "a.safetensors"), 0.5)], tmp_path / "o.safetensors"
    )
    got = load(tmp_path / "o.safetensors")
    torch.testing.assert_close(got["m.a.bias"], 0.5 * adapter["m.a.diff_b"])
    torch.testing.assert_close(got["m.a.weight"], base["m.a.weight"] + 0.5 * adapter["m.a.diff"])


@given(limit=st.sampled_from(["8MiB", "16MiB", "1GiB"]), dtype=st.sampled_from(["keep", "fp32", "bf16"]))
@settings(max_examples=24 if WHOLE else 2)
def test_bytes_do_not_depend_on_the_memory_bound(
    tmp_path_factory: pytest.TempPathFactory, limit: str, dtype: str
) -> None:
    folder = tmp_path_factory.mktemp("bound")
    base = {f"layer.{n}.weight": rand(700 + n, 900, seed=n).half() for n in range(12)} | {
        "rest": rand(3_000_001).half()
    }
    adapter = {}
    for n in range(0, 12, 2):
        adapter |= {f"layer.{n}.lora_up.weight": rand(700 + n, 8), f"layer.{n}.lora_down.weight": rand(8, 900)}
    files = save(base, folder / "b.safetensors"), save(adapter, folder / "a.safetensors")
    outputs = [folder / "tight.safetensors", folder / "wide.safetensors"]
    for out, bound in zip(outputs, (limit, "2GiB"), strict=True):
        lora_merge.merge(files[0], files[1], out, max_memory=bound, dtype=dtype, device="cpu")
    assert outputs[0].read_bytes() == outputs[1].read_bytes()


@pytest.fixture
def mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A base of 24 windows and an adapter for every fourth of its tensors; its hash is known. Torch comes late."""
    monkeypatch.setattr("lora_merge.engine.windows.STRETCH", 2**19)
    base = {f"layer.{n:02}.weight": rand(500, 701 + n, seed=n).half() for n in range(24)}
    adapter = {}
    for n in range(0, 24, 4):
        adapter |= {f"layer.{n:02}.lora_up.weight": rand(500, 4), f"layer.{n:02}.lora_down.weight": rand(4, 701 + n)}
    files = save(base, tmp_path / "b.safetensors"), save(adapter, tmp_path / "a.safetensors")
    lora_merge.merge(*files, tmp_path / "usual.safetensors", max_memory="8MiB")
    digests = {f: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
    monkeypatch.setattr("lora_merge.disk.hashes.RememberedHashes.digest", lambda _, path: digests.get(path))
    return files


@pytest.mark.few(2)
@pytest.mark.parametrize("late", [0, 5, 12])
def test_bytes_that_need_no_torch_go_out_before_it_is_loaded(
    mixed: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    usual, out = tmp_path / "usual.safetensors", tmp_path / "out.safetensors"
    there, written, make, write = threading.Event(), list[tuple[bool, bool]](), Pipeline._make, Pipeline.write

    def waiting(self: Pipeline) -> WindowMerger:
        assert not late or there.wait(20)
        return make(self)

    @wraps(write)
    def noting(self: Pipeline, task: WindowTask) -> None:
        written.append((task.window.untouched, self._merger.done()))
        write(self, task)
        if len(written) == late:
            there.set()

    monkeypatch.setattr(Pipeline, "_make", waiting)
    monkeypatch.setattr(Pipeline, "write", noting)
    monkeypatch.setattr("lora_merge.engine.pipeline.file_system", lambda _: "ext4")  # some fill gaps with zeros first
    lora_merge.merge(*mixed, out, max_memory="8MiB")
    assert out.read_bytes() == usual.read_bytes().replace(b"usual", b"out")
    assert written[:late] == [(True, False)] * late
    assert all(made for untouched, made in written if not untouched)


def test_base_that_is_hashed_is_read_in_its_order(
    mixed: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, starts = Pipeline.read, list[int]()

    @wraps(read)
    def noting(self: Pipeline, task: WindowTask) -> None:
        starts.append(task.window.start)
        read(self, task)

    monkeypatch.setattr(Pipeline, "read", noting)
    monkeypatch.setattr("lora_merge.disk.hashes.RememberedHashes.digest", lambda *_: None)
    lora_merge.merge(*mixed, tmp_path / "out.safetensors", max_memory="8MiB")
    assert starts == sorted(starts)


@pytest.mark.slow
def test_report_shows_where_the_time_went(
    mixed: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = Pipeline.settle

    @wraps(settle)
    def slow(self: Pipeline, task: WindowTask) -> None:
        time.sleep(0.1)
        settle(self, task)

    monkeypatch.setattr(Pipeline, "settle", slow)
    report = lora_merge.merge(*mixed, tmp_path / "out.safetensors", verify=False)
    stages = report.stages
    assert stages.keys() == {"read", "hash", "start", "fold", "write", "wait"}
    busiest = max(stages[name] for name in ("read", "hash", "fold", "write"))
    assert busiest == stages["fold"] >= 0.1
    assert 0 <= stages["wait"] <= report.seconds - busiest


@pytest.mark.parametrize(("stored", "dtype"), [("F32", "bf16"), ("F32", "keep"), ("BF16", "fp32"), ("F64", "fp16")])
def test_windows_stay_within_the_memory_bound(tmp_path: Path, stored: str, dtype: str) -> None:
    width, shape = TORCH_DTYPES[stored].itemsize, [4096, 4096]
    infos = {f"layer.{n}.weight": {"dtype": stored, "shape": shape} for n in range(16)}
    for n, info in enumerate(infos.values()):
        info["data_offsets"] = [n * width << 24, (n + 1) * width << 24]
    header = json.dumps(infos).encode()
    with (tmp_path / "b.safetensors").open("wb") as f:
        f.write(len(header).to_bytes(8, "little") + header)
        f.truncate(8 + len(header) + (16 * width << 24))  # sparse
    adapter = {"layer.3.lora_up.weight": rand(4096, 4), "layer.3.lora_down.weight": rand(4, 4096)}
    save(adapter, tmp_path / "a.safetensors")
    bound = 2**28
    paths = (tmp_path / f"{n}.safetensors" for n in "bao")
    plan = plan_merge(make_job(*paths, dtype=dtype, max_memory=bound))
    found = list(windows([plan], window_bytes(plan)))
    assert max(w.size + w.input_size for w in found) <= bound // SLOTS
    assert sum(w.size for w in found) == sum(t.nbytes for f in plan.files for t in f.targets)


def test_planning_reads_headers_only_and_raises_what_merging_would(files: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = files
    plan = lora_merge.plan(base, adapter, tmp_path / "out.safetensors", dtype="bf16")
    assert plan.changed == len(kohya_names(load(base)))
    assert not (tmp_path / "out.safetensors").exists()
    lora_merge.merge(base, adapter, tmp_path / "out.safetensors")
    with pytest.raises(MergeError) as e:
        lora_merge.plan(base, adapter, tmp_path / "out.safetensors")
    assert e.value.exit_code == 2


def test_loaded_adapter_shows_its_modules_and_deltas(files: tuple[Path, Path]) -> None:
    base, path = files
    adapter = lora_merge.load_adapter(path)
    names, tensors = kohya_names(load(base)), load(path)
    assert set(adapter.modules) == set(names)
    for name, key in names.items():
        assert adapter.algorithm(name) == "lora"
        weight = load(base)[key]
        torch.testing.assert_close(
            adapter.delta(name, weight).double(),
            expected(load(base), [(tensors, 1.0)])[key] - weight.double(), atol=1e-6, rtol=1e-4,
        )  # fmt: skip


def test_merging_in_memory_equals_merging_files(files: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = files
    state, kept = load(base), {k: t.clone() for k, t in load(base).items()}
    merged = lora_merge.merge_state_dict(state, [(adapter, 0.6)], dtype="bf16")
    lora_merge.merge(base, [(adapter, 0.6)], tmp_path / "out.safetensors", dtype="bf16")
    for key, value in load(tmp_path / "out.safetensors").items():
        assert torch.equal(merged[key], value)
    assert all(torch.equal(state[k], kept[k]) for k in kept)


def test_module_in_two_spellings_is_refused(tmp_path: Path) -> None:
    lora = {f"{name}.lora_up.weight": rand(6, 2, seed=len(name)) for name in ("m.a", "lycoris_m_a")}
    lora |= {f"{name}.lora_down.weight": rand(2, 4) for name in ("m.a", "lycoris_m_a")}
    base = save({"m.a.weight": rand(6, 4)}, tmp_path / "b.safetensors")
    with pytest.raises(InputError, match="change the same weight"):
        lora_merge.merge(base, save(lora, tmp_path / "a.safetensors"), tmp_path / "o.safetensors")


@pytest.mark.parametrize(
    ("key", "kind"), [("norm.bias", "set_weight"), ("norm.weight", "diff"), ("norm.scale", "diff")]
)
def test_whole_values_may_stand_behind_a_parameter(key: str, kind: str) -> None:
    base = {"norm.weight": rand(5), "norm.bias": rand(5, seed=1), "norm.scale": rand(5, seed=2)}
    merged = lora_merge.merge_state_dict(base, {f"{key}.{kind}": rand(5, seed=3)})
    exact = rand(5, seed=3) + (base[key] if kind == "diff" else 0)
    torch.testing.assert_close(merged[key], exact)
    assert all(torch.equal(merged[k], base[k]) for k in base if k != key)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
def test_adapters_of_odd_dtypes_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    base = save({"m.a.weight": rand(6, 4)}, tmp_path / "b.safetensors")
    lora = {"m.a.lora_up.weight": rand(6, 2).to(dtype), "m.a.lora_down.weight": rand(2, 4)}
    with pytest.raises(InputError, match="an adapter tensor of"):
        lora_merge.merge(base, save(lora, tmp_path / "a.safetensors"), tmp_path / "o.safetensors")


def test_single_layer_in_memory_is_no_embedding() -> None:
    lora = {"lora_unet_x.lora_up.weight": rand(6, 2), "lora_unet_x.lora_down.weight": rand(2, 4)}
    with pytest.raises(MergeError, match="the base is a model unknown to lora-merge"):
        lora_merge.merge_state_dict(torch.nn.Linear(4, 6).state_dict(), lora)


@pytest.mark.parametrize(("key", "what"), [
    ("lora_controlnet", "Control-LoRA"), ("lllite_unet_input_blocks_4_1_attn1_to_q.down.0.weight", "LLLite"),
    ("control_model.input_hint_block.0.weight", "ControlNet"), ("controlnet_cond_embedding.conv_in.weight", "ControlNet"),
    ("ip_adapter.1.to_k_ip.weight", "IP-Adapter"), ("clip_g", "textual inversion"), ("768.0.linear1.weight", "hypernetwork"),
    ("control_layers.0.after_proj.weight", "ControlNet"), ("body.0.block1.weight", "T2I-Adapter"), ("redux_up.weight", "Redux"),
    ("ip_adapter_proj_model.proj.weight", "IP-Adapter"), ("pulid_ca.0.to_q.weight", "PuLID"),
])  # fmt: skip
def test_tensors_beside_a_model_are_called_what_they_are(
    files: tuple[Path, Path], tmp_path: Path, key: str, what: str
) -> None:
    base = load(files[0])
    other = save({key: torch.ones(4, 4), "x.proj.weight": torch.ones(4, 4)}, tmp_path / "other.safetensors")
    with pytest.raises(InputError, match=f"no adapter tensors, it is an? .*{what}") as error:
        lora_merge.plan(files[0], other, tmp_path / "out.safetensors")
    assert "at generation time" in error.value.fix
    with pytest.raises(InputError, match="no adapter tensors, it is a model: Stable Diffusion 1") as error:
        lora_merge.merge_state_dict(base, base)
    assert "name a LoRA or another adapter" in error.value.fix


def test_averages_beside_the_weights_stay_and_a_note_says_so(tmp_path: Path) -> None:
    base = {"model.diffusion_model.a.weight": rand(6, 4), "model_ema.diffusion_modelaweight": rand(6, 4)}
    lora = {"diffusion_model.a.lora_up.weight": rand(6, 2), "diffusion_model.a.lora_down.weight": rand(2, 4)}
    a, b = save(lora, tmp_path / "a.safetensors"), save(base, tmp_path / "b.safetensors")
    report = lora_merge.merge(b, a, tmp_path / "o.safetensors")
    assert any("model_ema" in note for note in report.notes)
    merged, average = load(tmp_path / "o.safetensors"), "model_ema.diffusion_modelaweight"
    assert torch.equal(merged[average], base[average])


@pytest.mark.parametrize(("down", "up"), [("lora_A", "lora_B"), ("lora_down", "lora_up")], ids=["PEFT", "ai-toolkit"])
@pytest.mark.parametrize("stored", [True, False], ids=["alpha in the file", "alpha stated"])
def test_bias_of_a_factor_is_scaled_as_the_factors_are(tmp_path: Path, down: str, up: str, *, stored: bool) -> None:
    layer, into, out = torch.nn.Linear(4, 6), torch.nn.Linear(4, 2, bias=False), torch.nn.Linear(2, 6)
    lora = {f"a.{down}.weight": into.weight, f"a.{up}.weight": out.weight, f"a.{up}.bias": out.bias}
    adapter = save(lora | ({"a.alpha": torch.tensor(6.0)} if stored else {}), tmp_path / "a.safetensors")
    base = save({f"a.{k}": v for k, v in layer.state_dict().items()}, tmp_path / "b.safetensors")
    settings = {} if stored else {"lora_alpha": 6.0}
    lora_merge.merge(base, adapter, tmp_path / "o.safetensors", setting=settings)
    got, x = load(tmp_path / "o.safetensors"), torch.randn(3, 4)
    want = layer(x) + 6 / 2 * out(into(x))
    torch.testing.assert_close(torch.nn.functional.linear(x, got["a.weight"], got["a.bias"]), want, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("content", "what", "fix"), [
    ({"<cat>": torch.ones(4)}, "textual inversion", "at generation time"), ({"t5_out": torch.ones(2, 4)}, "textual inversion", "at generation time"),
    ({"string_to_param": {"*": torch.ones(2, 4)}, "name": "cat"}, "textual inversion", "at generation time"),
    ({"image_proj": {"proj.weight": torch.ones(4, 4)}, "ip_adapter": {"1.to_k_ip.weight": torch.ones(4, 4)}}, "IP-Adapter", "at generation time"),
    ({768: [{"linear.0.weight": torch.ones(4, 4)}], "name": "h"}, "hypernetwork", "at generation time"),
    ({"unet:0:up": torch.ones(4, 2), "unet:0:down": torch.ones(2, 4), "<s1>": torch.ones(4)}, "cloneofsimo", "lora_add"),
    ([torch.ones(4, 2), torch.ones(2, 4), torch.ones(8, 2), torch.ones(2, 4)], "cloneofsimo", "lora_add"),
    ({"ip_adapter.0.to_q_lora.down.weight": torch.ones(2, 4), "ip_adapter.0.to_q_lora.up.weight": torch.ones(4, 2)}, "IP-Adapter", "at generation time"),
])  # fmt: skip
def test_torch_files_of_other_kinds_are_called_what_they_are(
    files: tuple[Path, Path], tmp_path: Path, content: Any, what: str, fix: str
) -> None:
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(MergeError, match=what) as error:
        lora_merge.plan(files[0], tmp_path / "other.pt", tmp_path / "out.safetensors")
    assert fix in error.value.fix


def test_model_is_no_adapter_even_if_it_has_what_a_control_lora_has(tmp_path: Path) -> None:
    model = {
        "double_blocks.0.img_attn.norm.key_norm.scale": rand(4),
        "double_blocks.0.img_attn.qkv.weight": rand(12, 4),
    }
    base = save(model, tmp_path / "b.safetensors")
    with pytest.raises(InputError, match="no adapter tensors"):
        lora_merge.merge(base, save(model, tmp_path / "a.safetensors"), tmp_path / "o.safetensors")


@pytest.mark.parametrize("ending", ["ckpt", "pt", "pth", "bin"])
def test_outputs_are_never_called_pickles(files: tuple[Path, Path], tmp_path: Path, ending: str) -> None:
    with pytest.raises(MergeError, match="never pickles"):
        lora_merge.merge(*files, tmp_path / f"o.{ending}")


def test_grown_vocabulary_is_in_the_config(tmp_path: Path) -> None:
    base, peft = tmp_path / "base", tmp_path / "peft"
    base.mkdir()
    peft.mkdir()
    weights = {"model.embed_tokens.weight": rand(10, 4), "model.layers.0.self_attn.q_proj.weight": rand(4, 4)}
    save(weights, base / "model.safetensors")
    (base / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 10}))
    prefix = "base_model.model.model."
    adapter = {
        f"{prefix}embed_tokens.weight": rand(12, 4, seed=1),
        f"{prefix}layers.0.self_attn.q_proj.lora_A.weight": rand(2, 4),
        f"{prefix}layers.0.self_attn.q_proj.lora_B.weight": rand(4, 2),
    }
    save(adapter, peft / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "modules_to_save": ["embed_tokens"]}
    (peft / "adapter_config.json").write_text(json.dumps(config))
    lora_merge.merge(base, peft, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 12
    assert torch.equal(load(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"], rand(12, 4, seed=1))


def test_bare_parameter_right_below_its_prefix_is_replaced() -> None:
    """A name of two dots' depth that is a module of the base without its leaf is none of its parameters."""
    te = "cond_stage_model.model."
    base = {f"{te}positional_embedding": rand(7, 4), f"{te}token_embedding.weight": rand(9, 4), f"{te}ln_final.weight": rand(4),
            f"{te}transformer.resblocks.0.attn.in_proj_weight": rand(12, 4)}  # fmt: skip
    name = "lora_te_text_model_encoder_layers_0_self_attn_q_proj"
    lora = {f"{name}.lora_up.weight": rand(4, 1), f"{name}.lora_down.weight": rand(1, 4)}
    new = rand(7, 4, seed=3)
    merged = lora_merge.merge_state_dict(base, lora | {f"{te}positional_embedding": new})
    assert torch.equal(merged[f"{te}positional_embedding"], new)
    with pytest.raises(MergeError, match="meaning"):
        lora_merge.merge_state_dict(base, lora | {f"{te}ln_final": rand(4)})


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("alpha", [2.0, 2])
def test_alpha_that_is_a_plain_number_counts(tmp_path: Path, alpha: float, *, zipped: bool) -> None:
    """In a pickle a number need not be a tensor; without it the scale would be another."""
    base = {"model.a.weight": torch.eye(8)}
    lora = {"model.a.lora_down.weight": torch.ones(4, 8), "model.a.lora_up.weight": torch.ones(8, 4)}
    save(base, tmp_path / "base.safetensors")
    more = {"model.a.alpha": alpha, "epoch": 3, "ema.alpha": 0.5, "model.a.flag": True}
    torch.save(lora | more, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    report = lora_merge.merge(tmp_path / "base.safetensors", tmp_path / "x.pt", tmp_path / "out.safetensors")
    assert torch.equal(load(tmp_path / "out.safetensors")["model.a.weight"], torch.eye(8) + 2 / 4 * 4)
    notes = str(report.coverage)
    assert "'model.a.alpha'" not in notes
    for name in ("epoch", "ema.alpha", "model.a.flag"):
        assert repr(name) in notes


@pytest.mark.parametrize(("alpha", "noted"), [(0.0, True), (2.0, False)])
def test_alpha_of_zero_counts_as_the_rank_and_is_noted(tmp_path: Path, alpha: float, *, noted: bool) -> None:
    save({"a.weight": torch.zeros(4, 4)}, tmp_path / "base.safetensors")
    factors = {"a.lora_up.weight": torch.ones(4, 2), "a.lora_down.weight": torch.ones(2, 4)}
    save(factors | {"a.alpha": torch.tensor(alpha)}, tmp_path / "a.safetensors")
    report = lora_merge.merge(tmp_path / "base.safetensors", tmp_path / "a.safetensors", tmp_path / "out.safetensors")
    assert torch.equal(load(tmp_path / "out.safetensors")["a.weight"], torch.full((4, 4), 2.0))
    assert ("a: the stored alpha is 0" in str(report.coverage)) is noted
    assert "no alpha is stored" not in str(report.coverage)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.int8])
def test_alpha_of_any_dtype_is_the_number_that_torch_reads(tmp_path: Path, dtype: torch.dtype) -> None:
    values = (
        torch.arange(256, dtype=torch.uint8).view(dtype) if dtype.itemsize == 1 else torch.tensor([1.5, -3]).to(dtype)
    )
    save({"a": values}, tmp_path / "a.safetensors")
    read = FileValues().elements(open_checkpoint(tmp_path / "a.safetensors").tensors["a"])
    torch.testing.assert_close(torch.tensor(read).float(), values.float(), rtol=0, atol=0, equal_nan=True)


def test_alpha_in_fp8_counts_and_a_truth_value_is_none(tmp_path: Path) -> None:
    save({"a.weight": torch.zeros(4, 4)}, tmp_path / "base.safetensors")
    lora = {"a.lora_up.weight": torch.ones(4, 2), "a.lora_down.weight": torch.ones(2, 4)}
    save(lora | {"a.alpha": torch.tensor(3.0).to(torch.float8_e4m3fn)}, tmp_path / "fp8.safetensors")
    save(lora | {"a.alpha": torch.ones((), dtype=torch.bool)}, tmp_path / "flag.safetensors")
    lora_merge.merge(tmp_path / "base.safetensors", tmp_path / "fp8.safetensors", tmp_path / "out.safetensors")
    assert torch.equal(load(tmp_path / "out.safetensors")["a.weight"], torch.full((4, 4), 3.0))
    with pytest.raises(InputError, match="alpha is True"):
        lora_merge.merge(
            tmp_path / "base.safetensors", tmp_path / "flag.safetensors", tmp_path / "flag_out.safetensors"
        )


def test_rank_of_zero_changes_nothing_and_is_noted(tmp_path: Path) -> None:
    base = {"a.weight": rand(4, 4), "b.weight": rand(4, 4)}
    save(base, tmp_path / "base.safetensors")
    ranks = {"a": 0, "b": 1}
    lora = {f"{m}.lora_A.weight": rand(r, 4) for m, r in ranks.items()}
    save(lora | {f"{m}.lora_B.weight": rand(4, r) for m, r in ranks.items()}, tmp_path / "x.safetensors")
    report = lora_merge.merge(tmp_path / "base.safetensors", tmp_path / "x.safetensors", tmp_path / "out.safetensors")
    merged = load(tmp_path / "out.safetensors")
    assert torch.equal(merged["a.weight"], base["a.weight"])
    assert not torch.equal(merged["b.weight"], base["b.weight"])
    assert [n for n in report.coverage["x.safetensors"]["notes"] if "rank 0" in n and n.startswith("a: ")]


def twice(tmp_path: Path, name: str = "a.b", **other: torch.Tensor) -> tuple[Path, Path]:
    """A base, and an adapter that holds one module under two names, the second with these tensors instead."""
    save({f"{name}.weight": torch.zeros(8, 8)}, tmp_path / "base.safetensors")
    one = {
        "lora_up.weight": rand(8, 2),
        "lora_down.weight": rand(2, 8),
        "alpha": torch.tensor(1.0),
        "dora_scale": torch.ones(8, 1),
    }
    flat = f"lora_unet_{name.replace('.', '_')}"
    both = {f"{flat}.{k}": v for k, v in one.items()} | {f"{name}.{k}": v.clone() for k, v in (one | other).items()}
    return tmp_path / "base.safetensors", save(both, tmp_path / "twice.safetensors")


@pytest.mark.parametrize("in_memory", [False, True])
def test_equal_copy_under_another_name_is_applied_once(tmp_path: Path, *, in_memory: bool) -> None:
    base, adapter = twice(tmp_path)
    first = {k: v for k, v in load(adapter).items() if k.startswith("a.b.")}
    want = lora_merge.merge_state_dict(load(base), first)["a.b.weight"]
    if in_memory:
        got = lora_merge.merge_state_dict(load(base), load(adapter))["a.b.weight"]
    else:
        report = lora_merge.merge(base, adapter, tmp_path / "out.safetensors")
        got = load(tmp_path / "out.safetensors")["a.b.weight"]
        assert report.coverage["twice.safetensors"]["matched"] == 2
        assert "a second time under another name" in str(report.coverage)
    assert want.any()
    assert torch.equal(got, want)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [
    "x_embedder", "context_embedder", "pos_embed.proj", "time_text_embed.timestep_embedder.linear_1", "patch_embedding",
    "time_embedding.linear_1", "condition_embedder.time_proj", "distilled_embed.0", "adaln_single.emb.linear",
    "blocks.0.ff_i.shared_experts.w1", "shared", "embed_tokens", "lm_head",  # behind two prefixes
])  # fmt: skip
def test_layers_called_after_embeddings_are_no_tied_tables(tmp_path: Path, name: str) -> None:
    base, adapter = twice(tmp_path, name)
    first = {k: v for k, v in load(adapter).items() if k.startswith(f"{name}.")}
    got, want = (lora_merge.merge_state_dict(load(base), a)[f"{name}.weight"] for a in (load(adapter), first))
    assert want.any()
    assert torch.equal(got, want)
    base, adapter = twice(tmp_path, name, alpha=torch.tensor(2.0))
    with pytest.raises(InputError, match="change the same weight"):
        lora_merge.plan(base, adapter, tmp_path / "out.safetensors")


@pytest.mark.parametrize(("slot", "value"), [
    ("lora_up.weight", rand(8, 2, seed=1)), ("lora_up.weight", rand(8, 2).double()), ("alpha", torch.tensor(2.0)),
    ("dora_scale", torch.full((8, 1), 2.0)), ("lora_down.weight", rand(2, 8, seed=1)),
])  # fmt: skip
def test_copy_that_differs_is_refused(tmp_path: Path, slot: str, value: torch.Tensor) -> None:
    base, adapter = twice(tmp_path, **{slot: value})
    with pytest.raises(InputError, match="change the same weight"):
        lora_merge.plan(base, adapter, tmp_path / "out.safetensors")
    with pytest.raises(InputError, match="change the same weight"):
        lora_merge.merge_state_dict(load(base), load(adapter))


@pytest.mark.few(3)
@pytest.mark.parametrize(("arguments", "refused"), [
    ("{'conv_dim': '4'}", {"lokr"}), ("[1]", {"lokr"}), ("{'algo': 'DyLoRA'}", {"lokr", "lora"}), ('{"conv_dim": "4"}', set()),
])  # fmt: skip
@pytest.mark.parametrize("algorithm", ["lora", "lokr", "full"])
def test_network_arguments_that_cannot_be_read_matter_where_the_formula_takes_some(
    tmp_path: Path, algorithm: str, arguments: str, refused: set[str]
) -> None:
    tensors = {
        "lora": {"a.lora_up.weight": rand(4, 2), "a.lora_down.weight": rand(2, 4), "a.alpha": torch.ones(())},
        "lokr": {"a.lokr_w1": rand(2, 2), "a.lokr_w2": rand(2, 2), "a.alpha": torch.ones(())},
        "full": {"a.diff": rand(4, 4)},
    }
    base = save({"a.weight": rand(4, 4)}, tmp_path / "base.safetensors")
    adapter = save(tensors[algorithm], tmp_path / "x.safetensors", {"ss_network_args": arguments})
    if algorithm in refused:
        with pytest.raises(InputError, match="the metadata is no"):
            lora_merge.plan(base, adapter, tmp_path / "out.safetensors")
        return
    report = lora_merge.merge(base, adapter, tmp_path / "out.safetensors")
    assert ("takes nothing from there" in str(report.coverage)) == (not arguments.startswith('{"'))


def test_alpha_of_hundreds_of_digits_is_damage(tmp_path: Path) -> None:
    torch.save({"a.lora_down.weight": torch.ones(4, 8), "a.alpha": 10**400}, tmp_path / "x.pt")
    with pytest.raises(InputError, match="not a valid torch file"):
        open_checkpoint(tmp_path / "x.pt")


@pytest.mark.parametrize("name", ["digests", "read", "write", "fold", "expect"])
def test_system_without_threads_is_reported(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    start = threading.Thread.start

    def refused(self: threading.Thread) -> None:
        if self.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(ResourceError, match="no more threads"):
        lora_merge.merge(*files, tmp_path / "out.safetensors")
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize(
    "error",
    [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory"), RuntimeError("std::bad_alloc"),
     RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory"),
     RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: not enough memory: you tried to allocate 1"),
     ImportError("libtorch_cpu.so: failed to map segment from shared object")],
)  # fmt: skip
def test_system_without_memory_is_reported(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("lora_merge.engine.window_merger.WindowMerger.begin", refused)
    with pytest.raises(ResourceError, match="not enough memory"):
        lora_merge.merge(*files, tmp_path / "out.safetensors")
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not bound the addresses of a process")
def test_memory_too_small_for_torch_is_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lora_merge", *map(str, files), "-o", str(tmp_path / "out.safetensors"), "-q"]
    limited = ["sh", "-c", 'ulimit -v 500000 && exec "$@"', "sh", *command]
    done = subprocess.run(limited, capture_output=True, text=True, check=False)
    assert done.returncode == 5, done.stderr
    assert "error: not enough memory" in done.stderr or "error: the system allows no more threads" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("*out*"))


def test_unexpected_failure_is_reported_as_one(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lora_merge.engine.window_merger.WindowMerger.begin", lambda *_: 1 / 0)
    with pytest.raises(lora_merge.MergeError, match="unexpected failure: ZeroDivisionError") as error:
        lora_merge.merge(*files, tmp_path / "out.safetensors")
    assert error.value.exit_code == 1
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_merge_without_a_byte_needs_its_device_too(tmp_path: Path) -> None:
    save({"a.weight": torch.zeros(0, 16)}, tmp_path / "base.safetensors")
    save(
        {"a.lora_A.weight": torch.zeros(4, 16), "a.lora_B.weight": torch.zeros(0, 4)}, tmp_path / "adapter.safetensors"
    )
    out = tmp_path / "out.safetensors"
    with pytest.raises(ResourceError, match="no device"):
        lora_merge.merge(tmp_path / "base.safetensors", [tmp_path / "adapter.safetensors"], out, device="cuda:99")
    assert {p.name for p in tmp_path.iterdir()} == {"base.safetensors", "adapter.safetensors"}
    files = tmp_path / "base.safetensors", tmp_path / "adapter.safetensors"
    assert lora_merge.merge(*files, out, device="cpu").device == "cpu"


def test_equal_layers_in_memory_are_folded_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch on a GPU, not one per layer; and the same numbers."""
    base = {f"m.{n}.weight": rand(16, 24, seed=n) for n in range(50)}
    lora = {f"m.{n}.lora_up.weight": rand(16, 2, seed=n) for n in range(50)}
    lora |= {f"m.{n}.lora_down.weight": rand(2, 24, seed=n) for n in range(50)}
    calls: list[int] = []
    fold = BlockFolder._merge
    monkeypatch.setattr(MemoryPolicy, "most", lambda *_: 64)  # a CPU in a GPU's place
    monkeypatch.setattr(
        BlockFolder, "_merge", lambda self, group, lane: calls.append(len(group)) or fold(self, group, lane)
    )
    merged = lora_merge.merge_state_dict(base, [lora])
    assert sum(calls) == 50
    assert len(calls) <= 2
    for n in range(50):
        up, down = (lora[f"m.{n}.lora_{k}.weight"].double() for k in ("up", "down"))
        assert torch.allclose(merged[f"m.{n}.weight"].double(), base[f"m.{n}.weight"].double() + up @ down, rtol=1e-5)


@pytest.mark.parametrize("known", [True, False])
def test_input_that_had_other_bytes_for_a_while_is_detected(
    mixed: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, known: bool
) -> None:
    """Its bytes and its time are put back before the end; the digest may be one of an earlier run."""
    base, out, run = mixed[0], tmp_path / "out.safetensors", Pipeline.run
    at = parse_file(base).tensors["layer.09.weight"].offset
    if not known:
        monkeypatch.setattr("lora_merge.disk.hashes.RememberedHashes.digest", lambda *_: None)

    def flip() -> None:
        old = base.stat()
        with base.open("r+b") as f:
            f.seek(at)
            byte = f.read(1)[0]
            f.seek(at)
            f.write(bytes([byte ^ 1]))
        os.utime(base, ns=(old.st_atime_ns, old.st_mtime_ns))

    @wraps(run)
    def meanwhile(self: Pipeline) -> Any:
        flip()
        found = run(self)
        flip()
        return found

    monkeypatch.setattr(Pipeline, "run", meanwhile)
    with pytest.raises(lora_merge.MergeError, match=r"changed while being read|no adapter changes differs"):
        lora_merge.merge(*mixed, out, verify=False)
    assert not out.exists()


def test_progress_moves_within_a_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One window of many blocks, written in many pieces: a slow formula or disk would not let the bar stand."""
    monkeypatch.setattr(pipeline, "STEP_SECONDS", 0.0)
    base = save({"w": rand(2048, 1024).half()}, tmp_path / "base.safetensors")
    lora = save({"w.lora_up.weight": rand(2048, 2), "w.lora_down.weight": rand(2, 1024)}, tmp_path / "l.safetensors")

    def parts(piece: int) -> list[int]:
        steps: list[lora_merge.Step] = []
        monkeypatch.setattr(pipeline, "WRITTEN_BYTES", piece)
        report = lora_merge.merge(base, lora, tmp_path / "o.safetensors", overwrite=True, progress=steps.append)
        found = [s.done for s in steps if s.stage == "merge"]
        assert sum(found) == report.written and max(found) < report.written
        return found

    whole = parts(1 << 30)
    assert len(parts(1 << 20)) >= len(whole) + 3, "pieces that are written"
    monkeypatch.setattr(pipeline, "STEP_SECONDS", 1e9)
    assert len(parts(1 << 20)) < len(whole), "blocks that are merged"

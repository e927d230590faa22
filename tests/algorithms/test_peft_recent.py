"""PEFT's newer tuners, from files to files: written, proven, and what nothing tells refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import lora_merge
from lora_merge.algorithms.adamss import PEFT_SEED, ROUNDS, kmeans
from lora_merge.algorithms.low_rank_svd import low_rank_svd
from lora_merge.algorithms.waveft import low_pass
from lora_merge.errors import MergeError, VerificationFailed
from lora_merge.files.safetensors import parse_file
from lora_merge.matching.patch import ZEROS
from lora_merge.recipes.replay import prove
from tests.kit.peft_oracle import merged, save, train

LINEAR = ["wide", "tall", "square"]

PROVEN: dict[str, tuple[Any, dict[str, Any]]] = {
    "glora": (peft.GloraConfig, {"r": 4}),
    "psoft": (peft.PsoftConfig, {"r": 4}),
    "psoft-lowrank": (peft.PsoftConfig, {"r": 4, "psoft_svd": "lowrank", "use_cayley_neumann": True}),
    "adamss": (peft.AdamssConfig, {"r": 6, "num_subspaces": 3, "subspace_rank": 2}),
    "frod": (peft.FrodConfig, {}),
    "tinylora": (peft.TinyLoraConfig, {"r": 3, "u": 4, "weight_tying": 1.0}),
    "supertuning": (peft.SupertuningConfig, {"sparsity": 0.9, "save_precomputed_indices": False, "r": 2}),
    "waveft": (peft.WaveFTConfig, {"n_frequency": 50, "wavelet_family": "coif2"}),
    "glora-vectors": (peft.GloraConfig, {"config_A_B": "vector", "config_C": "vector", "config_D_E": "vector"}),
}


@pytest.mark.few(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROVEN)
def test_merged_files_are_proven(name: str, tmp_path: Path) -> None:
    make, options = PROVEN[name]
    base, tuned = train(make(target_modules=LINEAR, **options))
    wanted = merged(base, *save(tuned, tmp_path / "adapter"))
    save_file(base.state_dict(), tmp_path / "base.safetensors")
    out = tmp_path / "out.safetensors"
    lora_merge.merge(tmp_path / "base.safetensors", tmp_path / "adapter", out, device="cpu")
    assert prove(out, full=True)
    done = load_file(out)
    for key, value in wanted.items():
        torch.testing.assert_close(done[key].double(), value, rtol=1e-5, atol=1e-5)
    info = parse_file(out).tensors["square.bias" if name.startswith("glora") else "square.weight"]
    raw = bytearray(out.read_bytes())
    raw[info.offset + info.nbytes - 2] ^= 64  # of the last number
    out.write_bytes(raw)
    with pytest.raises(VerificationFailed):
        prove(out, full=True)


REBUILT = {
    "psoft": (peft.PsoftConfig, {"r": 4}, "square", "singular vectors"),
    "adamss": (peft.AdamssConfig, {"r": 6, "num_subspaces": 3}, "wide", "clusters in the base"),
    "supertuning": (peft.SupertuningConfig, {"sparsity": 0.9, "save_precomputed_indices": False}, "tall", "places"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REBUILT)
def test_rebuilt_values_are_noted(name: str, tmp_path: Path) -> None:
    make, options, layer, words = REBUILT[name]
    base, tuned = train(make(target_modules=[layer], **options))
    save(tuned, tmp_path / "adapter")
    save_file(base.state_dict(), tmp_path / "base.safetensors")
    plan = lora_merge.plan(tmp_path / "base.safetensors", tmp_path / "adapter", tmp_path / "out.safetensors")
    assert any(layer in note and words in note for note in plan.adapters[0].notes)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("draws", [True, False])
def test_forward_pass_that_draws_noise_is_reported(draws: bool, tmp_path: Path) -> None:  # noqa: FBT001
    config = peft.PveraConfig(target_modules=["wide"], r=4, sample_at_inference=draws)
    base, tuned = train(config)
    save(tuned, tmp_path / "adapter")
    save_file(base.state_dict(), tmp_path / "base.safetensors")
    plan = lora_merge.plan(tmp_path / "base.safetensors", tmp_path / "adapter", tmp_path / "out.safetensors")
    assert any("draws noise" in note for note in plan.adapters[0].notes) is draws


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("layer", "rank", "why"), [("wide", 6, "not the singular vectors"), ("square", 24, "the same distance")]
)
def test_groups_of_rows_that_this_base_does_not_give_are_refused(
    layer: str, rank: int, why: str, tmp_path: Path
) -> None:
    base, tuned = train(peft.AdamssConfig(target_modules=[layer], r=rank, num_subspaces=3, subspace_rank=2))
    save(tuned, tmp_path)
    state = base.state_dict()
    if rank < 24:
        state["wide.weight"] = torch.randn(36, 24, generator=torch.Generator().manual_seed(5))
    with pytest.raises(MergeError) as refused:
        lora_merge.merge_state_dict(state, tmp_path)
    assert why in refused.value.where and refused.value.exit_code == 4


@pytest.mark.parametrize("count", [2, 5, 9])
def test_clusters_are_those_of_scikit_learn(count: int) -> None:
    from sklearn.cluster import KMeans

    points = np.linalg.qr(np.random.default_rng(count).standard_normal((400, 20)))[0].astype(np.float32)
    theirs = KMeans(count, init="random", n_init=1, max_iter=ROUNDS, random_state=PEFT_SEED).fit_predict(points)
    assert np.array_equal(kmeans(points, count), theirs)


@pytest.mark.parametrize("shape", [(40, 60), (60, 40)])
def test_low_rank_vectors_are_those_of_torch_and_leave_its_generator(shape: tuple[int, int]) -> None:
    weight = torch.randn(*shape)
    torch.manual_seed(3)
    theirs = torch.svd_lowrank(weight, q=7, niter=4)
    before = torch.get_rng_state()
    ours = low_rank_svd(weight, 7, 4, 3)
    assert torch.equal(torch.get_rng_state(), before)
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two)


def test_glora_of_a_bias_that_the_base_does_not_have_is_refused(tmp_path: Path) -> None:
    letters = {"A.X": 1, "B.X": 1, "C.X": (8, 1), "D.X": 1, "E.X": 1}
    save_file({f"a.glora_{k}": torch.ones(s) for k, s in letters.items()}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "GLORA"}))
    with pytest.raises(MergeError, match="1 of 2"):
        lora_merge.merge_state_dict({"a.weight": torch.ones(4, 8)}, tmp_path)


def test_zeros_of_glora_for_a_bias_that_the_layer_lacks_are_reported_and_counted(tmp_path: Path) -> None:
    """PEFT stores C, D and E as buffers of zeros there; nothing is to be changed, and nothing is left unsaid."""
    state = {f"{name}.weight": torch.ones(4, 8) for name in "ab"} | {"b.bias": torch.ones(4)}
    save_file(state, tmp_path / "base.safetensors")
    tensors = {f"{name}.glora_{k}": torch.ones(s) for name in "ab" for k, s in (("A.X", 1), ("B.X", 1))}
    tensors |= {f"b.glora_{k}.X": torch.ones(s) for k, s in (("C", (8, 1)), ("D", 1), ("E", 1))}
    tensors |= {f"a.glora_{k}.zeros": torch.zeros(1) for k in "CDE"}
    (tmp_path / "lora").mkdir()
    save_file(tensors, tmp_path / "lora" / "adapter_model.safetensors")
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps({"peft_type": "GLORA"}))
    plan = lora_merge.plan(tmp_path / "base.safetensors", tmp_path / "lora", tmp_path / "o.safetensors")
    (one,) = plan.adapters
    assert sorted(one.matched) == ["a", "a.bias", "b", "b.bias"]
    assert dict(one.components) == {"model": 4}
    assert [name for name, why in one.unused.items() if why == ZEROS] == [f"a.glora_{k}.zeros" for k in "CDE"]


def test_wavelets_are_those_of_peft_and_whole() -> None:
    """PEFT's own for all that it can train with; the others rebuild what they take apart, as orthonormal ones do."""
    from peft.tuners.waveft.constants import WAVELET_REDUCTIONS
    from peft.tuners.waveft.wavelet import _WAVELET_COEFFS, Wavelet

    ours = low_pass()
    assert ours.keys() == WAVELET_REDUCTIONS.keys()
    for name, (rows, columns) in WAVELET_REDUCTIONS.items():
        low = np.array(ours[name])
        assert rows == columns == len(low) - 2, name
        if name in _WAVELET_COEFFS and name != "coif5":  # of which PEFT 0.21.2 has too many to use it
            np.testing.assert_allclose(low, Wavelet(name).rec_lo, atol=1e-11)
        if name != "coif4":  # PEFT 0.21.2 has another, and trains with it
            shifts = [low[: len(low) - 2 * k] @ low[2 * k :] for k in range(len(low) // 2)]
            np.testing.assert_allclose([low.sum(), *shifts], [2**0.5, 1.0, *[0.0] * (len(shifts) - 1)], atol=1e-10)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["psoft", "supertuning", "frod", "adamss"])
def test_loaded_adapter_gives_the_change_of_one_weight(name: str, tmp_path: Path) -> None:
    make, options = PROVEN[name]
    base, tuned = train(make(target_modules=["tall"], **options))
    wanted = merged(base, *save(tuned, tmp_path))["tall.weight"] - base.tall.weight
    got = lora_merge.load_adapter(tmp_path).delta("base_model.model.tall", base.tall.weight)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)

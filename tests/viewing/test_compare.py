"""`compare`: models tensor by tensor, adapters module by module, against plain dense arithmetic."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator

import lora_merge
from lora_merge.errors import InputError, ShapeMismatch, UsageError
from lora_merge.paths import typed
from lora_merge.viewing.compare import compare, compare_rows
from lora_merge.viewing.compare_models import COMPARED_VALUES
from lora_merge.viewing.compare_verdict import adapter_verdict, signed
from lora_merge.viewing.inspect import inspect
from lora_merge.viewing.json_schemas import schema_of
from tests.bench import inputs
from tests.kit.adapters import kohya, kohya_names
from tests.kit.files import load, save
from tests.kit.models import sd1
from tests.kit.oracles import lora_delta
from tests.kit.tensors import rand
from tests.viewing.conftest import Scene


def test_base_and_its_merge_differ_by_what_was_added(scene: Scene, tmp_path: Path) -> None:
    out = tmp_path / "o.safetensors"
    report = lora_merge.merge(scene.base, scene.ink, out)
    found, before, after = compare(scene.base, out), load(scene.base), load(out)
    assert (found["compared"], found["different"]) == (len(before), report.changed)
    assert found["tensors"].keys() == {k for k in before if not torch.equal(before[k], after[k])}
    assert {*found["equal_tensors"]} == before.keys() - found["tensors"].keys()
    for key, row in found["tensors"].items():
        apart = after[key].double() - before[key].double()
        assert row["difference"] == pytest.approx(float(apart.norm()), rel=1e-9)
        assert row["largest"] == float(apart.abs().max())
        assert row["changed"] == int((apart != 0).sum())
    squares = sum(row["difference"] ** 2 for row in found["tensors"].values())
    assert found["total"]["difference"] ** 2 == pytest.approx(squares)
    assert "lora_merge.recipe" in found["metadata"]
    assert any("equal" in line for line in map(str, compare_rows(found)))


def test_equal_models_are_equal_whatever_their_dtype(scene: Scene, tmp_path: Path) -> None:
    wide = {k: v.float() if v.is_floating_point() else v for k, v in sd1().items()}
    found = compare(scene.base, save(wide, tmp_path / "wide.safetensors"))
    assert (found["different"], found["total"]["changed"]) == (0, 0)


def test_dtypes_that_differ_are_reported(scene: Scene, tmp_path: Path) -> None:
    cast = {k: v.bfloat16() if "input_blocks" in k else v for k, v in sd1().items()}
    found = compare(scene.base, save(cast, tmp_path / "cast.safetensors"))
    assert found["dtypes"] == {"fp16 in A, bf16 in B": sum("input_blocks" in k for k in cast)}
    assert any(line.startswith("dtypes ") for line in map(str, compare_rows(found)))
    assert compare(scene.base, scene.base)["dtypes"] == {}


def test_tensors_of_one_model_alone_and_of_other_shapes_are_named(tmp_path: Path) -> None:
    a = save({"x": rand(3), "y": rand(3), "z": rand(3)}, tmp_path / "a.safetensors")
    b = save({"x": rand(3), "y": rand(4), "w": rand(3)}, tmp_path / "b.safetensors")
    found = compare(a, b)
    assert (found["equal"], found["only_a"], found["only_b"]) == (1, ["z"], ["w"])
    assert found["other_shapes"] == {"y": "[3] and [4]"}


def test_nan_equals_itself(tmp_path: Path) -> None:
    odd = torch.tensor([float("nan"), float("inf"), 1.0])
    files = [save({"x": x}, tmp_path / f"{n}.safetensors") for n, x in enumerate((odd, odd.double()))]
    assert compare(*files)["total"]["changed"] == 0


def test_same_weights_under_other_prefixes_are_found(scene: Scene, tmp_path: Path) -> None:
    """A U-Net alone, without the prefix that the whole checkpoint has."""
    start = "model.diffusion_model."
    unet = {k.removeprefix(start): v for k, v in sd1().items() if k.startswith(start)}
    found = compare(scene.base, save(unet, tmp_path / "unet.safetensors"))
    weights = {k for k in unet if k.endswith(".weight")}
    assert found["different"] == 0
    assert found["equal"] >= len(weights)
    assert not {*found["only_b"]} & weights


def test_two_adapters_are_as_alike_as_their_changes(scene: Scene) -> None:
    one, other = load(scene.ink), load(scene.oil)
    for base in (None, scene.base):
        found = compare(scene.ink, scene.oil, base)
        assert (found["common"], len(found["only_a"]), found["only_b"]) == (15, 5, [])
        inner = a = b = 0.0
        for name in (n for n in kohya_names(sd1()) if n.startswith("lora_unet")):
            x, y = lora_delta(one, name), lora_delta(other, name)
            inner, a, b = inner + float((x * y).sum()), a + float(x.square().sum()), b + float(y.square().sum())
        assert found["total"]["cosine"] == pytest.approx(inner / (a * b) ** 0.5, abs=1e-5)
        assert found["total"]["a"] == pytest.approx(a**0.5, rel=1e-5)
    assert any("cosine" in line for line in map(str, compare_rows(found)))


def test_adapter_is_its_own_double_and_the_opposite_of_its_negative(scene: Scene, tmp_path: Path) -> None:
    tensors = load(scene.ink)
    negative = {k: -v if "lora_up" in k else v for k, v in tensors.items()}
    for other, cosine in ((scene.ink, 1.0), (save(negative, tmp_path / "n.safetensors"), -1.0)):
        found = compare(scene.ink, other)
        assert found["total"]["cosine"] == pytest.approx(cosine, abs=1e-5)
        assert found["fight"] == (list(found["blocks"]) if cosine < 0 else [])
        opposed = [line for line in map(str, compare_rows(found)) if line.startswith("opposed")]
        assert [f"opposite directions in {len(found['blocks'])} of" in line for line in opposed] == [True] * (
            cosine < 0
        )
        assert found["total"]["overlap"] == pytest.approx(1, abs=1e-5)


def test_spaces_that_share_nothing_have_no_overlap(tmp_path: Path) -> None:
    eye = torch.eye(8)
    files = [
        save({"lora_unet_a.lora_up.weight": eye[:, n : n + 2].contiguous(), "lora_unet_a.lora_down.weight": eye[n : n + 2]},
             tmp_path / f"{n}.safetensors") for n in (0, 2)
    ]  # fmt: skip
    total = compare(*files)["total"]
    assert total["overlap"] == pytest.approx(0)
    assert total["cosine"] == pytest.approx(0)


def overlap(one: torch.Tensor, other: torch.Tensor) -> float:
    """The mean squared cosine of the angles between the spaces of the columns of two matrices, by numpy in fp64."""
    p, q = (np.linalg.svd(m.numpy())[0][:, : np.linalg.matrix_rank(m.numpy(), rtol=1e-4)] for m in (one, other))
    return float(np.square(p.T @ q).sum() / min(p.shape[1], q.shape[1]))


@pytest.mark.parametrize("whole", [False, True])
def test_overlap_is_that_of_the_spaces_of_the_changes(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, *, whole: bool
) -> None:
    """`whole`: where a base has no factors of a change, it is computed block by block."""
    if whole:
        monkeypatch.setattr("lora_merge.viewing.module_changes.factored", lambda _: False)
    ink, oil = load(scene.ink), load(scene.oil)
    both = {key.partition(".")[0] for key in ink.keys() & oil.keys()}
    deltas = [(lora_delta(ink, name), lora_delta(oil, name)) for name in both]
    exact = np.mean([overlap(*pair) for a, b in deltas for pair in ((a, b), (a.T, b.T))])
    for base in (None, scene.base):
        found = compare(scene.ink, scene.oil, base)
        assert found["common"] == len(both)
        assert found["total"]["overlap"] == pytest.approx(exact, abs=2e-3)


def test_directions_that_cancel_belong_to_no_space(tmp_path: Path) -> None:
    """Columns of the first adapter take each other back where the second one works."""
    eye = torch.eye(8)
    up, down = torch.stack([eye[0], eye[2], -eye[2]], 1), torch.stack([eye[0], eye[2], eye[2]])
    files = [save({"lora_unet_a.lora_up.weight": u, "lora_unet_a.lora_down.weight": d}, tmp_path / f"{n}.safetensors")
             for n, (u, d) in enumerate([(up, down), (eye[:, 2:3].contiguous(), eye[2:3])])]  # fmt: skip
    assert compare(*files)["total"]["overlap"] == pytest.approx(0, abs=1e-5)


def test_change_of_zeros_shares_no_space(scene: Scene, tmp_path: Path) -> None:
    tensors = load(scene.ink)
    none = save({k: 0 * v if "lora_up" in k else v for k, v in tensors.items()}, tmp_path / "n.safetensors")
    for base in (None, scene.base):
        assert compare(scene.ink, none, base)["total"]["overlap"] is None


def test_dialects_are_compared_with_each_other(scene: Scene, tmp_path: Path) -> None:
    """The flat names of kohya, and dotted ones with PEFT's endings."""
    dotted = {}
    for key, value in load(scene.oil).items():
        if key.endswith("proj_in.lora_up.weight"):
            down = load(scene.oil)[key.replace("lora_up", "lora_down")]
            n = key.partition("attentions_")[2][0]
            name = f"unet.down_blocks.0.attentions.{n}.proj_in"
            dotted |= {f"{name}.lora_B.weight": value, f"{name}.lora_A.weight": down}
    found = compare(scene.oil, save(dotted, tmp_path / "d.safetensors"))
    assert found["common"] == 2
    assert found["total"]["cosine"] == pytest.approx(1, abs=1e-5)


def test_adapter_is_not_compared_with_a_model(scene: Scene, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a model cannot be compared") as e:
        compare(scene.base, scene.ink)
    assert f"lora-merge inspect {typed([str(scene.base), str(scene.ink)])}" in e.value.fix
    embedding = save({"emb_params": rand(4, 768)}, tmp_path / "e.safetensors")
    for pair in ((scene.ink, embedding), (embedding, scene.ink)):
        with pytest.raises(UsageError, match=r"an adapter and an embedding .* cannot be compared") as e:
            compare(*pair)
        assert "inspect" not in e.value.fix
    with pytest.raises(UsageError, match="base is given"):
        compare(scene.base, scene.base, scene.base)
    assert kohya


@pytest.mark.parametrize("indices", [[[0.5], [1.0]], [[9.0], [1.0]]])
def test_indices_that_no_formula_can_use_are_refused(tmp_path: Path, indices: list[list[float]]) -> None:
    sparse = {"x.bias_indices": torch.tensor(indices), "x.bias_values": rand(1), "x.bias_size": torch.tensor([4, 4])}
    a = save({"x.lora_up.weight": rand(4, 2), "x.lora_down.weight": rand(2, 4), **sparse}, tmp_path / "a.safetensors")
    base = save({"x.weight": rand(4, 4)}, tmp_path / "base.safetensors")
    for act in (
        lambda: compare(a, a),
        lambda: compare(a, a, base),
        lambda: inspect(a, weights=True),
        lambda: inspect(base, a, weights=True),
    ):
        with pytest.raises(ShapeMismatch, match="do not fit"):
            act()


def test_change_too_large_to_be_measured_is_refused(tmp_path: Path) -> None:
    """Also where every factor is finite: singular values of infinite numbers do not exist."""
    huge = torch.full((2, 4), 3e38)
    a = save({"x.lora_up.weight": huge.t(), "x.lora_down.weight": huge}, tmp_path / "a.safetensors")
    for act in (lambda: compare(a, a), lambda: inspect(a, weights=True)):
        with pytest.raises(InputError, match="too large"):
            act()


def test_adapters_in_the_words_of_two_layouts_are_paired_without_a_base(tmp_path: Path) -> None:
    """kohya's flat names in the words of the original code, and those of diffusers, as the names tell the model."""
    blocks = {"input_blocks.1.1": "down_blocks.0.attentions.0", "input_blocks.4.1": "down_blocks.1.attentions.0"}
    layers = {f"attn{n}.to_{p}": 768 if n == 2 and p in "kv" else 0 for n in (1, 2) for p in "qkv"}
    native, diffusers = {}, {}
    for wide, (old, new) in zip((320, 640), blocks.items(), strict=True):
        for seed, (layer, context) in enumerate(layers.items()):
            up, down = rand(wide, 2, seed=seed), rand(2, context or wide, seed=seed + 9)
            flat = f"lora_unet_{old}.transformer_blocks.0.{layer}".replace(".", "_")
            native |= {f"{flat}.lora_up.weight": up, f"{flat}.lora_down.weight": down}
            name = f"unet.{new}.transformer_blocks.0.{layer}"
            diffusers |= {f"{name}.lora_B.weight": up.clone(), f"{name}.lora_A.weight": down.clone()}
    found = compare(save(native, tmp_path / "a.safetensors"), save(diffusers, tmp_path / "b.safetensors"))
    assert (found["common"], found["only_a"], found["only_b"], found["notes"]) == (len(native) // 2, [], [], [])
    assert found["total"]["cosine"] == pytest.approx(1, abs=1e-5)


def _verdict(a: Path, b: Path) -> dict[str, Any]:
    found = compare(a, b)
    verdict: dict[str, Any] = found["verdict"]
    assert str(next(iter(compare_rows(found)))) == f"verdict       {verdict['text']}"
    Draft202012Validator(schema_of("compare")).validate(found)
    return verdict


def test_verdict_about_two_models(scene: Scene, tmp_path: Path) -> None:
    """By every value; bf16 is a rounding of fp16, and a merge is not."""
    base = sd1()
    changed = {
        "equal": {k: v.float() if v.is_floating_point() else v for k, v in base.items()},
        "rounding": {k: v.bfloat16() if v.is_floating_point() else v for k, v in base.items()},
        "contains": {k: v for k, v in base.items() if "first_stage" not in k},
        "changed": {k: v * 1.01 if "input_blocks.1" in k else v for k, v in base.items()},
        "different weights": {k: v.flatten().flip(0).view(v.shape) for k, v in base.items()},
        "different models": {f"layers.{n}.weight": rand(3, 4) for n in range(4)},
    }
    for kind, tensors in changed.items():
        assert _verdict(scene.base, save(tensors, tmp_path / "b.safetensors"))["kind"] == kind
    assert "tensors       no tensor is in both" in map(
        str, compare_rows(compare(scene.base, tmp_path / "b.safetensors"))
    )


def test_changed_tensors_of_a_rounded_model_are_separate(tmp_path: Path) -> None:
    """bf16 of an fp32 model in which one tensor is scaled: the change is measured in that tensor alone, as by a merge."""
    wide = {f"x{n}.weight": rand(64, 64, seed=n) * 100**n for n in range(3)}
    a = save(wide, tmp_path / "a.safetensors")
    b = save({k: (v * 1.1 if k[1] == "0" else v).bfloat16() for k, v in wide.items()}, tmp_path / "b.safetensors")
    found = compare(a, b)
    assert (found["different"], found["rounded"], found["equal"]) == (1, {"B is A in bf16": 2}, 0)
    assert found["change"]["relative"] == pytest.approx(0.1, rel=0.01)
    assert "1 of 3 tensors changed" in found["verdict"]["text"]
    assert "by 10 % of their weights" in found["verdict"]["text"]


@pytest.mark.parametrize("dtype", ["fp8_scaled", "nf4"])
def test_quantised_copy_is_the_same_model_and_a_merge_is_not(tmp_path: Path, dtype: str) -> None:
    base = save({f"layers.{n}.q_proj.weight": rand(128, 128, seed=n) for n in range(2)}, tmp_path / "b.safetensors")
    factors = {f"layers.0.q_proj.lora_{end}.weight": rand(128, 128, seed=5)[:, :4] for end in ("B", "A")}
    factors["layers.0.q_proj.lora_A.weight"] = factors["layers.0.q_proj.lora_A.weight"].T * 0.1
    adapter = save(factors, tmp_path / "a.safetensors")
    for strength in (0, 1):
        out = tmp_path / f"{strength}.safetensors"
        lora_merge.merge(base, (adapter, strength), out, dtype=dtype, no_metadata=True)
        found = compare(base, out)
        assert found["rounded"] == {f"B is A in {'bitsandbytes ' * (dtype == 'nf4')}{dtype}": 2 - strength}
        assert (found["verdict"]["kind"], found["different"]) == (("rounding", "changed")[strength], strength)


def test_merge_on_a_base_is_named_by_its_recipe(scene: Scene, tmp_path: Path) -> None:
    out, other = tmp_path / "o.safetensors", tmp_path / "other" / "c.safetensors"
    report = lora_merge.merge(scene.base, (scene.ink, 0.8), out)
    verdict = _verdict(scene.base, out)
    assert verdict["text"].startswith(
        f"B is A with {scene.ink.name}:0.8 merged, by the recipe in B: {report.changed} of"
    )
    assert _verdict(out, scene.base)["text"].startswith("A is B with")
    lora_merge.merge(out, scene.oil, both := tmp_path / "both.safetensors")
    assert f"A with {scene.ink.name}:0.8, {scene.oil.name}:1 merged" in _verdict(scene.base, both)["text"]
    lora_merge.unmerge(both, [scene.ink, scene.oil], back := tmp_path / "back.safetensors")
    verdict = _verdict(scene.base, back)
    assert verdict["kind"] in ("rounding", "equal")
    if verdict["kind"] == "rounding":
        assert f"B is A again, with {scene.ink.name}, {scene.oil.name} merged and taken out" in verdict["text"]
    other.parent.mkdir()
    assert _verdict(save(load(scene.base), other), out)["kind"] == "changed"  # a base of another name


def test_one_value_two_steps_away_is_no_rounding(tmp_path: Path) -> None:
    x = rand(40, 7, seed=1).half()
    for steps, kind in ((1, "rounding"), (2, "changed")):
        y = x.clone()
        y.view(torch.int16)[3, 3] += steps
        files = [save({"x.weight": t}, tmp_path / f"{n}.safetensors") for n, t in enumerate((x, y))]
        assert _verdict(*files)["kind"] == kind


def test_verdict_about_two_adapters(scene: Scene, tmp_path: Path) -> None:
    first, out = kohya(sd1(), seed=7), tmp_path / "b.safetensors"
    a, other = save(first, tmp_path / "a.safetensors"), save(kohya(sd1(), seed=8), tmp_path / "c.safetensors")
    assert _verdict(a, a)["kind"] == "equal"
    assert _verdict(a, other)["kind"] == "independent"
    assert any("independent changes share some by chance" in row for row in map(str, compare_rows(compare(a, other))))
    assert _verdict(a, save({k: v.bfloat16() for k, v in first.items()}, out))["kind"] == "rounding"
    half = _verdict(a, save({k: v * 0.5 if "up" in k else v for k, v in first.items()}, out))
    assert (half["kind"], half["inner"], half["strength"]) == ("contains", "A", pytest.approx(0.5))
    lora_merge.combine([(a, 0.7), other], out, overwrite=True)
    both = _verdict(out, a)
    assert (both["kind"], both["inner"], both["strength"]) == ("contains", "B", pytest.approx(0.7, rel=0.1))
    for_llm = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": rand(2, 8),
               "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": rand(8, 2)}  # fmt: skip
    assert _verdict(a, save(for_llm, out))["kind"] == "different models"
    nowhere = {f"lora_unet_nowhere.lora_{end}.weight": rand(2, 2) for end in ("up", "down")}
    stated = save(nowhere, out, metadata={"modelspec.architecture": "stable-diffusion-xl-v1-base/lora"})
    assert "B for Stable Diffusion XL" in _verdict(a, stated)["text"]


def test_cosine_of_zero_has_no_sign() -> None:
    assert [signed(c) for c in (-0.0001, 0.0, 0.25, -0.25)] == ["0.000", "0.000", "+0.250", "-0.250"]


def test_values_are_compared_in_pieces_as_in_one(tmp_path: Path) -> None:
    """With infinities and NaN in one of the pieces, which are added up in float64."""
    a, b = rand(3, COMPARED_VALUES // 2, seed=1).bfloat16(), rand(3, COMPARED_VALUES // 2, seed=2).bfloat16()
    a[0, 0], b[1, 5], a[2, 9], b[2, 9] = float("nan"), float("inf"), float("nan"), float("nan")
    row = compare(*(save({"x": t}, tmp_path / f"{n}.safetensors") for n, t in enumerate((a, b))))["tensors"]["x"]
    apart = (b.double() - a.double()).flatten()
    finite = apart[apart.isfinite()]
    assert row["difference"] == pytest.approx(float(finite.norm()), rel=1e-9)
    assert row["changed"] == int((a != b).sum()) - 1
    assert row["largest"] == float(finite.abs().max())


def test_larger_adapter_contains_the_smaller_one(scene: Scene, tmp_path: Path) -> None:
    """ΔA = ΔB + more at right angles: both strengths are steady, and only that of B in A has nothing of the rest."""
    lora_merge.combine([(scene.ink, 1.0), (scene.oil, 0.3)], tmp_path / "both.safetensors", dtype="fp32")
    for files, names in (((tmp_path / "both.safetensors", scene.ink), "A contains B"), ((scene.ink, tmp_path / "both.safetensors"), "B contains A")):  # fmt: skip
        found = compare(*files)["verdict"]
        assert found["text"].startswith(names) and found["strength"] == pytest.approx(1, abs=0.05)


@pytest.mark.bench
def test_two_models_are_compared_in_one_and_a_half_times_the_time_of_a_merge(tmp_path: Path) -> None:
    """In one program, where torch has several threads of its own: operations of the comparison must not wait for them."""
    layers = {f"layers.{n}.weight": ("F16", (4096, 2048)) for n in range(16)}
    base = inputs.write(tmp_path / "base.safetensors", layers)
    slots = {name.replace("weight", f"{slot}.weight"): ("F16", shape) for name in layers
             for slot, shape in (("lora_A", (16, 2048)), ("lora_B", (4096, 16)))}  # fmt: skip
    lora, out = inputs.write(tmp_path / "lora.safetensors", slots, scale=0.01), tmp_path / "merged.safetensors"

    def seconds(run: Callable[[], object]) -> float:
        started = time.perf_counter()
        run()
        return time.perf_counter() - started

    merged = min(seconds(lambda: lora_merge.merge(base, lora, out, overwrite=True)) for _ in range(2))
    compared = min(seconds(lambda: compare(base, out)) for _ in range(2))
    assert compared <= 1.5 * merged


def test_kind_of_model_has_an_article() -> None:
    result = {"total": {}, "modules": {}, "made_for": ("Flux.1", "transformers language model")}
    assert "A is for Flux.1, B for a transformers language model; no" in adapter_verdict(result)["text"]

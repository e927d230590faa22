"""Adapters that are damaged, odd or of no use here: one error, told by what, where and how; nothing is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import lora_merge
from lora_merge.adapters_out.factors import Grams, decomposing
from lora_merge.adapters_out.report import adapter_rows
from lora_merge.errors import InputError, MergeError, TooLarge, UsageError
from tests.kit.files import save
from tests.kit.flux import flux, of_flux
from tests.kit.tensors import Tensors, rand

MODULE = "lora_unet_double_blocks_0_img_attn_proj"
DOWN, UP, ALPHA = f"{MODULE}.lora_down.weight", f"{MODULE}.lora_up.weight", f"{MODULE}.alpha"


def changed(**values: torch.Tensor | None) -> Tensors:
    """The adapter for the tiny Flux with other tensors in one module; None: without that tensor."""
    found = {
        **of_flux(),
        **{{"down": DOWN, "up": UP, "alpha": ALPHA}[k]: v for k, v in values.items() if v is not None},
    }
    gone = {{"down": DOWN, "up": UP, "alpha": ALPHA}[k] for k, v in values.items() if v is None}
    return {name: value for name, value in found.items() if name not in gone}


WRONG: dict[str, tuple[Tensors, int, str]] = {
    "NaN": (changed(down=torch.full((3, 8), float("nan"))), 3, DOWN),
    "infinity": (changed(up=torch.full((8, 3), float("inf"))), 3, UP),
    "no up": (changed(up=None), 3, "img_attn_proj has no lora_up.weight"),
    "ranks that differ": (changed(down=rand(2, 8)), 4, "img_attn_proj"),
    "alpha is NaN": (changed(alpha=torch.tensor(float("nan"))), 3, ALPHA),
    "products too large for fp64": (changed(down=torch.full((3, 8), 1e200, dtype=torch.float64), up=torch.full((8, 3), 1e200, dtype=torch.float64)), 3, "img_attn"),
    "no change at all": ({k: torch.zeros_like(v) for k, v in of_flux().items()}, 3, "changes nothing"),
}  # fmt: skip
RUNS: dict[str, Callable[[Path, Path, Path], object]] = {
    "convert": lambda a, o, _: lora_merge.convert(a, o, to="diffusers"),
    "convert with a base": lambda a, o, base: lora_merge.convert(a, o, to="diffusers", base=base),
    "keep": lambda a, o, _: lora_merge.convert(a, o, dtype="fp32"),
    "resize": lambda a, o, _: lora_merge.resize(a, o, rank=1),
    "resize all together": lambda a, o, _: lora_merge.resize(a, o, rank="size:1KiB"),
    "ties": lambda a, o, base: lora_merge.combine([a, (a, 0.5)], o, base=base, method="ties", rank=2),
    "combine": lambda a, o, base: lora_merge.combine([a, (a, 0.5)], o, base=base),
}


@pytest.mark.few(9)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("what", WRONG)
def test_damaged_adapters_are_refused_with_their_tensor(what: str, run: str, tmp_path: Path) -> None:
    tensors, code, told = WRONG[what]
    save_file(tensors, tmp_path / "a.safetensors")
    save_file(flux(), tmp_path / "base.safetensors")
    with pytest.raises(MergeError) as failure:
        RUNS[run](tmp_path / "a.safetensors", tmp_path / "o.safetensors", tmp_path / "base.safetensors")
    assert failure.value.exit_code == code, failure.value
    assert told in str(failure.value)
    assert not (tmp_path / "o.safetensors").exists()


@pytest.mark.parametrize("library", [np, torch])
def test_decomposition_that_fails_names_the_layer(library: ModuleType) -> None:
    with pytest.raises(TooLarge, match="too large") as failure, decomposing("blocks.0"):
        raise library.linalg.LinAlgError("it did not converge")
    assert failure.value.where == "blocks.0"


@pytest.mark.parametrize("run", ["convert", "convert with a base", "keep"])
@pytest.mark.parametrize("squares", [float("inf"), float("nan")])
def test_squares_that_are_too_large_are_refused_whatever_a_processor_makes_of_them(
    squares: float, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that add in another order turn infinity into NaN."""
    what = "products too large for fp64"
    monkeypatch.setattr(Grams, "of", lambda left, right: Grams(*[np.full((3, 3), squares, left.dtype)] * 2))
    test_damaged_adapters_are_refused_with_their_tensor(what, run, tmp_path)


ODD: dict[str, Tensors] = {
    "rank 0": changed(down=torch.zeros(0, 8), up=torch.zeros(8, 0)),
    "zeros in one module": changed(up=torch.zeros(8, 3)),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("what", ODD)
def test_modules_without_a_change_are_dropped_and_named(what: str, run: str, tmp_path: Path) -> None:
    save_file(ODD[what], tmp_path / "a.safetensors")
    save_file(flux(), tmp_path / "base.safetensors")
    report = RUNS[run](tmp_path / "a.safetensors", tmp_path / "o.safetensors", tmp_path / "base.safetensors")
    notes: tuple[str, ...] = getattr(report, "notes", ())
    assert any("change is zero" in note for note in notes), notes
    assert not any("img_attn_proj" in name or "0.attn.to_out" in name for name in load_file(tmp_path / "o.safetensors"))


def test_alpha_0_is_scale_1_and_fp8_is_read(tmp_path: Path) -> None:
    """LyCORIS reads an α of 0 as the rank; remarks are the same without a base."""
    for name, tensors in {"a": changed(alpha=torch.tensor(0.0)), "b": changed(alpha=torch.tensor(3.0))}.items():
        small = {k: v if k.endswith("alpha") else v.to(torch.float8_e4m3fn) for k, v in tensors.items()}
        save_file(small, tmp_path / f"{name}.safetensors")
        lora_merge.convert(tmp_path / f"{name}.safetensors", tmp_path / f"{name}2.safetensors", to="diffusers")
        notes = lora_merge.combine([tmp_path / f"{name}.safetensors"], tmp_path / f"{name}3.safetensors").notes
        assert any("the stored alpha is 0" in note for note in notes) == (name == "a")
    one, other = (load_file(tmp_path / f"{n}2.safetensors") for n in "ab")
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_tensors_that_change_no_weight_are_refused_by_name(tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["a"]}
    for what, more in {"aLoRA": {"alora_invocation_tokens": [1]}, "LoftQ": {"init_lora_weights": "loftq"},
                       "PROMPT_TUNING": {"peft_type": "PROMPT_TUNING"}}.items():  # fmt: skip
        (folder := tmp_path / what).mkdir()
        name = "base_model.model.a"
        tensors = {f"{name}.lora_A.weight": rand(2, 4), f"{name}.lora_B.weight": rand(4, 2)}
        save_file(
            {"prompt_embeddings": rand(2, 4)} if "peft_type" in more else tensors, folder / "adapter_model.safetensors"
        )
        (folder / "adapter_config.json").write_text(json.dumps({**config, **more}))
        with pytest.raises(InputError, match=f"(?i){what.replace('_', '.')}"):
            lora_merge.convert(folder, tmp_path / "o")


def test_input_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file(of_flux(), path)
    before = path.read_bytes()
    with pytest.raises(UsageError, match="would replace the base, an adapter"):
        lora_merge.convert(path, path, to="comfy", overwrite=True)
    assert path.read_bytes() == before


def test_bundled_embeddings_stay_where_they_have_a_place(tmp_path: Path) -> None:
    """OneTrainer's: in its own dialects and kohya's; elsewhere the report names them."""
    key = "bundle_emb.word.clip_l"
    save_file({**of_flux(), key: rand(2, 8)}, tmp_path / "a.safetensors")
    for to in ("kohya", "onetrainer", "keep", "diffusers"):
        out = tmp_path / f"{to}.safetensors"
        report = lora_merge.convert(tmp_path / "a.safetensors", out, to=to)
        assert (key in load_file(out)) == (to != "diffusers")
        assert (key in report.coverage["a.safetensors"]["ignored"]) == (to == "diffusers")
        assert any(f"left out 1: {key}" in line.value for line in adapter_rows(vars(report))) == (to == "diffusers")


@pytest.mark.few(3)
@pytest.mark.parametrize("alpha", [1.4e-45, 1e-40, 1e-20])
@pytest.mark.parametrize("run", ["resize", "combine", "keep"])
def test_tiny_alpha_is_no_lost_change(run: str, alpha: float, tmp_path: Path) -> None:
    """α that is kept for fewer columns may be too small for fp32; the written change is the same."""
    save_file(changed(alpha=torch.tensor(alpha)), tmp_path / "a.safetensors")
    save_file(flux(), tmp_path / "base.safetensors")
    out = tmp_path / "o.safetensors"
    RUNS[run](tmp_path / "a.safetensors", out, tmp_path / "base.safetensors")
    assert lora_merge.verify(out)["ok"]


@pytest.mark.parametrize("method", ["sum", "ties"])
@pytest.mark.parametrize("rows", [2, 6])
def test_weight_of_another_shape_is_refused(method: str, rows: int, tmp_path: Path) -> None:
    """The adapter replaces it as a whole, as one does that was trained with more tokens."""
    base = save({"a.weight": rand(4, 4), "b.weight": rand(4, 4), "b.bias": rand(4)}, tmp_path / "base.safetensors")
    pair = {"a.lora_A.weight": rand(2, 4), "a.lora_B.weight": rand(4, 2)}
    one = save({**pair, "b.weight": rand(rows, 4)}, tmp_path / "one.safetensors")
    two = save(pair, tmp_path / "two.safetensors")
    with pytest.raises(lora_merge.MergeError, match="another shape") as caught:
        lora_merge.combine([one, two], tmp_path / "o.safetensors", base=base, method=method, rank=1, unmatched="skip")
    assert caught.value.exit_code == 4

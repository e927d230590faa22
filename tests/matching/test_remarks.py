"""What the user is told of single modules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lora_merge
from tests.kit.files import save
from tests.kit.tensors import rand


@pytest.mark.parametrize("alphas", [("alpha", "lora_alpha"), ("alpha", "lora_alpha", "lora.alpha")], ids="+".join)
def test_remark_names_every_module_once(alphas: tuple[str, ...], tmp_path: Path) -> None:
    """However many tensors of a module it is about."""
    tensors = {"m.lora_up.weight": rand(8, 2), "m.lora_down.weight": rand(2, 8)}
    tensors |= {f"m.{name}": torch.tensor(2.0) for name in alphas}
    paths = save({"m.weight": rand(8, 8)}, tmp_path / "b.safetensors"), save(tensors, tmp_path / "a.safetensors")
    (adapter,) = lora_merge.plan(*paths, tmp_path / "o.safetensors").adapters
    (note,) = [note for note in adapter.notes if "stored twice" in note]
    assert note.startswith("m: its alpha is stored twice")


@pytest.mark.parametrize(("stored", "said"), [(2.0, True), (8.0, False)])
def test_configuration_overrules_a_stored_alpha_and_the_plan_says_so(
    *,
    stored: float,
    said: bool,
    tmp_path: Path,
) -> None:
    module = "base_model.model.m"
    tensors = {f"{module}.lora_A.weight": rand(2, 8), f"{module}.lora_B.weight": rand(8, 2)}
    folder, weight = tmp_path / "adapter", rand(8, 8)
    folder.mkdir()
    save({**tensors, f"{module}.alpha": torch.tensor(stored)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["m"]}'
    )
    base = save({"m.weight": weight}, tmp_path / "b.safetensors")
    (adapter,) = lora_merge.plan(base, folder, tmp_path / "o.safetensors").adapters
    assert any("another scale than the stored alpha" in note for note in adapter.notes) is said
    done = lora_merge.merge_state_dict({"m.weight": weight}, folder)["m.weight"]
    down, up = tensors.values()
    torch.testing.assert_close(done, weight + 4 * up @ down, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("alpha", [torch.tensor(float("nan")), torch.ones(1).bool(), torch.ones(2)])
def test_alpha_that_is_no_number_is_refused(alpha: torch.Tensor, tmp_path: Path) -> None:
    tensors = {"m.lora_up.weight": rand(8, 2), "m.lora_down.weight": rand(2, 8), "m.alpha": alpha}
    paths = save({"m.weight": rand(8, 8)}, tmp_path / "b.safetensors"), save(tensors, tmp_path / "a.safetensors")
    with pytest.raises(lora_merge.MergeError, match=r"alpha is|bool values") as e:
        lora_merge.plan(*paths, tmp_path / "o.safetensors")
    assert e.value.exit_code == 3

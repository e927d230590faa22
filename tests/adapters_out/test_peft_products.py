"""LoHa and LoKr as folders of PEFT: made by PEFT itself, written for kohya's scripts and back, and loaded by PEFT again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lora_merge
from lora_merge.adapters_out.peft.config import split
from lora_merge.errors import FitError
from tests.kit.diffusers_models import CONFIGS
from tests.kit.tensors import rand

diffusers = pytest.importorskip("diffusers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

KIND = "UNet2DConditionModel SD1"
TARGETS = r"down_blocks\.0\..*(attn\d\.to_[qv]|ff\.net\.2|resnets\.0\.conv1|conv_shortcut|proj_in)"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "loha": ("LoHaConfig", {"r": 3, "alpha": 2}),
    "loha with cores": ("LoHaConfig", {"r": 3, "alpha": 3, "use_effective_conv2d": True}),
    "loha of several ranks": ("LoHaConfig", {"r": 3, "alpha": 2, "rank_pattern": {"to_q": 5}, "alpha_pattern": {"to_v": 7}}),
    "lokr": ("LoKrConfig", {"r": 1, "alpha": 2}),
    "lokr of a factor": ("LoKrConfig", {"r": 2, "alpha": 2, "decompose_factor": 4}),
    "lokr of whole factors": ("LoKrConfig", {"r": 64, "alpha": 64}),
    "lokr, both in factors": ("LoKrConfig", {"r": 1, "alpha": 2, "decompose_both": True, "decompose_factor": 8}),
    "lokr with cores": ("LoKrConfig", {"r": 1, "alpha": 1, "use_effective_conv2d": True}),
}  # fmt: skip


def changed(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Return what PEFT makes of a model's weights; a missing or unexpected key is an error."""
    loaded = peft.PeftModel.from_pretrained(model, str(folder))
    merged = loaded.merge_and_unload()
    return {name: value.clone() for name, value in merged.state_dict().items()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model: Any = diffusers.UNet2DConditionModel(**CONFIGS[KIND])
    path = tmp_path_factory.mktemp("unet") / "base.safetensors"
    save_file({name: value.clone().contiguous() for name, value in model.state_dict().items()}, path)
    return path


def fresh(base: dict[str, torch.Tensor]) -> Any:
    model: Any = diffusers.UNet2DConditionModel(**CONFIGS[KIND])
    model.load_state_dict(base)
    return model


@pytest.mark.few(1)
@pytest.mark.parametrize("case", CASES)
def test_pefts_own_folder_goes_to_kohyas_file_and_back(case: str, checkpoint: Path, tmp_path: Path) -> None:
    (kind, options), base = CASES[case], load_file(checkpoint)
    trained = peft.get_peft_model(
        fresh(base), getattr(peft, kind)(target_modules=TARGETS, init_weights=False, **options)
    )
    trained.save_pretrained(tmp_path / "own")
    there, back = tmp_path / "k.safetensors", tmp_path / "back"
    lora_merge.convert(tmp_path / "own", there, to="kohya", base=checkpoint)
    lora_merge.convert((there, 0.5), back, to="peft", base=checkpoint)
    own, again = (load_file(f / "adapter_model.safetensors") for f in (tmp_path / "own", back))
    assert own.keys() == again.keys() and all(torch.equal(own[k], again[k]) for k in own)
    one, half = changed(fresh(base), tmp_path / "own"), changed(fresh(base), back)
    assert sum(not torch.equal(one[k], base[k]) for k in base) > 4
    for name, value in one.items():
        assert torch.allclose(half[name], (value + base[name]) / 2, atol=1e-6), name


def test_shapes_that_no_configuration_gives_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    """Two layers whose factors follow different rules; and two algorithms in one file."""
    base = load_file(checkpoint)
    stem = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_"
    out, cols = base["down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q.weight"].shape
    lokr = {f"{stem}q.lokr_w1": rand(2, 4), f"{stem}q.lokr_w2": rand(out // 2, cols // 4),
            f"{stem}k.lokr_w1": rand(8, 2), f"{stem}k.lokr_w2": rand(out // 8, cols // 2)}  # fmt: skip
    loha = {f"{stem}v.hada_w{n}_{ab}": rand(*((out, 2) if ab == "a" else (2, cols))) for n in "12" for ab in "ab"}
    for name, tensors in (("factors", lokr), ("algorithms", {**dict([*lokr.items()][:2]), **loha})):
        save_file(tensors, tmp_path / f"{name}.safetensors")
        with pytest.raises(FitError, match="PEFT"):
            lora_merge.convert(tmp_path / f"{name}.safetensors", tmp_path / "no", to="peft", base=checkpoint)
        assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("factor", [-1, 1, 4, 7, 16])
def test_sizes_are_split_as_peft_splits_them(factor: int) -> None:
    from peft.tuners.lokr.layer import factorization

    assert all(split(n, factor) == factorization(n, factor) for n in (1, 2, 7, 30, 127, 128, 250, 320, 1280))

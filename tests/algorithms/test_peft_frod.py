"""FRoD without its basis (`save_projection=False`), which PEFT makes anew of all layers of a kind when it loads it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import lora_merge
from lora_merge.algorithms import DoesNotFit
from lora_merge.algorithms.frod import drawn_places, joint_basis
from lora_merge.engine.patch_tensors import cast
from lora_merge.errors import MergeError
from lora_merge.recipes.replay import prove
from tests.algorithms.peft_models import MODELS
from tests.kit.peft_oracle import assert_close, save, train

LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers")
PATTERNS: dict[str, dict[str, Any]] = {
    "default": {},
    "dense": {"sparse_rate": 0.3, "projection_prng_key": 5},
    "diagonal": {"sparse_rate": 0.0, "regularization_alpha": 0.1},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The last bits of a basis, and with close eigenvalues more, depend on the number of threads: PEFT's too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def deep(config: Any) -> Any:
    """The configuration with so many layers that no two eigenvalues are equal."""
    return type(config)(**{**config.to_dict(), **{name: 6 for name in LAYERS if hasattr(config, name)}})


class Blocks(nn.Module):
    """Six layers of one kind in blocks, and two of another outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.ModuleDict({"inner": nn.Linear(10, 12)}) for _ in range(6))
        self.proj = nn.Linear(10, 12)
        self.head = nn.ModuleDict({"a": nn.ModuleDict({"out": nn.Linear(10, 30)})})
        self.tail = nn.ModuleDict({"a": nn.ModuleDict({"out": nn.Linear(10, 30)})})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """PEFT wants one."""
        return self.proj(x)


def frod(**options: Any) -> Any:
    """FRoD's configuration without the basis in its file."""
    return peft.FrodConfig(save_projection=False, progressbar=False, **options)


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", ["llama", "opt", "gpt2", "t5"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_basis_is_that_of_peft(model: str, pattern: str, tmp_path: Path) -> None:
    """T5: of layers with equal names and numbers in the encoder and the decoder PEFT takes the decoder's."""
    make, config, targets = MODELS[model]
    torch.manual_seed(1)
    base, tuned = train(frod(target_modules=targets, **PATTERNS[pattern]), model=make(deep(config)).eval())
    save(tuned, tmp_path / "adapter")
    base.save_pretrained(tmp_path / "base")
    plan = lora_merge.plan(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert any("its basis is not stored" in note for note in plan.adapters[0].notes)
    lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", device="cpu")
    loaded = peft.PeftModel.from_pretrained(make.from_pretrained(tmp_path / "base").eval(), tmp_path / "adapter")
    got, changed = make.from_pretrained(tmp_path / "out").eval().state_dict(), 0
    for name, value in loaded.merge_and_unload().state_dict().items():
        assert_close(got[name], value, name, 1e-4)
        changed += not torch.equal(value, base.state_dict()[name])
    assert changed > len(targets)


@pytest.mark.filterwarnings("ignore")
def test_basis_and_places_are_the_library_s_own() -> None:
    torch.manual_seed(2)
    model = Blocks()
    tuned = train(frod(target_modules=["inner", "out"], sparse_rate=0.2, projection_prng_key=3), model=model)[1]
    kinds = {"a_out": [model.tail["a"]["out"], model.head["a"]["out"]], "inner": [one["inner"] for one in model.h]}
    assert tuned.base_model.frod_V.keys() == kinds.keys()
    for at, (kind, layers) in enumerate(kinds.items(), 1):
        assert torch.equal(drawn_places([10] * at, 0.2, 3), tuned.base_model.frod_s_indices[kind]["default"])
        if kind == "inner":
            theirs = tuned.base_model.frod_V[kind]["default"]
            assert_close(joint_basis([layer.weight.detach() for layer in layers], 1e-3, cast), theirs, kind, 1e-4)


def test_basis_that_is_a_matter_of_rounding_is_refused() -> None:
    torch.manual_seed(3)
    one, low = torch.randn(40, 10), torch.randn(40, 3) @ torch.randn(3, 10)
    for weights in ([one], [one, one], [one, 2 * one], [torch.randn(4, 10)], [low, low + 0]):
        with pytest.raises(DoesNotFit, match="rounding"):
            joint_basis(weights, 1e-3, cast)
    assert joint_basis([torch.randn(20, 10) for _ in range(5)], 1e-3, cast).shape == (10, 10)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("targets", "why", "code"), [
    (["proj"], "rounding", 4), (["out"], "order", 3), (["inner"], "", 0), (["inner", "proj"], "rounding", 4),
])  # fmt: skip
def test_facts_in_no_file_are_refused(targets: list[str], why: str, code: int, tmp_path: Path) -> None:
    torch.manual_seed(4)
    base, tuned = train(frod(target_modules=targets), model=Blocks())
    save(tuned, tmp_path / "adapter")
    save_file(base.state_dict(), tmp_path / "base.safetensors")
    out = tmp_path / "out.safetensors"
    if why:
        with pytest.raises(MergeError, match=why) as e:
            lora_merge.merge(tmp_path / "base.safetensors", tmp_path / "adapter", out, device="cpu")
        assert e.value.exit_code == code
        assert not out.exists()
        return
    lora_merge.merge(tmp_path / "base.safetensors", tmp_path / "adapter", out, device="cpu")
    assert prove(out, full=True)
    for name, value in copy.deepcopy(tuned).merge_and_unload().state_dict().items():
        assert_close(load_file(out)[name], value, name, 1e-4)


@pytest.mark.filterwarnings("ignore")
def test_file_that_should_have_its_basis_and_another_pattern_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(5)
    base, tuned = train(frod(target_modules=["inner"], sparse_rate=0.3), model=Blocks())
    _, config = save(tuned, tmp_path)
    for change, why in (({"save_projection": True}, "not stored"), ({"sparse_rate": 0.1}, "off the diagonal")):
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | change))
        with pytest.raises(MergeError, match=why):
            lora_merge.merge_state_dict(base.state_dict(), tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(MergeError, match="not stored"):
        lora_merge.load_adapter(tmp_path).delta("base_model.model.h.0.inner", base.h[0]["inner"].weight)


@pytest.mark.filterwarnings("ignore")
def test_basis_of_a_single_layer_depends_on_the_last_bits_of_the_base(tmp_path: Path) -> None:
    """Why such kinds are refused: what PEFT itself merges is no property of the files. With six layers it is one."""
    for targets, settled in ((["proj"], False), (["inner"], True)):
        torch.manual_seed(6)
        base, tuned = train(frod(target_modules=targets, sparse_rate=0.2), model=Blocks())
        save(tuned, tmp_path / targets[0])
        near = copy.deepcopy(base)
        for parameter in near.parameters():
            parameter.data *= 1 + 2.0**-22 * torch.randint(-1, 2, parameter.shape)
        one, two = (
            peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / targets[0]).merge_and_unload().state_dict()
            for model in (base, near)
        )
        name = f"{targets[0]}.weight" if targets == ["proj"] else "h.0.inner.weight"
        apart = float((one[name] - two[name]).norm() / (one[name] - base.state_dict()[name]).norm())
        assert (apart < 0.01) == settled, (name, apart)

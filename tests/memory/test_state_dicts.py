"""State dicts of quantised models: what bitsandbytes and ComfyUI store is merged, tensors of other libraries are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lora_merge
from lora_merge.errors import InputError

from ..files.quantised_forms import FORMS
from ..files.test_quantised_bases import NAMES, adapter, base, same
from ..support import load, save


@pytest.mark.parametrize(
    "name", ["bitsandbytes nf4 doubled", "bitsandbytes int8", "ComfyUI nvfp4", "ComfyUI mxfp8", "ComfyUI fp8 rows"]
)
@pytest.mark.parametrize("dtype", ["keep", "bf16"])
def test_a_state_dict_of_codes_is_merged_as_its_file(name: str, dtype: str, tmp_path: Path) -> None:
    source, tensors = base(FORMS[name], tmp_path / "base")
    file = source / "model.safetensors" if source.is_dir() else source
    lora = save(adapter(), tmp_path / "lora.safetensors")
    lora_merge.merge(file, lora, tmp_path / "out.safetensors", dtype=dtype, verify=False)
    wanted, made = load(tmp_path / "out.safetensors"), lora_merge.merge_state_dict(tensors, lora, dtype=dtype)
    assert made.keys() == wanted.keys()
    assert all(same(made[key], tensor) for key, tensor in wanted.items())


@pytest.mark.parametrize("options", [{}, {"device": "keep"}, {"dtype": "bf16"}])
def test_a_layer_without_a_bias_gets_one(options: dict[str, Any]) -> None:
    value = torch.randn(6)
    made = lora_merge.merge_state_dict({"a.weight": torch.randn(6, 4)}, {"a.diff_b": value}, **options)
    dtype = torch.bfloat16 if "dtype" in options else torch.float32
    assert torch.equal(made["a.bias"], value.to(dtype)) and made["a.bias"].dtype == dtype


@pytest.mark.parametrize("name", ["ComfyUI fp8 rows", "ComfyUI int8", "ComfyUI nvfp4"])
def test_a_new_bias_beside_codes_is_plain_numbers(name: str, tmp_path: Path) -> None:
    """Codes have a scale that the bias would not have; as whole numbers it could not be stored at all."""
    source, tensors = base(FORMS[name], tmp_path / "base")
    value = torch.randn(160)
    lora = save({f"{NAMES[0]}.diff_b": value}, tmp_path / "lora.safetensors")
    lora_merge.merge(source, lora, tmp_path / "out.safetensors")
    for made in (load(tmp_path / "out.safetensors"), lora_merge.merge_state_dict(tensors, lora)):
        assert torch.equal(made[f"{NAMES[0]}.bias"], value.bfloat16())


class Codes(Tensor):
    """A tensor as torchao's: codes and a scale that only look like one tensor."""

    @staticmethod
    def __new__(cls: Any, codes: Tensor, scale: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(function)


def test_tensors_that_only_look_like_one_are_refused(tmp_path: Path) -> None:
    lora, weight = save(adapter(), tmp_path / "lora.safetensors"), f"{NAMES[0]}.weight"
    plain = {f"{name}.weight": torch.zeros(160, 192) for name in NAMES}
    codes = Codes(torch.zeros(160, 192, dtype=torch.int8), torch.ones(160, 1))
    with pytest.raises(InputError, match="a Codes is not a plain tensor") as caught:
        lora_merge.merge_state_dict({**plain, weight: codes}, lora)
    assert weight in caught.value.where and "dequantize" in caught.value.fix

    class Halves(torch.nn.Parameter):
        quant_state = None

    halves = Halves(torch.zeros(15360, 1, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(InputError, match="a Halves holds a part of the weight alone") as caught:
        lora_merge.merge_state_dict({**plain, weight: halves}, lora)
    assert weight in caught.value.where and "state_dict()" in caught.value.fix


@pytest.mark.parametrize("options", [{}, {"device": "keep"}, {"method": "compose"}], ids=str)
def test_a_state_dict_gets_the_bias_that_its_layer_lacks(options: dict[str, Any], tmp_path: Path) -> None:
    weight, factors = torch.randn(6, 8), (torch.randn(2, 8), torch.randn(6, 2))
    lora = {"a.lora_A.weight": factors[0], "a.lora_B.weight": factors[1], "a.lora_B.bias": torch.arange(6.0)}
    lora_merge.merge(
        save({"a.weight": weight}, tmp_path / "b.safetensors"),
        save(lora, tmp_path / "a.safetensors"),
        tmp_path / "out.safetensors",
    )
    wanted = load(tmp_path / "out.safetensors")
    made = lora_merge.merge_state_dict({"a.weight": weight}, lora, **options)
    assert made.keys() == wanted.keys() == {"a.weight", "a.bias"}
    assert torch.equal(made["a.bias"], lora["a.lora_B.bias"])
    torch.testing.assert_close(made["a.weight"], wanted["a.weight"])

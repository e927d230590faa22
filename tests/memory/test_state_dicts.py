"""State dicts of quantised models: what bitsandbytes and ComfyUI store is merged, tensors of other libraries are refused."""

from __future__ import annotations

from itertools import product
from operator import mul
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import lora_merge
from lora_merge.errors import InputError
from lora_merge.memory.state_index import repeats, shared
from tests.files.quantised_forms import FORMS
from tests.kit.adapters import kohya
from tests.kit.files import load, save
from tests.kit.models import sd1
from tests.kit.pairs import examples
from tests.kit.quantised import NAMES, adapter, base, same


@pytest.mark.filterwarnings("ignore:.*is lost in the rounding")  # in four bits it is
@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name", ["bitsandbytes nf4 doubled", "bitsandbytes int8", "ComfyUI nvfp4", "ComfyUI mxfp8", "ComfyUI fp8 rows"]
)
@pytest.mark.parametrize("dtype", ["keep", "bf16"])
def test_state_dict_of_codes_is_merged_as_its_file(name: str, dtype: str, tmp_path: Path) -> None:
    source, tensors = base(FORMS[name], tmp_path / "base")
    file = source / "model.safetensors" if source.is_dir() else source
    lora = save(adapter(), tmp_path / "lora.safetensors")
    lora_merge.merge(file, lora, tmp_path / "out.safetensors", dtype=dtype, verify=False)
    wanted, made = load(tmp_path / "out.safetensors"), lora_merge.merge_state_dict(tensors, lora, dtype=dtype)
    assert made.keys() == wanted.keys()
    assert all(same(made[key], tensor) for key, tensor in wanted.items())


def test_names_with_one_more_level_are_answered_with_the_level() -> None:
    """The base is what is unknown then, not the text encoder what is missing."""
    tensors = sd1()
    adapter = kohya(tensors)
    for level in ("model.", "module.net."):
        with pytest.raises(lora_merge.MergeError) as e:
            lora_merge.merge_state_dict({f"{level}{name}": value for name, value in tensors.items()}, adapter)
        assert e.value.what.endswith(f"all names of the base begin with {level!r}")
        assert e.value.fix == f"leave that out of each name: name.removeprefix({level!r})"


@pytest.mark.parametrize(("old", "new"), [("diffusion_model", "unet"), (".weight", ".w"), ("input_blocks", "in")])
def test_checkpoint_is_what_all_its_tensors_are(old: str, new: str, tmp_path: Path) -> None:
    """Neither the VAE nor the text encoder in it, where the names of its main network are unknown."""
    tensors = {name.replace(old, new): value for name, value in sd1().items()}
    strange = [name for name in tensors if name.startswith("model.")]
    path = save({"first_stage_model.decoder.conv_out.weight": torch.ones(3, 4, 3, 3), **tensors}, tmp_path / "base")
    what = f"heckpoint with a text encoder, a VAE and {len(strange)} tensors of unknown names (such as {min(strange)})"
    assert what in lora_merge.inspect(path)["verdict"]["text"]
    adapter = save(kohya(sd1()), tmp_path / "lora.safetensors")
    calls = [lambda: lora_merge.plan(adapter.with_name("base"), path), lambda: lora_merge.plan(path, adapter)]
    for call in calls:
        with pytest.raises(lora_merge.MergeError) as e:
            call()
        assert what in e.value.what or "begin with 'model.'" in e.value.what
        assert "generation time" not in e.value.fix and "VAE" not in e.value.fix


def test_level_of_one_network_is_named_too(tmp_path: Path) -> None:
    tensors = {name.replace("diffusion_model", "unet"): value for name, value in sd1().items()}
    with pytest.raises(lora_merge.MergeError) as e:
        lora_merge.merge_state_dict(tensors, kohya(sd1()))
    assert e.value.fix.startswith("leave that out of each name: name.removeprefix('model.')")
    assert lora_merge.merge_state_dict({n.removeprefix("model."): t for n, t in tensors.items()}, kohya(sd1()))


@pytest.mark.parametrize(("value", "what", "fix"), [
    (torch.ones(2).numpy(), "an ndarray is not a tensor", "convert each: {name: torch.from_numpy(array) for name, array in arrays.items()}"),
    (5, "an int is not a tensor", "leave the entry out"),
    ([1.0], "a list is not a tensor", "convert each: {name: torch.tensor(numbers) for name, numbers in lists.items()}"),
    ({"a.weight": torch.ones(2)}, "a dict is not a tensor", "give the table in it, if that has the weights"),
])  # fmt: skip
def test_entries_that_are_no_tensors_are_refused(value: object, what: str, fix: str) -> None:
    with pytest.raises(InputError) as e:
        lora_merge.merge_state_dict({"a.weight": torch.ones(8, 4), "b": value}, {"a.diff": torch.ones(8, 4)})  # type: ignore[dict-item]
    assert (e.value.what, e.value.fix) == (what, fix)


@pytest.mark.parametrize("options", [{}, {"device": "keep"}, {"dtype": "bf16"}])
def test_layer_without_a_bias_gets_one(options: dict[str, Any]) -> None:
    value = torch.randn(6)
    made = lora_merge.merge_state_dict({"a.weight": torch.randn(6, 4)}, {"a.diff_b": value}, **options)
    dtype = torch.bfloat16 if "dtype" in options else torch.float32
    assert torch.equal(made["a.bias"], value.to(dtype)) and made["a.bias"].dtype == dtype


@pytest.mark.parametrize("name", ["ComfyUI fp8 rows", "ComfyUI int8", "ComfyUI nvfp4"])
def test_new_bias_beside_codes_is_plain_numbers(name: str, tmp_path: Path) -> None:
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
def test_state_dict_gets_the_bias_that_its_layer_lacks(options: dict[str, Any], tmp_path: Path) -> None:
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


@st.composite
def views(draw: st.DrawFn, memory: Tensor) -> Tensor:
    """A strided view of a small memory: of any dtype, with steps of 0, and without numbers."""
    typed = memory.view(draw(st.sampled_from([torch.uint8, torch.int16, torch.float32])))
    axes = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=3))
    reach = sum((n - 1) * step for n, step in axes if n)
    first = draw(st.integers(0, max(0, len(typed) - 1 - reach)))
    assume(first + reach < len(typed))
    return typed.as_strided([n for n, _ in axes], [step for _, step in axes], first)


def touched(tensor: Tensor) -> list[int]:
    """The address of every byte of every number."""
    steps, size = [step * tensor.element_size() for step in tensor.stride()], tensor.element_size()
    firsts = (sum(map(mul, place, steps)) for place in product(*map(range, tensor.shape)))
    return [tensor.data_ptr() + first + byte for first in firsts for byte in range(size)]


MEMORY = torch.zeros(160, dtype=torch.uint8)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(views(MEMORY), min_size=4, max_size=4))
def test_tensors_share_memory_where_they_touch_a_common_byte(tensors: list[Tensor]) -> None:
    first, second = ({str(i): t for i, t in enumerate(some)} for some in (tensors[:2], tensors[2:]))
    wanted = {(a, b) for a, t in first.items() for b, u in second.items() if {*touched(t)} & {*touched(u)}}
    assert sorted(shared(first, second)) == sorted(wanted)
    for tensor in tensors:
        assert repeats(tensor) == (len({*touched(tensor)}) < len(touched(tensor)))


def lora(name: str, rows: int, cols: int) -> dict[str, Tensor]:
    return {f"{name}.lora_A.weight": torch.ones(1, cols), f"{name}.lora_B.weight": torch.ones(rows, 1)}


@pytest.mark.parametrize(
    "second", [lambda t: t, lambda t: t.data, lambda t: t[2:], lambda t: t.t(), lambda t: t[:, ::2]]
)
@pytest.mark.parametrize("both", [False, True])
def test_entries_that_shared_memory_and_now_differ_are_warned_of(second: Any, *, both: bool) -> None:
    weight = torch.zeros(6, 6)
    state = {"a.weight": weight, "c.weight": second(weight), "d.weight": torch.zeros(6, 6)}
    shape = state["c.weight"].shape
    adapter = lora("a", 6, 6) | (lora("c", *shape) if both else {})
    if both and state["c.weight"].stride() == weight.stride() and shape == weight.shape:
        lora_merge.merge_state_dict(state, adapter)  # both have the same new values; warnings are errors
        return
    with pytest.warns(UserWarning, match=r"a\.weight and c\.weight were tied and now differ") as caught:
        lora_merge.merge_state_dict(state, adapter)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert not weight.any()


def test_entries_that_share_memory_and_do_not_change_are_not_warned_of() -> None:
    weight = torch.full((6, 6), torch.nan)
    state = {"a.weight": weight, "c.weight": weight, "d.weight": torch.zeros(6, 6)}
    lora_merge.merge_state_dict(state, lora("d", 6, 6), dtype="bf16")

"""The error for a missing tensor names it in the spelling of the file, alone and among other modules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lora_merge
from lora_merge.adapters.modules import Module
from lora_merge.dtypes import StoredTensor
from lora_merge.errors import InputError
from lora_merge.matching.missing_tensors import _end_of_key
from tests.kit.files import save
from tests.kit.tensors import rand

PAIRS = {  # the ends of one module's keys, with their shapes
    "kohya": {"lora_up.weight": (8, 2), "lora_down.weight": (2, 6)},
    "PEFT": {"lora_B.weight": (8, 2), "lora_A.weight": (2, 6)},
    "old diffusers": {"lora.up.weight": (8, 2), "lora.down.weight": (2, 6)},
    "bare PEFT": {"lora_B": (8, 2), "lora_A": (2, 6)},
    "SimpleTuner": {"lora_linear_layer.up.weight": (8, 2), "lora_linear_layer.down.weight": (2, 6)},
    "torchtune": {"lora_b.weight": (8, 2), "lora_a.weight": (2, 6)},
    "mlx-lm": {"lora_b": (2, 8), "lora_a": (6, 2)},
    "PEFT with a name": {"lora_B.style.weight": (8, 2), "lora_A.style.weight": (2, 6)},
    "LoHa": {"hada_w1_a": (8, 2), "hada_w1_b": (2, 6), "hada_w2_a": (8, 2), "hada_w2_b": (2, 6)},
}


@pytest.mark.few(9)
@pytest.mark.parametrize("others", [0, 3])
@pytest.mark.parametrize(("dialect", "gone"), [(name, end) for name, ends in PAIRS.items() for end in ends])
def test_missing_tensor_is_named_as_the_file_spells_it(dialect: str, gone: str, others: int, tmp_path: Path) -> None:
    names = [f"model.layers.{i}.self_attn.q_proj" for i in range(1 + others)]
    base = save({f"{name}.weight": rand(8, 6) for name in names}, tmp_path / "base.safetensors")
    tensors = {f"{name}.{end}": rand(*shape) for name in names for end, shape in PAIRS[dialect].items()}
    del tensors[f"{names[0]}.{gone}"]
    adapter = save(tensors, tmp_path / "adapter.safetensors")
    with pytest.raises(lora_merge.MergeError, match=f"{re.escape(names[0])} has .*no {re.escape(gone)}") as caught:
        lora_merge.merge(base, [adapter], tmp_path / "merged.safetensors")
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("others", [0, 3])
@pytest.mark.parametrize(("there", "gone"), [("up", "down"), ("down", "up")])
def test_missing_tensor_is_named_in_a_spelling_whose_path_is_none_of_the_base(
    there: str, gone: str, others: int, tmp_path: Path
) -> None:
    """XLabs' names have `processor` in place of the layer."""
    layers = range(1 + others)
    base = save({f"double_blocks.{i}.img_attn.qkv.weight": rand(8, 6) for i in layers}, tmp_path / "base.safetensors")
    key, shapes = "double_blocks.{}.processor.qkv_lora1.{}.weight", {"up": (8, 2), "down": (2, 6)}
    tensors = {key.format(i, end): rand(*shape) for i in layers for end, shape in shapes.items()}
    del tensors[key.format(0, gone)]
    has, lacks = (f"processor.qkv_lora1.{end}.weight" for end in (there, gone))
    text = f"img_attn.qkv has {has} but no {lacks}" if not others else f"img_attn.qkv has .*no {lacks}"
    with pytest.raises(InputError, match=text):
        lora_merge.merge(base, [save(tensors, tmp_path / "adapter.safetensors")], tmp_path / "merged.safetensors")


@pytest.mark.parametrize("end", ["scale", "alpha_scale"])
@pytest.mark.parametrize("alpha", [False, True])
def test_scale_that_one_module_lacks_is_missing_unless_it_has_alpha(end: str, *, alpha: bool, tmp_path: Path) -> None:
    """The names of webui and LongCat-Video: without either number the change would count with the scale 1."""
    names = [f"model.layers.{i}.self_attn.q_proj" for i in range(4)]
    base = save({f"{name}.weight": rand(8, 6) for name in names}, tmp_path / "base.safetensors")
    rows = {"lora_up.weight": rand(8, 2), "lora_down.weight": rand(2, 6), end: rand()}
    tensors = {f"{name}.{last}": value.clone() for name in names for last, value in rows.items()}
    tensors |= {f"{name}.alpha": rand() for name in names if alpha}
    del tensors[f"{names[0]}.{end}"]
    adapter, out = save(tensors, tmp_path / "adapter.safetensors"), tmp_path / "merged.safetensors"
    if alpha:
        lora_merge.merge(base, [adapter], out)
    else:
        with pytest.raises(InputError, match=f"{re.escape(names[0])} has .*no {end}"):
            lora_merge.merge(base, [adapter], out)


def test_end_of_a_key_begins_after_a_whole_level() -> None:
    """A shared tensor of `l.ab` is none of `l.a`, whose name its key begins with."""
    own, others = (
        StoredTensor(f"l.{name}.lora_A", "F32", (2, 6), Path("a"), 0, 48) for name in ("a", "ab")
    )  # fmt: skip
    assert _end_of_key("down", [Module("l.a", "weight", {}, {"down": others}, ())]) == "down"
    both = [Module("l.a", "weight", {}, {"down": others}, ()), Module("l.a", "weight", {"down": own}, {}, ())]
    assert _end_of_key("down", both) == "lora_A"

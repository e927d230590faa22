"""optimum-quanto, HQQ and SDNQ: layers that the libraries stored are read as the libraries read them.

`by_libraries.safetensors.xz` holds for each format one layer of 2 rows, as its library stores it, and in `want` the
numbers that the library reads back in fp32. Made with optimum-quanto 0.2.7, hqq 0.2.8 and sdnq 0.2.8 from normal
numbers of deviation 0.02, a part of one row zeros, in groups of 32 columns.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import lora_merge
from lora_merge.errors import InputError
from lora_merge.viewing.inspect import inspect
from tests.files.other_forms import FORMS
from tests.kit.files import load, save
from tests.kit.hostile_inputs import command
from tests.kit.tensors import Tensors, rand

LAYER = "model.layers.0.self_attn.q_proj"


READ_ONLY = [name for name in FORMS if name.startswith(("hqq", "quanto int2", "quanto int4"))]


def base(folder: Path, name: str, tensors: Tensors, **changes: Any) -> Path:
    method, _, kind = name.partition(" ")
    found = {f"{LAYER}.{last}": value for last, value in tensors.items() if last != "want"}
    folder.mkdir()
    save({**found, "model.norm.weight": torch.ones(8)}, folder / "model.safetensors")
    section = {
        "quant_method": method,
        **({"weights_dtype": kind, "group_size": 32} if method == "sdnq" else {}),
        **changes,
    }
    (folder / "config.json").write_text(json.dumps({"model_type": "x", "quantization_config": section}))
    return folder


def adapter(folder: Path, cols: int) -> tuple[Path, torch.Tensor]:
    down, up = rand(4, cols, seed=1), rand(2, 4, seed=2, scale=0.02)
    stem = f"base_model.model.{LAYER}"
    path = save({f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}, folder / "lora.safetensors")
    return path, up.double() @ down.double()


@pytest.mark.few(2)
@pytest.mark.parametrize("name", sorted(FORMS))
def test_layer_is_read_as_its_library_reads_it(name: str, tmp_path: Path) -> None:
    want, out = FORMS[name]["want"], tmp_path / "out"
    source, (lora, change) = base(tmp_path / "base", name, FORMS[name]), adapter(tmp_path, want.shape[1])
    assert command("merge", source, lora, "-o", out, "--dtype", "fp32") == 0
    made = load(out / "model.safetensors")
    assert set(made) - {f"{LAYER}.bias"} == {"model.norm.weight", f"{LAYER}.weight"}
    torch.testing.assert_close(made[f"{LAYER}.weight"].double(), want.double() + change, rtol=0, atol=1e-7)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert lora_merge.verify(out, full=True)["full"]
    assert name.partition(" ")[0] in json.dumps(inspect(source)).lower()


@pytest.mark.parametrize("name", sorted(READ_ONLY))
def test_formats_that_cannot_be_written_say_so(name: str, tmp_path: Path) -> None:
    lora, _ = adapter(tmp_path, FORMS[name]["want"].shape[1])
    with pytest.raises(InputError, match="rows that are far apart share its bytes") as caught:
        lora_merge.merge(base(tmp_path / "base", name, FORMS[name]), lora, tmp_path / "out")
    assert 'dtype="bf16"' in caught.value.fix
    assert not (tmp_path / "out").exists()


BAD: dict[str, tuple[str, Tensors | str, dict[str, Any]]] = {
    "no bias tells the shape": ("quanto int4", "bias", {}),
    "codes of other rows": ("quanto int4", {"weight._data._data": torch.zeros(4, 32, dtype=torch.uint8)}, {}),
    "a bias of other rows": ("quanto int4", {"bias": torch.zeros(7)}, {}),
    "scales of other rows": ("quanto int8", {"weight._scale": torch.ones(3, 1)}, {}),
    "scales that are codes": ("hqq 4 axis 1", {"quant_scale": torch.tensor(1, dtype=torch.uint8)}, {}),
    "a shape of another size": ("hqq 4 axis 1", {"shape": torch.tensor([2, 65])}, {}),
    "a shape below zero": ("hqq 4 axis 1", {"shape": torch.tensor([-2, -64])}, {}),
    "bits that are none": ("hqq 4 axis 1", {"nbits": torch.tensor(5, dtype=torch.int32)}, {}),
    "a shape of 2 GB": ("hqq 4 axis 1", {"shape": torch.tensor([2**40, 2**40])}, {}),
    "an axis that is none": ("hqq 4 axis 1", {"axis": torch.tensor(7, dtype=torch.int32)}, {}),
    "a rotation of another kind": ("sdnq uint4", {}, {"use_hadamard": True, "hadamard_group_size": 32}),
    "a low-rank part": ("sdnq uint4", {"svd_up": torch.ones(2, 1)}, {}),
    "another type for this layer": ("sdnq uint4", {}, {"modules_dtype_dict": {"int8": ["q_proj"]}}),
    "a type that is packed otherwise": ("sdnq uint4", {}, {"weights_dtype": "uint6"}),
    "zero points of signed codes": ("sdnq int4", {"zero_point": torch.ones(2, 2, 1)}, {}),
}
"""What is wrong → format, tensors in place of others or the name of a missing one, entries of config.json."""


@pytest.mark.parametrize("what", BAD)
def test_layers_that_contradict_themselves_are_refused_by_name(what: str, tmp_path: Path) -> None:
    name, change, entries = BAD[what]
    tensors = {last: value for last, value in FORMS[name].items() if last != change}
    tensors |= change if isinstance(change, dict) else {}
    lora, _ = adapter(tmp_path, FORMS[name]["want"].shape[1])
    with pytest.raises(InputError, match=r"the base is quantised: (optimum-quanto|HQQ|SDNQ)"):
        lora_merge.merge(base(tmp_path / "base", name, tensors, **entries), lora, tmp_path / "out", dtype="bf16")
    assert not (tmp_path / "out").exists()


@pytest.mark.few(5)
@pytest.mark.parametrize("name", ["hqq 4 axis 1", "hqq 4 axis 0", "quanto int4", "sdnq uint4", "sdnq int4"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_scales_that_are_no_numbers_are_refused(name: str, number: float, tmp_path: Path) -> None:
    key = "weight._scale" if name.startswith("quanto") else "scale"
    scale = FORMS[name][key].clone()
    scale.view(-1)[1] = number
    lora, _ = adapter(tmp_path, FORMS[name]["want"].shape[1])
    with pytest.raises(InputError, match="scale"):
        lora_merge.merge(
            base(tmp_path / "base", name, {**FORMS[name], key: scale}), lora, tmp_path / "out", dtype="bf16"
        )
    assert not (tmp_path / "out").exists()

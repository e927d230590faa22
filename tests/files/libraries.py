"""Libraries that quantise and read weights themselves: by them a layer is made, and the output of a merge is read.

`python -m tests.files.libraries` makes `libraries.safetensors.xz` again: for each row a layer of 32 × 64 as its library
stores it, and in `want` the numbers that the library reads back in fp32. It needs the packages that `MADE_WITH` names;
their dependencies are not needed, as packages are entered past their `__init__`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import lzma
import os
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save
from torch import Tensor

from tests.files.quantised_forms import FORMS, FP8, Form, fp8_half, spread
from tests.kit.tensors import Tensors, rand

FILE = Path(__file__).with_name("libraries.safetensors.xz")
MADE_WITH = ("aqlm 1.1.7", "auto-gptq 0.7.1", "autoawq 0.2.7.post3", "auto-round 0.16.1", "bitsandbytes 0.50.2",
             "fbgemm-gpu-genai 1.9.0", "mlx 0.32.4", "nvidia-modelopt 0.47.0")  # fmt: skip


class Library(NamedTuple):
    """The module of a library that must be there, and what it does."""

    module: str
    form: Form


def bare(*names: str) -> None:
    """Enter packages without what their `__init__` wants: other libraries, older ones, a GPU."""
    for name in names:
        places = [Path(folder or ".") / name.replace(".", "/") for folder in sys.path]
        module = types.ModuleType(name)
        module.__path__ = [str(place) for place in places if place.is_dir()]
        module.__spec__ = importlib.util.spec_from_loader(name, None)
        sys.modules.setdefault(name, module)


def _bnb4(kind: str, *, doubled: bool) -> Library:
    def make(w: Tensor) -> Tensors:
        from bitsandbytes import functional

        codes, state = functional.quantize_4bit(w, blocksize=64, compress_statistics=doubled, quant_type=kind)
        return {"weight": codes, **{f"weight.{last}": value for last, value in state.as_dict(packed=True).items()}}

    def read(t: Tensors) -> Tensor:
        from bitsandbytes import functional

        beside = {last.removeprefix("weight."): value.clone() for last, value in t.items() if last[:7] == "weight."}
        state = functional.QuantState.from_dict(beside, device=torch.device("cpu"))
        return functional.dequantize_4bit(t["weight"].clone(), state)

    row = FORMS[f"bitsandbytes {kind}{' doubled' * doubled}"]
    slack = 2.0**-20 if doubled else 0.0  # the scales are a product and a sum
    return Library("bitsandbytes", replace(row, make=make, read=read, slack=slack))


def _bnb8() -> Library:
    def make(w: Tensor) -> Tensors:
        from bitsandbytes import functional

        codes, scale, _ = functional.int8_vectorwise_quant(w.half())
        return {"weight": codes, "SCB": scale, "weight_format": torch.tensor(0, dtype=torch.uint8)}

    def read(t: Tensors) -> Tensor:
        from bitsandbytes import functional

        return functional.int8_vectorwise_dequant(t["weight"], t["SCB"])

    return Library("bitsandbytes", replace(FORMS["bitsandbytes int8"], make=make, read=read))


def _mlx(bits: int, mode: str = "affine", size: int = 64) -> Library:
    settings: dict[str, Any] = {"group_size": size, "bits": bits, "mode": mode}

    def make(w: Tensor) -> Tensors:
        import mlx.core as mx
        import numpy as np

        found = mx.quantize(mx.array(w.numpy()), **settings)
        made = {last: torch.from_numpy(np.array(part)) for last, part in zip(NAMES, found, strict=False)}
        return {last: part if last != "weight" else part.view(torch.uint32) for last, part in made.items()}

    def read(t: Tensors) -> Tensor:
        import mlx.core as mx
        import numpy as np

        parts = [mx.array(t[last].contiguous().numpy()) for last in NAMES if last in t]
        return torch.from_numpy(np.array(mx.dequantize(*parts, **settings, dtype=mx.float32)))

    row = FORMS["mlx 4 bit" if mode == "affine" else f"mlx {mode}"]
    return Library("mlx.core", replace(row, make=make, read=read, config=settings))


NAMES = ("weight", "scales", "biases")


def _grid(w: Tensor, bits: int, size: int) -> tuple[Tensor, Tensor]:
    """Scales and zero points [rows, groups] from the least and the largest number, zero between them."""
    groups = w.view(len(w), -1, size)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scale = ((high - low) / (2**bits - 1)).clamp(min=1e-5).half().float()
    return scale, (-low / scale).round().clamp(1, 2**bits - 1)


def _gptq(bits: int, *, ordered: bool = False) -> Library:
    """auto-gptq's own packing, and its product with the unit matrix."""

    def layer(rows: int, cols: int) -> Any:
        bare("auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear")
        from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear

        return QuantLinear(bits, 32, cols, rows, bias=False)

    def make(w: Tensor) -> Tensors:
        order = torch.arange(w.shape[1]) // 32
        order = order.flip(0) if ordered else order
        scale, zero = _grid(w[:, order.argsort(stable=True)], bits, 32)
        levels = (w / scale[:, order] + zero[:, order]).round().clamp(0, 2**bits - 1)
        linear = torch.nn.Linear(w.shape[1], w.shape[0], bias=False).half()
        made = layer(*w.shape)
        # Its numbers are packed as they are: those of the grid, in the precision of the scales that it divides by.
        linear.weight.data = ((levels - zero[:, order]) * scale[:, order]).float()
        made.pack(linear, scale, zero, order.int())
        found = {last: getattr(made, last) for last in ("qweight", "qzeros", "scales", "g_idx")}
        return {**found, "scales": found["scales"].half()}

    def read(t: Tensors) -> Tensor:
        made = layer(t["qweight"].shape[1], len(t["g_idx"]))
        for last, value in t.items():
            setattr(made, last, value.float() if last == "scales" else value)
        return made(torch.eye(len(t["g_idx"]))).t()

    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": ordered}
    return Library("auto_gptq", replace(FORMS["GPTQ"], make=make, read=read, config=config))


def _awq() -> Library:
    def make(w: Tensor) -> Tensors:
        bare("awq", "awq.modules", "awq.modules.linear", "awq.utils")
        from awq.modules.linear.gemm import WQLinear_GEMM

        scale, zero = _grid(w, 4, 32)
        levels = (w / scale.repeat_interleave(32, 1) + zero.repeat_interleave(32, 1)).round().clamp(0, 15)
        linear = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
        linear.weight.data = (levels - zero.repeat_interleave(32, 1)) * scale.repeat_interleave(32, 1)
        parts = {"scales": scale.t().contiguous(), "zeros": zero.t().contiguous()}
        made = WQLinear_GEMM.from_linear(linear, 4, 32, **parts)
        return {last: getattr(made, last) for last in ("qweight", "qzeros", "scales")}

    def read(t: Tensors) -> Tensor:
        bare("awq", "awq.utils")
        from awq.utils.packing_utils import dequantize_gemm

        return dequantize_gemm(t["qweight"], t["qzeros"], t["scales"].float(), 4, 32).t()

    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
    return Library("awq", replace(FORMS["AWQ"], make=make, read=read, config=config))


def _aqlm(books: int, bits: int) -> Library:
    """Random codes: the library that fits them to a weight is another."""

    def make(w: Tensor) -> Tensors:
        os.environ["AQ_USE_JIT"] = "0"
        from aqlm.utils import pack_int_data

        random = torch.Generator().manual_seed(books)
        codes = torch.randint(0, 2**bits, (len(w), w.shape[1] // 8, books), generator=random)
        book = torch.randn(books, 2**bits, 1, 8, generator=random).half()
        return {
            "codes": pack_int_data(codes, bits),
            "codebooks": book,
            "scales": w.abs().amax(1).view(-1, 1, 1, 1).half(),
        }

    def read(t: Tensors) -> Tensor:
        os.environ["AQ_USE_JIT"] = "0"
        from aqlm.utils import _dequantize_weight, unpack_int_data

        return _dequantize_weight(unpack_int_data(t["codes"], bits), t["codebooks"].float(), t["scales"].float())

    return Library("aqlm", replace(FORMS["AQLM"], make=make, read=read))


def _fbgemm() -> Library:
    def make(w: Tensor) -> Tensors:
        for name in ("", ".language", ".testing", ".runtime", ".runtime.jit", ".fb", ".fb.compat"):
            sys.modules.setdefault(f"triton{name}", MagicMock(__version__="3.3"))  # nothing of it computes on a CPU
        bare(*(".".join(FBGEMM[:count]) for count in range(1, 5)))
        made = importlib.import_module(".".join(FBGEMM)).quantize_fp8_row
        codes, scale = made._init_fn(w)  # the function under its registration, which wants a compiler
        return {"weight": codes, "weight_scale": scale.view(-1, 1)}

    return Library("fbgemm_gpu", replace(FORMS["FBGEMM"], make=make))


FBGEMM = ("fbgemm_gpu", "experimental", "gemm", "triton_gemm", "fp8_gemm")


def _modelopt(kind: str, **settings: Any) -> Library:
    def make(w: Tensor) -> Tensors:
        from modelopt.torch.quantization.qtensor import FP8QTensor

        if "axis" in settings:  # its export refuses rows of zeros
            settings["scales"] = w.abs().amax(1, keepdim=True).clamp(min=1e-9) / 448
        codes, scale = FP8QTensor.quantize(w, **settings)
        shape = scale.shape if "block_sizes" in settings else (-1,) if "axis" in settings else ()
        return {"weight": codes._quantized_data, "weight_scale": scale.reshape(shape)}

    def read(t: Tensors) -> Tensor:
        from modelopt.torch.quantization.qtensor import FP8QTensor

        scale = t["weight_scale"].view(-1, 1) if settings.get("axis") == 0 else t["weight_scale"]
        blocks = {key: value for key, value in settings.items() if key == "block_sizes"}
        return FP8QTensor(t["weight"].shape, torch.float32, t["weight"]).dequantize(scale=scale, **blocks)

    def half(t: Tensors, want: Tensor) -> Tensor:
        scale = t["weight_scale"].view(-1, 1) if settings.get("axis") == 0 else t["weight_scale"]
        return fp8_half(spread(scale, block=(128, 128) if "block_sizes" in settings else None), want)

    config = {"quant_method": "modelopt", "quant_algo": kind}
    return Library("modelopt", replace(FORMS["ModelOpt fp8"], make=make, read=read, half_step=half, config=config))


def _modelopt4() -> Library:
    def make(w: Tensor) -> Tensors:
        from modelopt.torch.quantization.qtensor import NVFP4QTensor

        codes, scale, whole = NVFP4QTensor.quantize(w, 16)
        return {"weight": codes._quantized_data, "weight_scale": scale.to(FP8), "weight_scale_2": whole.reshape(())}

    def read(t: Tensors) -> Tensor:
        from modelopt.torch.quantization.qtensor import NVFP4QTensor

        shape = torch.Size((len(t["weight"]), 2 * t["weight"].shape[1]))
        scales = {"scale": t["weight_scale"], "double_scale": t["weight_scale_2"]}
        return NVFP4QTensor(shape, torch.float32, t["weight"]).dequantize(**scales, block_sizes={-1: 16})

    return Library("modelopt", replace(FORMS["ModelOpt nvfp4"], make=make, read=read))


LIBRARIES: dict[str, Library] = {
    "bitsandbytes nf4": _bnb4("nf4", doubled=False),
    "bitsandbytes nf4 doubled": _bnb4("nf4", doubled=True),
    "bitsandbytes fp4": _bnb4("fp4", doubled=False),
    "bitsandbytes int8": _bnb8(),
    **{f"mlx {bits} bit": _mlx(bits) for bits in (2, 3, 4, 5, 6, 8)},
    **{f"mlx {mode}": _mlx(bits, mode, size) for mode, bits, size in (("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16))},
    **{f"GPTQ {bits} bit": _gptq(bits) for bits in (2, 3, 4, 8)},
    "GPTQ in another order": _gptq(4, ordered=True),
    "AWQ": _awq(),
    "AQLM": _aqlm(1, 9),
    "AQLM with two codebooks": _aqlm(2, 8),
    "FBGEMM": _fbgemm(),
    "ModelOpt fp8": _modelopt("FP8"),
    "ModelOpt fp8 rows": _modelopt("FP8_PER_CHANNEL_PER_TOKEN", axis=0),
    "ModelOpt fp8 blocks": _modelopt("FP8_PB_WO", block_sizes={-1: 128, -2: 128}),
    "ModelOpt nvfp4": _modelopt4(),
}  # fmt: skip
"""Row → its library. Of fbgemm-gpu only the making runs on a CPU."""


def stored() -> dict[str, Tensors]:
    """Row → the tensors of its layer, and what the library reads in `want`."""
    return layers_of(FILE)


def layers_of(file: Path) -> dict[str, Tensors]:
    """Row → the tensors of its layer, as a file of layers has them."""
    found: dict[str, Tensors] = {}
    for name, value in load_bytes(lzma.decompress(file.read_bytes())).items():
        row, _, last = name.partition("/")
        found.setdefault(row, {})[last] = value
    return found


def main() -> None:
    """Write the file of layers."""
    made: Tensors = {}
    for name, library in LIBRARIES.items():
        w = rand(32, 64, seed=len(made), scale=0.02)
        w[3, :32] = 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.files.quantised_forms.SHAPE", (32, 64))
            layer = library.form.make(w)
            layer["want"] = library.form.read(layer).float()
        off = (layer["want"] - w).norm() / w.norm()
        print(f"{name}: {off:.4f} from the weight")
        made |= {f"{name}/{last}": value.detach().clone().contiguous() for last, value in layer.items()}
    FILE.write_bytes(lzma.compress(save(made, {"made with": json.dumps(MADE_WITH)}), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    main()

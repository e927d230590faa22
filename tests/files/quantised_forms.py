"""Ways to store a quantised weight, by the libraries that write them: each makes a layer's tensors and reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..support import Tensors

SHAPE = (160, 192)
"""Ragged in every way: no multiple of 128 rows, 12 or 6 scales beside each other."""


@dataclass(frozen=True)
class Form:
    """One format. Its functions take a layer's tensors by their last names."""

    make: Callable[[Tensor], Tensors]
    read: Callable[[Tensors], Tensor]
    half_step: Callable[[Tensors, Tensor], Tensor]  # (tensors, wanted values) → half a step around each
    config: Mapping[str, Any] = field(default_factory=dict)
    note: Mapping[str, Any] | None = None  # the JSON of ComfyUI
    scale: str = "weight_scale"
    bad: tuple[float, ...] = (float("nan"), 0.0, -1.0)  # numbers that no scale may be
    decode_only: bool = False
    turn: Callable[[Tensor], Tensor] = lambda w: w
    slack: float = 0.0  # the library's own rounding when it reads, as a share of a number


def spread(scale: Tensor, shape: tuple[int, ...] = SHAPE, block: tuple[int, int] | None = None) -> Tensor:
    """One scale for each number."""
    scale = scale.double()
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(shape)
    scale = scale.reshape(-1, scale.shape[1]) if scale.dim() > 1 else scale.reshape(-1, 1)
    rows, cols = block or (-(-shape[0] // scale.shape[0]), -(-shape[1] // scale.shape[1]))
    return scale.repeat_interleave(rows, 0).repeat_interleave(cols, 1)[: shape[0], : shape[1]]


def fp8_half(scale: Tensor, want: Tensor) -> Tensor:
    power = 2.0 ** torch.floor(torch.log2((want.abs() / scale).clamp(min=2.0**-6)))
    return power * scale * 2.0**-4


def fp4_half(scale: Tensor, want: Tensor) -> Tensor:
    level = want.abs() / scale
    return scale * torch.where(level < 2, 0.25, torch.where(level < 4, 0.5, 1.0))


def comfy(layout: str, form: str, half: Callable[[Tensors, Tensor], Tensor], **more: Any) -> Form:
    options = more.pop("options", {})

    def make(w: Tensor) -> Tensors:
        import comfy_kitchen.tensor as kitchen

        codes, params = getattr(kitchen, layout).quantize(w, **more)
        found = {"weight": codes, "weight_scale": params.scale}
        if hasattr(params, "block_scale"):
            found = {"weight": codes, "weight_scale": params.block_scale, "weight_scale_2": params.scale}
        return found

    def read(t: Tensors) -> Tensor:
        import comfy_kitchen.tensor as kitchen

        kind = getattr(kitchen, layout)
        settings: dict[str, Any] = {"scale": t["weight_scale"], "orig_dtype": torch.float32, "orig_shape": SHAPE}
        if "weight_scale_2" in t:
            settings |= {"scale": t["weight_scale_2"], "block_scale": t["weight_scale"]}
        if options.get("convrot"):
            settings |= {"convrot": True, "convrot_groupsize": options["convrot_groupsize"]}
        return kind.dequantize(t["weight"], kind.Params(**settings)).reshape(SHAPE)

    return Form(make, read, half, note={"format": form, **options})


def _tiles(scale: Tensor, cols: int) -> Tensor:
    from comfy_kitchen.float_utils import from_blocked

    rows = -(-SHAPE[0] // 128) * 128
    return from_blocked(scale, num_rows=rows, num_cols=-(-cols // 4) * 4)[: SHAPE[0], :cols]


def _e8m0(raw: Tensor) -> Tensor:
    return 2.0 ** (raw.view(torch.uint8).double() - 127)


def blocks(dtype: torch.dtype, *, powers: bool = False) -> Form:
    """Fine-grained fp8."""

    def make(w: Tensor) -> Tensors:
        from torch.nn.functional import pad

        rows, cols = -(-SHAPE[0] // 128), -(-SHAPE[1] // 128)
        whole = pad(w, (0, cols * 128 - SHAPE[1], 0, rows * 128 - SHAPE[0])).view(rows, 128, cols, 128)
        scale = whole.abs().amax((1, 3)) / 448
        scale = 2 ** torch.ceil(torch.log2(scale)) if powers else scale
        scale = scale.to(dtype)
        codes = (w / spread(scale, block=(128, 128)).float()).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale_inv": scale}

    def read(t: Tensors) -> Tensor:
        return t["weight"].float() * spread(t["weight_scale_inv"], block=(128, 128)).float()

    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    return Form(
        make, read, lambda t, w: fp8_half(spread(t["weight_scale_inv"], block=(128, 128)), w),
        {**config, **({"scale_fmt": "ue8m0"} if powers else {})}, scale="weight_scale_inv",
    )  # fmt: skip


def compressed(form: str, half: Callable[[Tensors, Tensor], Tensor], **args: Any) -> Form:
    """A scheme of compressed-tensors; `args` are those of its weights."""

    def scheme() -> Any:
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))

    def make(w: Tensor) -> Tensors:
        from compressed_tensors.quantization.utils import calculate_qparams

        weights, extra = scheme().weights, {}
        size = args.get("group_size") or SHAPE[1]
        groups = w.reshape(SHAPE[0], -1, size) if args["strategy"] != "tensor" else w.reshape(1, 1, -1)
        if form.startswith("nvfp4"):
            extra["weight_global_scale"] = (448 * 6 / w.abs().max()).reshape(1)
        low, high = groups.amin(2), groups.amax(2)
        scale, zero = calculate_qparams(low, high, weights, global_scale=extra.get("weight_global_scale"))
        found = {"weight": w, "weight_scale": scale, "weight_zero_point": zero, **extra}
        made = _compressor(form).compress(found, scheme())
        if weights.symmetric:
            made.pop("weight_zero_point", None)
        return {k: v.detach().clone() for k, v in made.items() if v is not None}

    def read(t: Tensors) -> Tensor:
        wide = dict(t)
        if not form.startswith(("nv", "mx")):
            wide["weight_scale"] = t["weight_scale"].float()
        found = _compressor(form).decompress(wide, scheme())["weight"]
        assert found is not None
        return found.detach().float().reshape(SHAPE)

    told = {key: value for key, value in args.items() if key != "scale_dtype"}
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **told}}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return Form(make, read, half, config, slack=2.0**-6 if form.startswith(("nv", "mx")) else 0.0)


def _compressor(form: str) -> Any:
    from compressed_tensors.compressors import BaseCompressor

    return BaseCompressor.get_value_from_registry(form)


def rows(dtype: torch.dtype, limit: float, last: str, kind: torch.dtype = torch.float32) -> Callable[[Tensor], Tensors]:
    def make(w: Tensor) -> Tensors:
        scale = (w.abs().amax(1, keepdim=True) / limit).to(kind)
        levels = w / scale.float()
        return {"weight": (levels if dtype.is_floating_point else levels.round()).to(dtype), last: scale}

    return make


def _times(last: str) -> Callable[[Tensors], Tensor]:
    return lambda t: t["weight"].float() * spread(t[last]).float()


def _fp8(last: str = "weight_scale") -> Callable[[Tensors, Tensor], Tensor]:
    return lambda t, w: fp8_half(spread(t[last]), w)


def _int(t: Tensors, _: Tensor) -> Tensor:
    return spread(t["weight_scale"]) / 2


def _musubi(w: Tensor) -> Tensors:
    groups = w.view(SHAPE[0], -1, 64)
    scale = (groups.abs().amax(2, keepdim=True).clamp(min=448e-8) / 448).bfloat16()
    return {"weight": (groups / scale.float()).to(torch.float8_e4m3fn).view(SHAPE), "scale_weight": scale}


def _hadamard(size: int) -> Callable[[Tensor], Tensor]:
    def turn(w: Tensor) -> Tensor:
        four = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]).double() / 2
        whole = torch.ones(1, 1).double()
        while len(whole) < size:
            whole = torch.kron(whole, four)
        return (w.double().view(-1, size) @ whole).view(w.shape)

    return turn


def _convrot() -> Form:
    rotated = comfy(
        "TensorWiseINT8Layout", "int8_tensorwise", _int, options={"convrot": True, "convrot_groupsize": 64},
        per_channel=True, convrot=True, convrot_groupsize=64,
    )  # fmt: skip
    return Form(rotated.make, rotated.read, rotated.half_step, note=rotated.note, turn=_hadamard(64))


FP8 = torch.float8_e4m3fn
FORMS: dict[str, Form] = {
    "ComfyUI fp8 rows": Form(rows(FP8, 448, "weight_scale"), _times("weight_scale"), _fp8(), note={"format": "float8_e4m3fn"}),
    "ComfyUI int8": comfy("TensorWiseINT8Layout", "int8_tensorwise", _int),
    "ComfyUI int8 rows": comfy("TensorWiseINT8Layout", "int8_tensorwise", _int, per_channel=True),
    "ComfyUI int8 rotated": _convrot(),
    "ComfyUI mxfp8": comfy("TensorCoreMXFP8Layout", "mxfp8", lambda t, w: fp8_half(spread(_e8m0(_tiles(t["weight_scale"], 6))), w)),
    "ComfyUI nvfp4": comfy(
        "TensorCoreNVFP4Layout", "nvfp4",
        lambda t, w: fp4_half(spread(_tiles(t["weight_scale"], 12).float()) * t["weight_scale_2"].double(), w),
    ),
    "block fp8": blocks(torch.float32),
    "block fp8, bf16 scales": blocks(torch.bfloat16),
    "block fp8, ue8m0": blocks(torch.float32, powers=True),
    "compressed-tensors fp8": compressed("float-quantized", _fp8(), num_bits=8, type="float", strategy="channel"),
    "compressed-tensors fp8 groups": compressed(
        "float-quantized", _fp8(), num_bits=8, type="float", strategy="group", group_size=64
    ),
    "compressed-tensors int8": compressed("int-quantized", _int, num_bits=8, type="int", strategy="channel"),
    "compressed-tensors int8 with zero points": compressed(
        "int-quantized", _int, num_bits=8, type="int", strategy="channel", symmetric=False
    ),
    "compressed-tensors int4": compressed("pack-quantized", _int, num_bits=4, type="int", strategy="group", group_size=64),
    "compressed-tensors int4 with zero points": compressed(
        "pack-quantized", _int, num_bits=4, type="int", strategy="group", group_size=32, symmetric=False
    ),
    "compressed-tensors int8 packed": compressed("pack-quantized", _int, num_bits=8, type="int", strategy="channel"),
    "compressed-tensors nvfp4": compressed(
        "nvfp4-pack-quantized",
        lambda t, w: fp4_half(spread(t["weight_scale"].float()) / t["weight_global_scale"].double(), w),
        num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=FP8,
    ),
    "compressed-tensors mxfp4": compressed(
        "mxfp4-pack-quantized", lambda t, w: fp4_half(spread(_e8m0(t["weight_scale"])), w),
        num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8,
    ),
    "FBGEMM": Form(rows(FP8, 448, "weight_scale"), _times("weight_scale"), _fp8(), {"quant_method": "fbgemm_fp8"}),
    "ModelOpt fp8": Form(
        lambda w: {"weight": (w * (448 / w.abs().max())).to(FP8), "weight_scale": w.abs().max() / 448},
        _times("weight_scale"), _fp8(), {"quant_method": "modelopt", "quant_algo": "FP8"},
    ),
    "musubi groups": Form(_musubi, _times("scale_weight"), _fp8("scale_weight"), scale="scale_weight"),
    "lightx2v int8": Form(rows(torch.int8, 127, "weight_scale"), _times("weight_scale"), _int),
}  # fmt: skip


def note(form: Form) -> Tensors:
    """The mark of a layer of ComfyUI."""
    if form.note is None:
        return {}
    return {"comfy_quant": torch.tensor(list(json.dumps(form.note).encode()), dtype=torch.uint8)}

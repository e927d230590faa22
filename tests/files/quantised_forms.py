"""Ways to store a quantised weight, by the libraries that write them: each makes a layer's tensors and reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tests.kit.tensors import Tensors

SHAPE = (160, 192)
"""Ragged in every way: no multiple of 128 rows, 12 or 6 scales beside each other. Tests set others."""


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


def spread(scale: Tensor, block: tuple[int, int] | None = None) -> Tensor:
    """One scale for each number."""
    scale, shape = scale.double(), SHAPE
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
        settings |= {name: value for name, value in options.items() if name.startswith("convrot")}
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


def of_transformers(size: tuple[int, int] | None, dtype: torch.dtype) -> Form:
    """fp8 as transformers reads it for its backward pass: a scale for each block, or for the weight; bytes are powers
    of two."""
    powers = dtype == torch.uint8

    def make(w: Tensor) -> Tensors:
        if size is None:
            scale = (w.abs().max() / 448).to(dtype)
            return {"weight": (w / scale.float()).to(FP8), "weight_scale_inv": scale}
        blocks = w.view(SHAPE[0] // size[0], size[0], SHAPE[1] // size[1], size[1])
        power = torch.ceil(torch.log2(blocks.abs().amax((1, 3)).clamp(min=2.0**-100) / 448))
        return {
            "weight": (w / spread(2**power, block=size).float()).to(FP8),
            "weight_scale_inv": (power + 127).to(dtype),
        }

    def scales(t: Tensors) -> Tensor:
        return _e8m0(t["weight_scale_inv"]) if powers else t["weight_scale_inv"].double()

    def read(t: Tensors) -> Tensor:
        from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

        return _dequantize_fp8_weight(t["weight"], scales(t), list(size) if size else None, torch.float64)

    config = {"quant_method": "fp8", "activation_scheme": "dynamic" if size else "static"}
    config |= {"weight_block_size": list(size) if size else None}  # type: ignore[dict-item]
    config |= {"scale_fmt": "ue8m0"} if powers else {}
    return Form(make, read, lambda t, w: fp8_half(spread(scales(t), size), w), config, scale="weight_scale_inv")


def tiled() -> Form:
    """Blocks of 128 by 128 without a configuration."""
    of, last = blocks(torch.float32), "weight_scale"

    def named(t: Tensors) -> Tensors:
        return {"weight": t["weight"], "weight_scale_inv": t[last]}

    def make(w: Tensor) -> Tensors:
        found = of.make(w)
        return {"weight": found["weight"], last: found["weight_scale_inv"]}

    return Form(make, lambda t: of.read(named(t)), lambda t, w: of.half_step(named(t), w))


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

    told = {key: str(value) if key == "scale_dtype" else value for key, value in args.items()}
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **told}, "format": form}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return Form(make, read, half, config, slack=2.0**-6 if form.startswith(("nv", "mx")) else 0.0)


def in_whole_words(bits: int) -> Form:
    """compressed-tensors before dense packing: no code lies in two words."""
    dense, each = (
        compressed("pack-quantized", _int, num_bits=bits, type="int", strategy="group", group_size=64),
        32 // bits,
    )
    shifts = bits * torch.arange(each)

    def make(w: Tensor) -> Tensors:
        from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

        found = dense.make(w)
        codes = unpack_from_int32(found["weight_packed"], bits, torch.Size(SHAPE)).long() + 2 ** (bits - 1)
        padded = torch.nn.functional.pad(codes, (0, -SHAPE[1] % each)).view(SHAPE[0], -1, each)
        return {**found, "weight_packed": (padded << shifts).sum(2).to(torch.int32)}

    def read(t: Tensors) -> Tensor:
        codes = (t["weight_packed"][:, :, None].long() >> shifts & (2**bits - 1)).flatten(1)[:, : SHAPE[1]]
        return (codes - 2 ** (bits - 1)).float() * spread(t["weight_scale"]).float()

    return Form(make, read, _int, dense.config)


def _compressor(form: str) -> Any:
    from compressed_tensors.compressors import BaseCompressor

    return BaseCompressor.get_value_from_registry(form)


def rows(
    dtype: torch.dtype, limit: float, last: str, kind: torch.dtype = torch.float32, codes: str = "weight"
) -> Callable[[Tensor], Tensors]:
    def make(w: Tensor) -> Tensors:
        scale = (w.abs().amax(1, keepdim=True).clamp(min=1e-30) / limit).to(kind)
        levels = w / scale.float()
        return {codes: (levels if dtype.is_floating_point else levels.round()).to(dtype), last: scale}

    return make


def _times(last: str) -> Callable[[Tensors], Tensor]:
    return lambda t: t["weight"].float() * spread(t[last]).float()


def _fp8(last: str = "weight_scale") -> Callable[[Tensors, Tensor], Tensor]:
    return lambda t, w: fp8_half(spread(t[last]), w)


def _int(t: Tensors, _: Tensor) -> Tensor:
    return spread(t["weight_scale"]) / 2


def modelopt(*, pre: bool = False) -> Form:
    """ModelOpt's nvfp4: compressed-tensors' with the inverse scale of the weight; `pre`: inputs are multiplied first."""
    of = compressed(
        "nvfp4-pack-quantized", lambda t, w: w, num_bits=4, type="float", strategy="tensor_group", group_size=16,
        scale_dtype=FP8,
    )  # fmt: skip

    def factors() -> Tensor:
        return (1 + torch.arange(SHAPE[1]) % 7 / 4).bfloat16()

    def make(w: Tensor) -> Tensors:
        found = of.make(w / factors() if pre else w)
        made = {"weight": found["weight_packed"], "weight_scale": found["weight_scale"]}
        made["weight_scale_2"] = 1 / found["weight_global_scale"].reshape(())
        return {**made, **({"pre_quant_scale": factors()} if pre else {})}

    def grid(t: Tensors) -> Tensor:
        scale = spread(t["weight_scale"].float()) * t["weight_scale_2"].double()
        return scale * t["pre_quant_scale"].double() if pre else scale

    def read(t: Tensors) -> Tensor:
        codes = torch.stack([t["weight"] & 15, t["weight"] >> 4], -1).view(SHAPE).int()
        return torch.tensor(_E2M1).double()[codes] * grid(t)

    config = {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ" if pre else "NVFP4"}
    return Form(make, read, lambda t, w: fp4_half(grid(t), w), config)


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


def _convrot(layout: str, form: str, options: dict[str, Any], **more: Any) -> Form:
    rotated = comfy(layout, form, _int, options=options, convrot_groupsize=64, **more)
    return Form(rotated.make, rotated.read, rotated.half_step, note=rotated.note, turn=_hadamard(64))


NF4 = [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0, 0.0795803, 0.1609302,
       0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0]  # fmt: skip
"""Dettmers et al. 2023, arXiv:2305.14314, appendix E, to seven digits."""
FP4 = [0.0, 0.0052083, 0.6666667, 1.0, 0.3333333, 0.5, 0.1666667, 0.25]


def _dynamic() -> Tensor:
    """A map of 256 numbers with more of them near zero, as double quantisation has it."""
    half = torch.cat([torch.linspace(0.1, 1.0, 2**n + 1)[1:] * 10.0 ** (n - 6) for n in range(7)])
    return torch.cat([-half, torch.zeros(1), half, torch.ones(1)]).sort().values


def bnb(kind: str, *, doubled: bool) -> Form:
    """4-bit weights by bitsandbytes' formula."""
    table = torch.tensor(NF4 if kind == "nf4" else [*FP4, *(-x for x in FP4)])

    def make(w: Tensor) -> Tensors:
        flat = w.reshape(-1, 64)
        scale = flat.abs().amax(1)
        codes = (flat[:, :, None] / scale.clamp(min=1e-30)[:, None, None] - table).abs().argmin(2).to(torch.uint8)
        state: dict[str, object] = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": list(w.shape)}
        found = {"absmax": scale, "quant_map": table}
        if doubled:
            offset = float(scale.mean())
            outer = torch.nn.functional.pad(scale - offset, (0, -len(scale) % 256)).view(-1, 256)
            top = outer.abs().amax(1)
            near = (outer[:, :, None] / top[:, None, None] - _dynamic()).abs().argmin(2).to(torch.uint8)
            found |= {"absmax": near.reshape(-1)[: len(scale)], "nested_absmax": top, "nested_quant_map": _dynamic()}
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        found[f"quant_state.bitsandbytes__{kind}"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        pairs = codes.reshape(-1, 2)
        packed = (pairs[:, 0] << 4 | pairs[:, 1]).unsqueeze(1)
        return {"weight": packed, **{f"weight.{last}": value for last, value in found.items()}}

    def scales(t: Tensors) -> Tensor:
        absmax = t["weight.absmax"]
        if doubled:
            state = json.loads(bytes(t[f"weight.quant_state.bitsandbytes__{kind}"].tolist()))
            outer = t["weight.nested_absmax"].repeat_interleave(256)[: len(absmax)]
            absmax = t["weight.nested_quant_map"][absmax.int()] * outer + state["nested_offset"]
        return absmax.repeat_interleave(64).view(SHAPE)

    def read(t: Tensors) -> Tensor:
        codes = torch.stack([t["weight"] >> 4, t["weight"] & 15], -1).view(SHAPE).int()
        return t["weight.quant_map"][codes] * scales(t)

    def half(t: Tensors, want: Tensor) -> Tensor:
        scale = scales(t).double()
        ordered = table.double().unique()
        gaps = torch.cat([ordered[1:2] - ordered[:1], ordered.diff(), ordered[-1:] - ordered[-2:-1]])
        return gaps[torch.bucketize(want / torch.where(scale == 0, 1e-30, scale), ordered)] * scale.abs() / 2

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return Form(make, read, half, config, scale="weight.absmax" if not doubled else "weight.nested_absmax")


def _bnb8(w: Tensor) -> Tensors:
    scale = w.abs().amax(1)
    codes = (w * 127 / scale[:, None]).round().to(torch.int8)
    return {"weight": codes, "SCB": scale, "weight_format": torch.tensor(0, dtype=torch.uint8)}


def _gptq(w: Tensor) -> Tensors:
    low, high = (getattr(w.view(SHAPE[0], -1, 64), f)(2) for f in ("amin", "amax"))
    scale = ((high - low) / 15).half()
    zero = (-low / scale.float()).round().clamp(1, 15).int()
    levels = (w / spread(scale).float() + spread(zero)).round().clamp(0, 15).int()
    order = torch.arange(SHAPE[1]) // 64
    columns = levels.t().reshape(-1, 8, SHAPE[0])
    words = sum(columns[:, i].to(torch.int64) << 4 * i for i in range(8)).to(torch.int32)
    zeros = (zero - 1).t().reshape(SHAPE[1] // 64, -1, 8)
    packed = sum(zeros[:, :, i].to(torch.int64) << 4 * i for i in range(8)).to(torch.int32)
    return {"qweight": words, "qzeros": packed, "scales": scale.t().contiguous(), "g_idx": order.int()}


def _read_gptq(t: Tensors) -> Tensor:
    shifts = 4 * torch.arange(8)
    levels = (t["qweight"][:, None, :] >> shifts[None, :, None]) & 15
    zeros = ((t["qzeros"][:, :, None] >> shifts) & 15).flatten(1) + 1
    group = t["g_idx"].long()
    return ((levels.flatten(0, 1) - zeros[group]) * t["scales"].float()[group]).t()


AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def _gptq3(w: Tensor) -> Tensors:
    """auto-gptq's 3 bits: 32 codes in three words, one after the other."""
    scale = (w.view(SHAPE[0], -1, 64).abs().amax(2) / 3).clamp(min=1e-7).half()
    levels = (w / spread(scale).float() + 4).round().clamp(0, 7).int().t()
    words = _stream(levels)
    zeros = _stream(torch.full((SHAPE[0], SHAPE[1] // 64), 3)).t().contiguous()
    return {"qweight": words, "qzeros": zeros, "scales": scale.t().contiguous()}


def _stream(codes: Tensor) -> Tensor:
    """Codes of 3 bits, packed along the first axis; the words of a column as one whole number of Python."""
    columns = [sum(code << 3 * i for i, code in enumerate(column)) for column in codes.t().tolist()]
    raw = b"".join(column.to_bytes(len(codes) * 3 // 8, "little") for column in columns)
    return torch.frombuffer(bytearray(raw), dtype=torch.int32).view(codes.shape[1], -1).t().contiguous()


def _read_gptq3(t: Tensors) -> Tensor:
    rows = t["qweight"].t().contiguous().view(torch.uint8).tolist()
    whole = [int.from_bytes(bytes(row), "little") for row in rows]
    levels = torch.tensor([[number >> 3 * i & 7 for i in range(SHAPE[1])] for number in whole])
    return (levels - 4) * spread(t["scales"].t()).float()


def _awq(w: Tensor) -> Tensors:
    made = _gptq(w)
    levels = ((made["qweight"][:, None, :] >> (4 * torch.arange(8))[None, :, None]) & 15).flatten(0, 1)
    zeros = ((made["qzeros"][:, :, None] >> 4 * torch.arange(8)) & 15).flatten(1) + 1
    packed = []
    for numbers in (levels, zeros):
        eights = numbers.reshape(len(numbers), -1, 8)[:, :, AWQ_ORDER].to(torch.int64)
        packed.append(sum(eights[:, :, i] << 4 * i for i in range(8)).to(torch.int32))
    return {"qweight": packed[0], "qzeros": packed[1], "scales": made["scales"]}


def _read_awq(t: Tensors) -> Tensor:
    def unpacked(words: Tensor) -> Tensor:
        found = (words[:, :, None] >> 4 * torch.arange(8)) & 15
        out = torch.empty_like(found)
        out[:, :, AWQ_ORDER] = found
        return out.flatten(1)

    group = torch.arange(SHAPE[1]) // (SHAPE[1] // len(t["scales"]))
    return ((unpacked(t["qweight"]) - unpacked(t["qzeros"])[group]) * t["scales"].float()[group]).t()


def mlx(bits: int, dtype: torch.dtype, size: int = 64) -> Form:
    """mlx's mode affine, by its formula; the codes of a row as one whole number of Python."""
    most = 2**bits - 1

    def make(w: Tensor) -> Tensors:
        groups = w.view(SHAPE[0], -1, size)
        low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
        scale = ((high - low) / most).clamp(min=1e-7)
        below = low.abs() > high.abs()
        edge, scale = torch.where(below, low, high), torch.where(below, scale, -scale)
        zero = (edge / scale).round()
        scale = torch.where(zero != 0, edge / zero, scale)
        bias = torch.where(zero != 0, edge, 0)
        codes = ((groups - bias) / scale).round().clamp(0, most).int().view(SHAPE)
        rows = [sum(code << bits * i for i, code in enumerate(row)) for row in codes.tolist()]
        raw = b"".join(row.to_bytes(SHAPE[1] * bits // 8, "little") for row in rows)
        words = torch.frombuffer(bytearray(raw), dtype=torch.uint32).view(SHAPE[0], -1)
        return {"weight": words, "scales": scale.to(dtype).squeeze(2), "biases": bias.to(dtype).squeeze(2)}

    def read(t: Tensors) -> Tensor:
        rows = [int.from_bytes(bytes(row.numpy().tobytes()), "little") for row in t["weight"]]
        codes = torch.tensor([[row >> bits * i & most for i in range(SHAPE[1])] for row in rows])
        return codes.float() * spread(t["scales"]).float() + spread(t["biases"]).float()

    config = {"group_size": size, "bits": bits}
    return Form(
        make, read, lambda t, _: spread(t["scales"]).abs() / 2, config, scale="scales", bad=(float("nan"), float("inf"))
    )


def mlx_floats(mode: str, size: int) -> Form:
    """mlx's modes without biases, in its own powers of two and e4m3; `size` columns have one scale."""
    bits, limit = (8, 448.0) if mode == "mxfp8" else (4, 6.0)

    def spread_scales(raw: Tensor) -> Tensor:
        return spread(raw.view(FP8).double() if mode == "nvfp4" else _e8m0(raw))

    def make(w: Tensor) -> Tensors:
        wanted = (w.view(SHAPE[0], -1, size).abs().amax(2) / limit).clamp(min=2.0**-100)
        scale = wanted.clamp(min=2.0**-9).to(FP8).view(torch.uint8) if mode == "nvfp4" else (
            (torch.log2(wanted).round() + 127).to(torch.uint8)
        )  # fmt: skip
        levels = w.double() / spread_scales(scale)
        if bits == 8:
            codes = levels.clamp(-448, 448).float().to(FP8).view(torch.uint8)
        else:
            near = (levels[:, :, None] - torch.tensor(_E2M1).double()).abs().argmin(2).to(torch.uint8).view(-1, 2)
            codes = (near[:, 0] | near[:, 1] << 4).view(SHAPE[0], -1)
        return {"weight": codes.contiguous().view(torch.uint32), "scales": scale}

    def read(t: Tensors) -> Tensor:
        raw = t["weight"].view(torch.uint8)
        if bits == 8:
            levels = raw.view(FP8).double()
        else:
            levels = torch.tensor(_E2M1).double()[torch.stack([raw & 15, raw >> 4], -1).view(SHAPE).int()]
        return levels * spread_scales(t["scales"])

    half = fp8_half if bits == 8 else fp4_half
    return Form(
        make, read, lambda t, w: half(spread_scales(t["scales"]), w),
        {"group_size": size, "bits": bits, "mode": mode}, scale="scales",
    )  # fmt: skip


_E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def sdnq(kind: str) -> Form:
    """SDNQ in groups of 32 columns, by its formula, which its library confirms (test_other_formats)."""
    bits, signed = int(kind.removeprefix("u").removeprefix("int")), kind.startswith("int")
    most, lowest = 2 ** (bits - 1) - 1 if signed else 2**bits - 1, -(2 ** (bits - 1)) if signed else 0

    def make(w: Tensor) -> Tensors:
        groups = w.view(SHAPE[0], -1, 32)
        low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
        scale = groups.abs().amax(2, keepdim=True) / most if signed else (high - low) / most
        levels = (groups if signed else groups - low) / torch.where(scale > 0, scale, 1)
        codes = levels.round().clamp(lowest, most).to(torch.int8 if kind == "int8" else torch.uint8)
        if bits == 4:
            codes = ((levels.round().clamp(lowest, most) - lowest).to(torch.uint8)).view(-1, 2)
            codes = codes[:, 0] | codes[:, 1] << 4
        return {"weight": codes, "scale": scale, **({} if signed else {"zero_point": low})}

    def read(t: Tensors) -> Tensor:
        codes = t["weight"]
        if bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], -1)
        levels = codes.float() + (lowest if bits == 4 else 0)
        return (levels.view(SHAPE[0], -1, 32) * t["scale"] + t.get("zero_point", torch.zeros(1))).view(SHAPE)

    config = {"quant_method": "sdnq", "weights_dtype": kind, "group_size": 32}
    return Form(make, read, lambda t, _: spread(t["scale"].squeeze(2)).abs() / 2, config, scale="scale")


def low_rank() -> Form:
    """SDNQ's uint4 of what a product of two factors leaves."""
    of = sdnq("uint4")

    def factors() -> Tensors:
        up, down = (torch.linspace(-1, 1, n * 2).sin().reshape(n, 2) for n in SHAPE)
        return {"svd_up": (0.01 * up).bfloat16(), "svd_down": down.t().contiguous().bfloat16()}

    def product(t: Tensors) -> Tensor:
        return t["svd_up"].float() @ t["svd_down"].float()

    return Form(
        lambda w: of.make(w - product(factors())) | factors(), lambda t: of.read(t) + product(t), of.half_step,
        {**of.config, "use_svd": True, "svd_rank": 2}, scale="scale", bad=of.bad,
    )  # fmt: skip


def grouped(bits: int) -> Form:
    """ComfyUI's asym_w4a8_int8, of 4 bits with a table of levels, and of 6 without one."""
    layout, options = "AsymW4A8Int8Layout", {"group_size": 16, "convrot_groupsize": 64}

    def make(w: Tensor) -> Tensors:
        import comfy_kitchen.tensor as kitchen

        codes, params = getattr(kitchen, layout).quantize(w, bits=bits, scale_search=False, **options)
        found = {"weight": codes, "weight_s_rel": params.scale, "weight_s_channel": params.s_channel}
        return found if params.codebook is None else {**found, "weight_codebook": params.codebook}

    def read(t: Tensors) -> Tensor:
        import comfy_kitchen.tensor as kitchen

        kind = getattr(kitchen, layout)
        settings = {"codebook": t.get("weight_codebook"), "orig_dtype": torch.float32, "orig_shape": SHAPE, **options}
        return kind.dequantize(
            t["weight"], kind.Params(scale=t["weight_s_rel"], s_channel=t["weight_s_channel"], **settings)
        )

    return Form(
        make, read, _int, note={"format": "asym_w4a8_int8", **options}, scale="weight_s_rel", decode_only=True
    )  # fmt: skip


def _columns(w: Tensor) -> Tensors:
    """ComfyUI's awq_w4a16, by its formula: its library only reads it."""
    groups = w.view(SHAPE[0], -1, 64)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    scale = ((high - low) / 15).clamp(min=1e-30)
    codes = ((groups - low) / scale).round().clamp(0, 15).to(torch.uint8).view(SHAPE[0], -1, 2)
    sides = [t.squeeze(2).t().contiguous().bfloat16() for t in (scale, low + 8 * scale)]
    return {
        "weight": (codes[:, :, 0] | codes[:, :, 1] << 4).view(torch.int8),
        "weight_scale": sides[0],
        "weight_zeros": sides[1],
    }


def _read_columns(t: Tensors) -> Tensor:
    import comfy_kitchen.tensor as kitchen

    kind = kitchen.TensorCoreAWQW4A16Layout
    settings = {"zeros": t["weight_zeros"].float(), "orig_dtype": torch.float32, "orig_shape": SHAPE, "group_size": 64}
    return kind.dequantize(t["weight"], kind.Params(scale=t["weight_scale"].float(), **settings))


def aqlm(books: int, dtype: torch.dtype) -> Form:
    """AQLM with codebooks of 256 entries, by its formula."""

    def make(w: Tensor) -> Tensors:
        random = torch.Generator().manual_seed(0)
        codes = torch.randint(0, 256, (SHAPE[0], SHAPE[1] // 8, books), generator=random)
        book = torch.randn(books, 256, 1, 8, generator=random).half()
        signed = codes.to(dtype) if dtype == torch.int16 else (codes - 256 * (codes > 127)).to(dtype)
        return {"codes": signed, "codebooks": book, "scales": w.abs().amax(1).view(-1, 1, 1, 1).half()}

    def read(t: Tensors) -> Tensor:
        entries = t["codebooks"].shape[1]
        rows = [[sum(t["codebooks"][n, c % entries, 0].float() for n, c in enumerate(place)) for place in row]
                for row in t["codes"].tolist()]  # fmt: skip
        return torch.stack([torch.cat(row) for row in rows]) * t["scales"].float().view(-1, 1)

    return Form(make, read, _int, {"quant_method": "aqlm"}, scale="scales", decode_only=True)


FP8 = torch.float8_e4m3fn
FORMS: dict[str, Form] = {
    "ComfyUI fp8 rows": Form(rows(FP8, 448, "weight_scale"), _times("weight_scale"), _fp8(), note={"format": "float8_e4m3fn"}),
    "ComfyUI fp8, bf16 scales": Form(
        rows(FP8, 448, "weight_scale", torch.bfloat16), _times("weight_scale"), _fp8(), note={"format": "float8_e4m3fn"}
    ),
    "ComfyUI int8": comfy("TensorWiseINT8Layout", "int8_tensorwise", _int),
    "ComfyUI int8 rows": comfy("TensorWiseINT8Layout", "int8_tensorwise", _int, per_channel=True),
    "ComfyUI int8 rotated": _convrot(
        "TensorWiseINT8Layout", "int8_tensorwise", {"convrot": True, "convrot_groupsize": 64}, per_channel=True, convrot=True
    ),
    "ComfyUI int4 rotated": _convrot("TensorCoreConvRotW4A4Layout", "convrot_w4a4", {"convrot_groupsize": 64}),
    "ComfyUI mxfp8": comfy("TensorCoreMXFP8Layout", "mxfp8", lambda t, w: fp8_half(spread(_e8m0(_tiles(t["weight_scale"], SHAPE[1] // 32))), w)),
    "ComfyUI nvfp4": comfy(
        "TensorCoreNVFP4Layout", "nvfp4",
        lambda t, w: fp4_half(spread(_tiles(t["weight_scale"], SHAPE[1] // 16).float()) * t["weight_scale_2"].double(), w),
    ),
    "block fp8": blocks(torch.float32),
    "block fp8, bf16 scales": blocks(torch.bfloat16),
    "block fp8, ue8m0": blocks(torch.float32, powers=True),
    "fp8 with one scale": of_transformers(None, torch.bfloat16),
    "fp8 of rows in blocks, powers in bytes": of_transformers((1, 32), torch.uint8),
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
    "compressed-tensors int3": compressed("pack-quantized", _int, num_bits=3, type="int", strategy="group", group_size=64),
    "compressed-tensors int5 with zero points": compressed(
        "pack-quantized", _int, num_bits=5, type="int", strategy="group", group_size=32, symmetric=False
    ),
    "compressed-tensors int6 with zero points": compressed(
        "pack-quantized", _int, num_bits=6, type="int", strategy="channel", symmetric=False
    ),
    "compressed-tensors int5 of older releases": in_whole_words(5),
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
    "compressed-tensors mxfp8": compressed(
        "mxfp8-quantized", lambda t, w: fp8_half(spread(_e8m0(t["weight_scale"])), w),
        num_bits=8, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8,
    ),
    "FBGEMM": Form(rows(FP8, 448, "weight_scale"), _times("weight_scale"), _fp8(), {"quant_method": "fbgemm_fp8"}),
    "ModelOpt fp8": Form(
        lambda w: {"weight": (w * (448 / w.abs().max())).to(FP8), "weight_scale": w.abs().max() / 448},
        _times("weight_scale"), _fp8(), {"quant_method": "modelopt", "quant_algo": "FP8"},
    ),
    "ModelOpt mxfp8": replace(
        compressed("mxfp8-quantized", lambda t, w: fp8_half(spread(_e8m0(t["weight_scale"])), w), num_bits=8, type="float",
                   strategy="group", group_size=32, scale_dtype=torch.uint8),
        config={"quant_method": "modelopt", "quant_algo": "MXFP8"},
    ),
    "ModelOpt nvfp4": modelopt(),
    "ModelOpt nvfp4 with factors of inputs": modelopt(pre=True),
    "musubi groups": Form(_musubi, _times("scale_weight"), _fp8("scale_weight"), scale="scale_weight"),
    "fp8 rows without a mark": Form(
        lambda w: {key: t.reshape(t.shape[:1]) if key == "weight_scale" else t for key, t in rows(FP8, 448, "weight_scale")(w).items()},
        _times("weight_scale"), _fp8(),
    ),
    "fp8 without a mark": Form(
        lambda w: {"weight": (w * (448 / w.abs().max())).to(FP8), "weight_scale": w.abs().max() / 448}, _times("weight_scale"), _fp8(),
    ),
    "nvfp4 without a mark": replace(modelopt(), config={}),
    "lightx2v fp8 blocks": tiled(),
    "lightx2v int8": Form(rows(torch.int8, 127, "weight_scale"), _times("weight_scale"), _int),
    "bitsandbytes nf4": bnb("nf4", doubled=False),
    "bitsandbytes nf4 doubled": bnb("nf4", doubled=True),
    "bitsandbytes fp4": bnb("fp4", doubled=False),
    "bitsandbytes int8": Form(
        _bnb8, lambda t: t["weight"].float() * spread(t["SCB"]).float() / 127, lambda t, _: spread(t["SCB"]) / 254,
        {"quant_method": "bitsandbytes", "load_in_8bit": True}, scale="SCB",
    ),
    "mlx 4 bit": mlx(4, torch.bfloat16),
    "mlx 8 bit": mlx(8, torch.bfloat16),
    "mlx 3 bit": mlx(3, torch.float16, 32),
    "mlx mxfp4": mlx_floats("mxfp4", 32),
    "mlx mxfp8": mlx_floats("mxfp8", 32),
    "mlx nvfp4": mlx_floats("nvfp4", 16),
    "quanto int8": Form(
        rows(torch.int8, 127, "weight._scale", codes="weight._data"), lambda t: t["weight._data"].float() * t["weight._scale"].float(),
        lambda t, _: spread(t["weight._scale"]) / 2, {"quant_method": "quanto"}, scale="weight._scale",
    ),
    "SDNQ int4": sdnq("int4"),
    "SDNQ uint4": sdnq("uint4"),
    "SDNQ int8": sdnq("int8"),
    "SDNQ uint4 with a low-rank part": low_rank(),
    "GPTQ": Form(_gptq, _read_gptq, _int, {"quant_method": "gptq", "bits": 4}, scale="scales", decode_only=True),
    "GPTQ 3 bit of auto-round": Form(
        _gptq3, _read_gptq3, _int,
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 3}, scale="scales", decode_only=True,
    ),
    "ComfyUI asym_w4a8_int8": grouped(4),
    "ComfyUI asym_w4a8_int8 of 6 bits": grouped(6),
    "ComfyUI awq_w4a16": Form(_columns, _read_columns, _int, note={"format": "awq_w4a16", "group_size": 64}, decode_only=True),
    "AQLM": aqlm(1, torch.int16),
    "AQLM with two codebooks": aqlm(2, torch.int8),
    "AWQ": Form(_awq, _read_awq, _int, {"quant_method": "awq", "bits": 4, "version": "gemm"}, scale="scales", decode_only=True),
}  # fmt: skip


def note(form: Form) -> Tensors:
    """The mark of a layer of ComfyUI."""
    if form.note is None:
        return {}
    return {"comfy_quant": torch.tensor(list(json.dumps(form.note).encode()), dtype=torch.uint8)}

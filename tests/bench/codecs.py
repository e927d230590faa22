"""Codecs alone beside other libraries' quantisers, on one tensor: `python -m tests.bench.codecs [SIDE]` prints JSON.

One thread each. Measured is processor time, the best of some rounds, in ns for each number of the weight.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from lora_merge.dtypes import Memory, StoredTensor
from lora_merge.engine.tensors import parts_of, view_bytes
from lora_merge.engine.torch_preload import keep_freed_memory
from lora_merge.files.encodings.base import CODES, Packing
from lora_merge.files.formats.output import FILE_FORMATS, FOLDER_FORMATS
from lora_merge.files.gguf import encoding

Work = Callable[[], Any]
ROUNDS: Final = 7
GGUF: Final = ("Q8_0", "Q4_0", "Q4_K", "Q6_K")
KITCHEN: Final = {"fp8_scaled": "TensorCoreFP8Layout", "int8": "TensorWiseINT8Layout", "mxfp8": "TensorCoreMXFP8Layout",
                  "nvfp4": "TensorCoreNVFP4Layout"}  # fmt: skip


def cost(work: Work, count: int) -> float:
    """Return ns of processor time for each of `count` numbers."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.process_time()
        work()
        best = min(best, time.process_time() - began)
    return best * 1e9 / count


def fetch(info: StoredTensor) -> Tensor:
    """Return a tensor of zeros or constants, as a merge makes them."""
    assert isinstance(info.source, Memory)
    raw = bytearray(info.source.content()[info.offset : info.offset + info.nbytes])
    return view_bytes(memoryview(raw), info.dtype, info.shape)


def packings(side: int) -> Iterator[tuple[str, Packing]]:
    """Yield how our formats store a matrix of that side."""
    info = StoredTensor("l.weight", "BF16", (side, side), Path("none"), 0, side * side * 2)
    for name, form in {**FILE_FORMATS, **{n: FOLDER_FORMATS[n] for n in ("fp8_block", "nf4")}}.items():
        made = form.make(info)
        assert made is not None
        yield name, made.packing
    for kind in GGUF:
        yield kind, Packing(encoding.ggml(kind, new_scales=True))


def ours(packing: Packing, weight: Tensor) -> tuple[Work, Work]:
    """Return what encodes a weight, and what decodes its codes."""
    encoding, count, values = packing.encoding, weight.numel(), weight.reshape(-1)
    parts = parts_of(torch.zeros(encoding.nbytes(count), dtype=torch.uint8), packing, 0, count, fetch)
    if encoding.needs_largest:
        parts |= encoding.refit(parts, float(values.abs().max()))
    made = encoding.encode(values, parts)
    assert made is not None
    full = {**parts, **{r: t if r == CODES else t.view(torch.uint8).view(parts[r].dtype) for r, t in made.items()}}
    full[CODES] = full[CODES].view(torch.uint8)
    return lambda: encoding.encode(values, parts), lambda: encoding.decode(full, 0, count)


def by_gguf(name: str, weight: Tensor) -> tuple[Work | None, Work]:
    """Return the same of llama.cpp's own library, which does not encode K types."""
    from gguf import GGMLQuantizationType, quants

    kind, values = GGMLQuantizationType[name], weight.numpy()
    try:
        codes = quants.quantize(values, kind)
    except NotImplementedError:
        new = encoding.ggml(name, new_scales=True)
        raw: Any = new.encode(weight.reshape(-1), {CODES: torch.zeros(new.nbytes(weight.numel()), dtype=torch.uint8)})
        codes = raw[CODES].numpy().reshape(len(weight), -1)
        return None, lambda: quants.dequantize(codes, kind)
    return lambda: quants.quantize(values, kind), lambda: quants.dequantize(codes, kind)


def by_kitchen(name: str, weight: Tensor) -> tuple[Work, Work]:
    """Return the same of ComfyUI's library."""
    import comfy_kitchen.tensor as kitchen

    layout: Any = getattr(kitchen, KITCHEN[name])
    more = {"per_channel": True} if name == "int8" else {}
    codes, params = layout.quantize(weight, **more)
    return lambda: layout.quantize(weight, **more), lambda: layout.dequantize(codes, params)


def by_bitsandbytes(_: str, weight: Tensor) -> tuple[Work, Work]:
    """Return the same of bitsandbytes."""
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(weight, quant_type="nf4", blocksize=64)
    return (lambda: functional.quantize_4bit(weight, quant_type="nf4", blocksize=64),
            lambda: functional.dequantize_4bit(codes, state))  # fmt: skip


PEERS: Final[dict[str, tuple[str, Callable[[str, Tensor], tuple[Work | None, Work]]]]] = {
    **{name: ("comfy_kitchen", by_kitchen) for name in KITCHEN}, "nf4": ("bitsandbytes", by_bitsandbytes),
    **{name: ("gguf", by_gguf) for name in GGUF},
}  # fmt: skip
"""Format → a library that has a quantiser of its own on a CPU, and how to call it."""


def figures(side: int) -> Iterator[dict[str, Any]]:
    """Yield ns for each number, of ours and of the other library, or why that was not measured."""
    weight = torch.randn(side, side, generator=torch.Generator().manual_seed(0)) * 0.02
    for name, packing in packings(side):
        row: dict[str, Any] = {"format": name}
        library, peer = PEERS.get(name, ("", None))
        sides = {"ours": lambda p=packing: ours(p, weight)}
        if peer is not None and find_spec(library):
            sides[library] = lambda n=name, call=peer: call(n, weight)
        else:
            row["without"] = f"{library} is not installed" if library else "no library for CPUs is known here"
        for who, both in sides.items():
            encode, decode = both()
            row[who] = {
                "encode": cost(encode, weight.numel()) if encode else None,
                "decode": cost(decode, weight.numel()),
            }
        yield row


if __name__ == "__main__":
    torch.set_num_threads(1)
    keep_freed_memory()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [*figures(int(sys.argv[1]) if len(sys.argv) > 1 else 2048)]
    print(json.dumps(found))

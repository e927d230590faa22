"""Layers that SDNQ stored: `python -m tests.files.sdnq_layers` makes `sdnq_layers.safetensors.xz` again, with sdnq 0.2.8.

For each row the tensors of a layer, and in `want` the numbers that the library reads back in fp32.
"""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from tests.files.libraries import layers_of
from tests.kit.tensors import Tensors, rand

FILE = Path(__file__).with_name("sdnq_layers.safetensors.xz")

LINEAR = (4, 64)
KINDS = ("int7", "uint7", "int6", "uint6", "int5", "uint5", "uint3", "int3", "int2")
ROWS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    **{kind: (LINEAR, {"weights_dtype": kind, "group_size": 32}) for kind in KINDS},
    "low-rank uint4": (LINEAR, {"weights_dtype": "uint4", "group_size": 16, "use_svd": True, "svd_rank": 2}),
    "low-rank int8": (LINEAR, {"weights_dtype": "int8", "use_svd": True, "svd_rank": 2}),
    "low-rank float8": (LINEAR, {"weights_dtype": "float8_e4m3fn", "use_svd": True, "svd_rank": 2}),
    "rotated uint4": (LINEAR, {"weights_dtype": "uint4", "group_size": 16, "use_hadamard": True}),
    "rotated low-rank uint5": (
        (4, 48), {"weights_dtype": "uint5", "use_hadamard": True, "hadamard_group_size": 64, "use_svd": True, "svd_rank": 2},
    ),
    "convolution uint4": ((4, 32, 3, 2), {"weights_dtype": "uint4", "group_size": 8}),
    "convolution uint8": ((4, 32, 3, 2), {"weights_dtype": "uint8", "group_size": 8}),
    "convolution int8": ((4, 32, 3, 3), {"weights_dtype": "int8"}),
    "convolution float8": ((4, 32, 1, 1), {"weights_dtype": "float8_e5m2"}),
    "convolution of one axis": ((4, 32, 5), {"weights_dtype": "int5", "group_size": 16}),
    "convolution of three axes": ((4, 16, 1, 2, 2), {"weights_dtype": "uint6"}),
    "low-rank convolution": ((4, 32, 2, 2), {"weights_dtype": "uint3", "group_size": 16, "use_svd": True, "svd_rank": 2}),
}  # fmt: skip
"""Row → the shape of its weight, and the configuration."""


def stored() -> dict[str, Tensors]:
    """Row → the tensors of its layer, and what the library reads in `want`."""
    return layers_of(FILE)


def quantised(name: str, weight: torch.Tensor) -> tuple[Any, Tensors]:
    """The library's reader of a layer, and the layer of a weight."""
    from sdnq.quantizer import sdnq_quantize_layer_weight

    shape, settings = ROWS[name]
    of = "Linear" if len(shape) == 2 else f"Conv{len(shape) - 2}d"
    reader, layer = sdnq_quantize_layer_weight(weight, layer_class_name=of, torch_dtype=torch.float32, **settings)
    return reader, {last: value for last, value in layer.items() if value is not None}


def main() -> None:
    """Write the file of layers."""
    made: Tensors = {}
    for n, (name, (shape, _)) in enumerate(ROWS.items()):
        weight = rand(*shape, seed=n, scale=0.02)
        weight[1, :3] = 0
        reader, layer = quantised(name, weight.clone())
        layer["want"] = reader(**layer, dtype=torch.float32, skip_compile=True)
        print(f"{name}: {(layer['want'] - weight).norm() / weight.norm():.4f} from the weight")
        made |= {f"{name}/{last}": value.contiguous() for last, value in layer.items()}
    FILE.write_bytes(lzma.compress(save(made, {"made with": "sdnq 0.2.8"}), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    main()

"""Examples of formulas with other shapes and settings than those of `proof/examples`."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from lora_merge.proof.examples import CONV, EXAMPLES, Example

FURTHER: Final = {
    "linear": ("lora", Example({"up": (12, 2), "down": (2, 16)}, scalars={"scale": 0.75})),
    "no core": ("loha", Example({"w1_a": (12, 2), "w1_b": (2, 16), "w2_a": (12, 2), "w2_b": (2, 16)},
                                scalars={"scale": 0.75})),
    "whole": ("lokr", Example({"w1": (3, 2), "w2": (4, 8)}, scalars={"scale": 0.75, "rs_scale": 1.5})),
    "pairs": ("lokr", Example({"w1_a": (3, 1), "w1_b": (1, 2), "w2_a": (4, 2), "w2_b": (2, 8)},
                              scalars={"scale": 0.75, "rs_scale": 1.5}, settings={"rs_lora": True})),
    "right": ("lokr", Example({"w1": (3, 2), "w2": (4, 2, 9)}, CONV, {"scale": 0.75, "rs_scale": 1.5},
                              {"right_aligned": True})),
    "left": ("lokr", Example({"w1": (3, 2), "w2": (4, 2, 9)}, CONV, {"scale": 0.75, "rs_scale": 1.5})),
    "no kernel": ("glora", Example({"a1": (16, 2), "a2": (2, 16), "b1": (12, 2), "b2": (2, 16)},
                                   scalars={"scale": 0.75})),
    "blocks in up": ("bdlora", Example({"up": (2, 6, 2), "down": (2, 2, 16)}, scalars={"scale": 0.75})),
    "one block": ("bdlora", Example({"up": (12, 1, 4), "down": (1, 4, 16)}, scalars={"scale": 0.75})),
    "orthogonal": ("hra", Example({"vectors": (16, 2)}, settings={"orthogonal": True})),
    "last": ("tlora", replace(EXAMPLES["tlora"], settings={"algo": "tlora", "sig_type": "last"})),
    "qr": ("deft", replace(EXAMPLES["deft"], settings={"method": "qr"})),
}  # fmt: skip
"""What differs → the formula and its example."""

"""Models with few blocks."""

from __future__ import annotations

import re
from collections.abc import Mapping

from lora_merge.dtypes import Shape

STACK = re.compile(
    r"(.*?(?<!ut_)(?<!mb_)(?<![np]_)(?:blocks|layers|refiner|norms)(?:\.image|\.image_cond)?\.)(\d+)(?=\.)"
)


LATER = re.compile(
    r"(?:put_blocks|middle_block)\..*\.transformer_blocks\.(?:[2-9]|1\d)\.|(?:down|up)_blocks\.\d+\.(?:[6-9]|\d\d)\."
)


def few_blocks(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The first and the last block of a stack, as 0 and 1; of a UNet's parts the first six."""
    last: dict[str, int] = {}
    for key in shapes:
        if m := STACK.match(key):
            last[m[1]] = max(last.get(m[1], 0), int(m[2]))
    few: dict[str, Shape] = {}
    for key, shape in shapes.items():
        m = STACK.match(key)
        if LATER.search(key) or (m and int(m[2]) not in (0, last[m[1]])):
            continue
        name = f"{m[1]}{min(int(m[2]), 1)}{key[m.end(2) :]}" if m else key
        few[name] = shape
    return few

"""The preview of a report: a bar for each block, as long as its change. Drawn by Pillow, which ComfyUI has."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any, Final

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ..facts import percent

KINDS: Final = {"ratio": "change by block, as a share of its weights", "norm": "change by block, as a norm"}
"""Number of a block in a report → what it is."""

ROW: Final = 22  # pixels
LABELS: Final = 230
BARS: Final = 420
NUMBERS: Final = 90
MOST: Final = 80  # blocks
BACK, INK, SOFT, BAR = "#1a212b", "#e6eaf0", "#a3aebd", "#5b8def"


def by_block(blocks: Mapping[str, Mapping[str, Any]]) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    """Return a picture [height, width, 3] of the blocks of a report's numbers; None if there are none."""
    kind = next((kind for kind in KINDS if any(kind in numbers for numbers in blocks.values())), None)
    if kind is None:
        return None
    values = [(block, _finite(numbers.get(kind))) for block, numbers in blocks.items()][:MOST]
    most = max(value for _, value in values) or 1.0
    font = ImageFont.load_default(13)
    picture = Image.new("RGB", (LABELS + BARS + NUMBERS, ROW * (len(values) + 2)), BACK)
    draw = ImageDraw.Draw(picture)
    left_out = f" (the first {MOST} of {len(blocks)})" if len(blocks) > MOST else ""
    draw.text((10, ROW // 2 - 6), KINDS[kind] + left_out, SOFT, font)
    for n, (block, value) in enumerate(values):
        top = ROW * (n + 1) + ROW // 2
        draw.text((10, top), block[-30:], INK, font)
        draw.rectangle((LABELS, top + 2, LABELS + round((BARS - 10) * value / most), top + ROW - 6), BAR)
        draw.text((LABELS + BARS, top), percent(value) if kind == "ratio" else f"{value:.3g}", INK, font)
    return np.asarray(picture)


def _finite(value: float | None) -> float:
    return value if value is not None and isfinite(value) else 0.0

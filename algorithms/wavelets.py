"""The filters that rebuild a signal from its wavelet coefficients, by the names that PyWavelets gives them.

The numbers of wavelets.json are those of PyWavelets 1.8.0 (`pywt.Wavelet(name).rec_lo`), except for coif4: PEFT 0.21.2
(tuners/waveft/wavelet.py) trains with other numbers, which differ by up to 0.012, so the file has PEFT's. PEFT 0.21.2
computes db1 to db10, sym2 to sym10 and coif1 to coif4; its configuration accepts the others, but training fails.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path


@cache
def low_pass() -> Mapping[str, list[float]]:
    """Return name → low-pass filter; the high-pass filter is its reverse with every second sign changed."""
    table: Mapping[str, list[float]] = json.loads(Path(__file__).with_name("wavelets.json").read_text(encoding="ascii"))
    return table

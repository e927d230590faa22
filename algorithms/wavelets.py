"""The filters that rebuild a signal from its wavelet coefficients, by the names that PyWavelets gives them.

The numbers of wavelets.json are those of PyWavelets 1.8.0 (`pywt.Wavelet(name).rec_lo`), but for coif4: there they are
those of PEFT 0.21.2 (tuners/waveft/wavelet.py), which differ from the first in up to 0.012 and are what adapters were
trained with. PEFT 0.21.2 itself computes db1 to db10, sym2 to sym10 and coif1 to coif4; the others it takes into a
configuration, and fails.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path


@cache
def low_pass() -> Mapping[str, list[float]]:
    """Name → the low-pass filter; the high-pass one is it read backwards, every second sign turned."""
    table: Mapping[str, list[float]] = json.loads(Path(__file__).with_name("wavelets.json").read_text(encoding="ascii"))
    return table

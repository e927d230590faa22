"""The formulas of `algorithms/` a second time: numpy, float64, row by row, sharing no code with the first.

`verify` recomputes sampled rows of every merge with them; `doctor` compares the devices with them.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from .formula_input import Formula, FormulaInput, Reference
from .lycoris import LYCORIS
from .peft import PEFT
from .rotations import ROTATIONS

REFERENCE: Final = MappingProxyType({**LYCORIS, **PEFT, **ROTATIONS})
"""One row for every row of ALGORITHMS."""

__all__ = ["REFERENCE", "Formula", "FormulaInput", "Reference"]

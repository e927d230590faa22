"""WaveFT, ΔW = c · S or c · IDWT(S), S zero except for n entries. Bilican et al. 2025, arXiv:2505.12532.

The positions of the entries are not stored: they are the first n of a random permutation of all positions, drawn from
`random_loc_seed` on the CPU. For the inverse wavelet transform, S is the middle of a matrix with f − 2 more rows
and columns, rounded up to even numbers, where f is the length of the filter; its quarters are the four bands. PEFT
tuners/waveft/layer.py.

wavelets.json has the filters by the names that PyWavelets gives them. Their values are those of PyWavelets 1.8.0
(`pywt.Wavelet(name).rec_lo`), except for coif4: PEFT 0.21.2 (tuners/waveft/wavelet.py) trains with other values, which
differ by up to 0.012, so the file has PEFT's. PEFT 0.21.2 computes db1 to db10, sym2 to sym10 and coif1 to coif4; its
configuration accepts the others, but training fails.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .base import SEEDED, Algorithm, AlphaOverRank, Checks, Shape, Shapes, expect
from .fourierft import fitted_shapes, places

if TYPE_CHECKING:
    from torch import Tensor

    from .base import Indices, Scalar


@cache
def low_pass() -> Mapping[str, list[float]]:
    """Return name → low-pass filter; the high-pass filter is its reverse with every second sign changed."""
    table: Mapping[str, list[float]] = json.loads(Path(__file__).with_name("wavelets.json").read_text(encoding="ascii"))
    return table


class WaveTensors(NamedTuple):
    """The coefficients and their positions."""

    spectrum: Tensor  # [n, m]
    scale: Scalar  # `scaling`
    seed: int  # `random_loc_seed`
    family: str = "db1"  # `wavelet_family`
    transform: bool = True  # `use_idwt`
    places: Indices | None = None  # row-major positions, [n, m]; places and filters are never stored
    filters: Tensor | None = None  # low and high pass, [n, 2, f]


def check_settings(settings: Mapping[str, Any], _: Shapes, __: Shape) -> None:
    """Raise DoesNotFit for a wavelet that is not in wavelets.json."""
    family = settings.get("family", "db1")
    expect(
        holds=family in low_pass() or not settings.get("transform", True),
        otherwise=f"the wavelet is {str(family)[:20]!r}, known are db1 to db38, sym2 to sym20 and coif1 to coif17",
    )


def derive(shapes: Shapes, target: Shape, settings: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Return the positions of the coefficients, and the filters of the wavelet."""
    import torch

    slots = {"places": places(shapes, target, settings["seed"])}
    if not settings.get("transform", True):
        return slots
    low = low_pass()[settings.get("family", "db1")]
    high = [value if i % 2 == 0 else -value for i, value in enumerate(reversed(low))]
    return slots | {"filters": torch.tensor([low, high], dtype=torch.float64)}


def delta(base: Tensor, t: WaveTensors) -> Tensor:
    """Return ΔW [n, out, cols]; the values of `base` are not read."""
    import torch

    assert t.places is not None, "derived"
    n, out, cols = base.shape
    values = t.spectrum * t.scale[:, :, 0]
    if t.filters is None:
        return base.new_zeros(n, out * cols).scatter_(1, t.places, values).view(base.shape)
    filters = t.filters[0]
    more = filters.shape[1] - 2
    height, width = ((size + more + 1) // 2 * 2 for size in (out, cols))
    rows = t.places // cols + (height - out) // 2
    columns = t.places % cols + (width - cols) // 2
    dense = base.new_zeros(n, height * width).scatter_(1, rows * width + columns, values)
    bands = dense.view(n, 2, height // 2, 2, width // 2).transpose(2, 3).flatten(1, 2)
    kernels = torch.einsum("ya,xb->xyab", filters, filters)  # the right half of a matrix is high-pass along its rows
    change: Tensor = torch.nn.functional.conv_transpose2d(bands, kernels.flatten(0, 1)[:, None], stride=2)[:, 0]
    return change[:, more : more + out, more : more + cols].contiguous()


WAVEFT = Algorithm(
    "waveft", WaveTensors, fitted_shapes, delta, "arXiv:2505.12532", scalars_from=AlphaOverRank(), derive=derive,
    decomposes=True, checks=Checks(SEEDED, settings=check_settings), scale_from_config=True,
)  # fmt: skip

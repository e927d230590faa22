"""OFT of PEFT, W' = W · diag(R_1 … R_k)ᵀ on the input axis. Qiu et al. 2023, arXiv:2306.07280,
section 4.

Four generations of files; `b` is the size of a block, S a skew-symmetric matrix per block:

peft_oft   (≥ 0.16) `oft_R.weight` [k, b(b−1)/2] is the upper triangle of S. R is a truncated
           Neumann series of (I + S)(I − S)⁻¹; up to 0.17 its last term was doubled like the others.
           Without the series it is (I − S)(I + S)⁻¹, the transpose.
peft_oft2  (0.14, 0.15) `oft_r` [k, b, b], S = ½ (X − Xᵀ), R = (I − S)(I + S)⁻¹, and rows are scaled
           by `oft_s`.
peft_oft1  (≤ 0.13) `oft_r` as before, but W' = diag(R)ᵀ · W on the *output* axis, cut to size.

One stored block is shared by all. `coft` bounds the norm of S (of X in the older two).
PEFT tuners/oft/layer.py of 0.13.2, 0.15.2, 0.17.0, 0.21.2.
"""

from __future__ import annotations

from math import isqrt
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .base import Algorithm, Checks, Shape, Shapes, expect, flat, length
from .bounds import below
from .oft import stretch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

TERMS: Final = MappingProxyType({"terms": lambda _shapes, _target: [below(101)]})
"""At most 100 terms of the series: further terms change no digit, and each costs a matrix product."""


class PeftOftTensors(NamedTuple):
    """The upper triangles of the blocks."""

    skew: Tensor  # [n, k, b(b−1)/2]
    terms: int  # of the Neumann series; 0: the exact Cayley transform
    doubled_last: bool = False  # in files of PEFT 0.16 and 0.17
    limit: float = 0.0  # `eps` if `coft` is on; 0: none
    shared: bool = True  # `block_share`: whether one block may be shared by all inputs


class FirstTensors(NamedTuple):
    """The whole blocks."""

    blocks: Tensor  # X, [n, k, b, b]
    limit: float = 0.0
    shared: bool = True


class SecondTensors(NamedTuple):
    """The whole blocks, and a scale for every row."""

    blocks: Tensor  # X, [n, k, b, b]
    rows: Tensor  # oft_s, [n, out, 1]
    limit: float = 0.0
    shared: bool = True


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shape of skew (k, b(b−1)/2); k blocks, or one shared block, tile the columns."""
    stored, cols = shapes["skew"], flat(target)[1]
    expect(holds=len(stored) == 2, otherwise=f"it is {list(stored)}, not a matrix")
    size = block_size(stored[1])
    expect(holds=size > 0, otherwise=f"{stored[1]} numbers are not the upper triangle of a block")
    expect(
        holds=tiles(stored[0], size, cols),
        otherwise=f"{stored[0]} blocks of {size} do not cover {cols} inputs",
    )
    return {"skew": stored}


def fitted_shapes_second(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of blocks (k, b, b) that tile the columns and rows (out, 1)."""
    (out, cols), (count, size) = flat(target), _square(shapes["blocks"])
    expect(
        holds=tiles(count, size, cols),
        otherwise=f"{count} blocks of {size} do not cover {cols} inputs",
    )
    expect(
        holds=shapes.get("rows") == (out, 1),
        otherwise=f"rows is {shapes.get('rows')}, the weight has {out} rows",
    )
    return {"blocks": (count, size, size), "rows": (out, 1)}


def fitted_shapes_first(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shape of blocks (k, b, b) that cover the rows, the last one perhaps only in part."""
    (out, _), (count, size) = flat(target), _square(shapes["blocks"])
    needed = -(-out // size)
    expect(holds=count in (1, needed), otherwise=f"{count} blocks of {size} do not cover {out} rows")
    return {"blocks": (count, size, size)}


def check_settings(settings: Mapping[str, Any], shapes: Shapes, target: Shape) -> None:
    """Raise DoesNotFit for one block of several if the configuration does not say that it is shared."""
    stored = shapes["skew"] if "skew" in shapes else shapes["blocks"]
    size = block_size(stored[1]) if "skew" in shapes else stored[1]
    rows, cols = flat(target)
    width = rows if "blocks" in shapes and "rows" not in shapes else cols
    expect(
        holds=settings.get("shared", True) or stored[0] > 1 or size >= width,
        otherwise=f"one block of {size} for {width}, and the configuration does not say that it is shared",
    )


def block_size(triangle: int) -> int:
    """Return b if b(b−1)/2 values are stored, 1 for no values; 0 if no b fits."""
    b = (1 + isqrt(1 + 8 * triangle)) // 2
    return b if b * (b - 1) // 2 == triangle else 0


def _square(stored: Shape) -> tuple[int, int]:
    square = len(stored) == 3 and stored[1] == stored[2] > 0
    expect(holds=square, otherwise=f"blocks is {list(stored)}, not a stack of square matrices")
    return stored[0], stored[1]


def tiles(count: int, size: int, width: int) -> bool:
    """Return whether `count` blocks, or one shared block, cover the width."""
    return count * size == width or (count == 1 and width % size == 0)


class PeftRotation(NamedTuple):
    """The rotations of the blocks."""

    turned: Tensor  # R − I, [n, k or 1, b, b]; butterfly [n, N, k, b, b]
    rows: Tensor | None = None  # [n, out, 1]


def prepare(t: PeftOftTensors) -> PeftRotation:
    """Return the rotations of the blocks."""
    skew = bounded(skew_blocks(t.skew), t.limit / t.skew.shape[1] ** 0.5)
    return PeftRotation(series(skew, t.terms, doubled_last=t.doubled_last) if t.terms else cayley(skew))


def skew_blocks(triangles: Tensor) -> Tensor:
    """Return S [n, k, b, b] from the upper triangles [n, k, b(b−1)/2], row by row."""
    import torch

    size = block_size(triangles.shape[2])
    rows, cols = torch.triu_indices(size, size, 1, device=triangles.device)
    half = triangles.new_zeros(*triangles.shape[:2], size, size)
    half[..., rows, cols] = triangles
    return half - half.mT


def delta(base: Tensor, t: PeftRotation) -> Tensor:
    """Return W (diag(R)ᵀ − I), [n, out, cols], or s ⊙ (W diag(R)ᵀ) − W if there are `rows`."""
    n, out, cols = base.shape
    blocks = base.reshape(n, out, -1, t.turned.shape[2]).transpose(1, 2)  # [n, k, out, b]
    change = (blocks @ t.turned.transpose(2, 3)).transpose(1, 2).reshape(n, out, cols)
    return stretch(base, change, t.rows)


def prepare_embedding(t: PeftOftTensors) -> PeftRotation:
    """Return the transposed rotations: the rows of an embedding are outputs, so ΔW = W (diag(R) − I)."""
    return prepare(t._replace(skew=-t.skew))


def second_delta(base: Tensor, t: SecondTensors) -> Tensor:
    """Return s ⊙ (W diag(R)ᵀ) − W, [n, out, cols]."""
    blocks = base.shape[2] // t.blocks.shape[2]  # the number of blocks that tile the columns, also if one is shared
    return delta(base, PeftRotation(cayley(_old_skew(t.blocks, t.limit, -(-base.shape[1] // blocks))), t.rows))


def prepare_first(t: FirstTensors) -> PeftRotation:
    """Return the rotations of the blocks."""
    return PeftRotation(cayley(_old_skew(t.blocks, t.limit, t.blocks.shape[2])))


def first_delta(base: Tensor, t: PeftRotation) -> Tensor:
    """Return (diag(R)ᵀ − I) W, [n, out, cols]."""
    import torch

    out, size = base.shape[1], t.turned.shape[2]
    padded = torch.nn.functional.pad(base, (0, 0, 0, -out % size))
    cut = padded.reshape(base.shape[0], -1, size, base.shape[2])
    return (t.turned.transpose(2, 3) @ cut).reshape(padded.shape)[:, :out]


def _old_skew(blocks: Tensor, limit: float, side: int) -> Tensor:
    """Return ½ (X − Xᵀ), with the norm of X at most limit · side² / √(stored blocks), as in PEFT up to 0.15."""
    short = bounded(blocks, limit * side**2 / blocks.shape[1] ** 0.5)
    return (short - short.transpose(2, 3)) / 2


def bounded(blocks: Tensor, limit: float) -> Tensor:
    """Return the blocks, scaled to Frobenius norms of at most `limit`; 0 means no limit."""
    if not limit:
        return blocks
    return blocks * (limit / length(blocks, (2, 3)).clamp(min=limit))


def series(skew: Tensor, terms: int, *, doubled_last: bool = False) -> Tensor:
    """Return R − I = 2 S + 2 S² + … by Horner's rule; `doubled_last` as in PEFT up to 0.17."""
    coefficients = [0.0] + [2.0] * (terms - 1)
    if not doubled_last and terms > 2:  # PEFT computes the same series for three terms and four
        coefficients = [0.0] + [2.0] * (max(terms, 4) - 2) + [1.0]
    identity = _identity(skew)
    total = coefficients[-1] * identity
    for coefficient in reversed(coefficients[:-1]):
        total = total @ skew + coefficient * identity
    return total


def cayley(skew: Tensor) -> Tensor:
    """Return R − I for R = (I − S)(I + S)⁻¹ of every block; R − I keeps the digits of small rotations."""
    import torch

    turned: Tensor = torch.linalg.solve(_identity(skew) + skew, -2 * skew, left=False)
    return turned


def _identity(like: Tensor) -> Tensor:
    import torch

    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device).expand_as(like)


PEFT_OFT = Algorithm(
    "peft_oft", PeftOftTensors, fitted_shapes, delta, "arXiv:2306.07280", row_axes={}, reads_base=True, prepare=prepare,
    checks=Checks(TERMS, settings=check_settings),
    kernel_note="PEFT's forward pass of OFT on a kernel is not a convolution; this is what PEFT merges it to",
)  # fmt: skip
PEFT_OFT_EMBEDDING = Algorithm(
    "peft_oft_embedding", PeftOftTensors, fitted_shapes, delta, "arXiv:2306.07280", row_axes={}, reads_base=True,
    prepare=prepare_embedding, checks=Checks(TERMS, settings=check_settings), layout="table",
)  # fmt: skip
PEFT_OFT2 = Algorithm(
    "peft_oft2", SecondTensors, fitted_shapes_second, second_delta, "arXiv:2306.07280", reads_base=True,
    decomposes=True, checks=Checks(settings=check_settings),
)  # fmt: skip
PEFT_OFT1 = Algorithm(
    "peft_oft1", FirstTensors, fitted_shapes_first, first_delta, "arXiv:2306.07280", reads_base=True,
    prepare=prepare_first, checks=Checks(settings=check_settings),
)  # fmt: skip

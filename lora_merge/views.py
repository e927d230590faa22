"""Where the weight an adapter was trained on lies in the base: pieces of stored tensors, in order.

An adapter for `attn.to_q` on a checkpoint that stores `qkv` fused sees rows [0:H) of that tensor: one
piece. An adapter for `qkv` on a checkpoint that stores q, k and v apart sees three pieces. Swapped halves
are two pieces in the other order; GPT-2's `[in, out]` weights are a transposed piece. So slicing, fusing,
swapping and transposing need no further notion.
"""

from __future__ import annotations

from dataclasses import dataclass

from .algorithms import Shape


@dataclass(frozen=True)
class Piece:
    """Rows [start, stop) of a stored tensor seen as a matrix `cols` wide; consecutive bytes.

    `cols` is the product of all axes but the first, except for stacked matrices `[E, out, in]`, which are
    seen as `E·out` rows of width `in`. A transposed piece contributes `cols` rows of width `stop − start`.
    """

    key: str
    start: int
    stop: int
    cols: int
    transposed: bool = False

    @property
    def rows(self) -> int:
        """Rows that it contributes to the view."""
        return self.cols if self.transposed else self.stop - self.start


@dataclass(frozen=True)
class View:
    """The weight as the adapter sees it: the pieces' rows, one below the other, of this shape."""

    pieces: tuple[Piece, ...]
    shape: Shape

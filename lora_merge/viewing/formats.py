"""How the weights of a quantised base are stored, for `inspect`: formats, blocks, bits, and what is not quantised."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final

from ..files.checkpoint import Index
from ..files.encodings.base import Packing
from ..files.encodings.scaled_codes import SCALE
from ..text import plural

WHOLE_NUMBER: Final = re.compile(r"\d+")


def formats(index: Index) -> dict[str, Any]:
    """Return the formats of the weights that a format reads, and the matrices that are plain values next to them; {}
    where nothing is quantised."""
    elements: Counter[tuple[str, tuple[int, int]]] = Counter()
    weights, bits = elements.copy(), elements.copy()
    for name, packing in index.packed.items():
        if packing.encoding.quantised:
            kind = packing.encoding.title, _block(packing, prod(index.tensors[name].shape))
            weights[kind] += 1
            elements[kind] += prod(index.tensors[name].shape)
            bits[kind] += 8 * _stored(packing)
    if not weights:
        return {}
    rows = [
        {"format": kind[0], "weights": count, "bits": round(bits[kind] / max(elements[kind], 1), 2)}
        | ({"block": [*kind[1]]} if kind[1] != (0, 0) else {})
        for kind, count in weights.items()
    ]
    return {"formats": rows, "not_quantised": _plain(index)}


def _block(packing: Packing, elements: int) -> tuple[int, int]:
    """Return the rows and columns with one scale; (0, 0) where there is one for the weight, or none.

    Groups of columns of GPTQ and its kin are known by the number of their scales alone.
    """
    block, scale = packing.encoding.block_of_scale, packing.parts.get(SCALE)
    count = prod(scale.info.shape) if scale is not None else 0
    return (1, elements // count) if block == (0, 0) and count > 1 else block


def _stored(packing: Packing) -> int:
    """Return the bytes of a weight with its scales, tables and marks that are parts of it."""
    parts = {part.info.name: part.info.nbytes for part in packing.parts.values()}
    codes = packing.codes
    return sum(parts.values()) + (codes.nbytes if codes is not None and codes.name not in parts else 0)


def _plain(index: Index) -> dict[str, int]:
    """Return the name of matrices that are plain values → how many there are, with `*` for the numbers in names."""
    coded = {name for name, packing in index.packed.items() if packing.encoding.quantised} | index.packing_names
    plain = (n for n, t in index.tensors.items() if len(t.shape) > 1 and n.endswith(".weight") and n not in coded)
    return dict(Counter(WHOLE_NUMBER.sub("*", name) for name in plain))


def format_line(row: Mapping[str, Any]) -> str:
    """Return one format as text."""
    block: Sequence[int] = row.get("block", ())
    scale = f", one scale per {' × '.join(map(str, block))} values" if block else ""
    return f"{plural(row['weights'], 'weight')} as {row['format']}: {row['bits']:g} bits per value{scale}"


def plain_line(counts: Mapping[str, int]) -> str:
    """Return the matrices that are not quantised as text."""
    return ", ".join(f"{name} ({count})" if count > 1 else name for name, count in counts.items())

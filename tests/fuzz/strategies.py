"""Strategies that make almost-right files: values in JSON, tables of tensors, damaged bytes."""

from __future__ import annotations

import copy
import io
import json
import warnings
from math import prod
from typing import Any

import torch
from hypothesis import strategies as st

from tests.kit.files import blob

text = st.text(st.characters(codec="utf-8"), max_size=8)
numbers = st.one_of(
    st.integers(-3, 40),
    st.sampled_from(
        [
            2**31,
            2**53,
            2**63,
            2**64,
            2**64 + 1,
            2**70,
            -(2**63) - 1,
            10**30,
            10**400,
            -1,
            0.0,
            -0.0,
            1.5,
            1e308,
            float("nan"),
            float("inf"),
        ]
    ),
)
nasty = st.sampled_from(
    [
        "",
        ".",
        "..",
        "../x",
        "/etc/passwd",
        "a/../../b",
        "C:\\x",
        "\0",
        "(",
        "(a+)+$",
        "[",
        "*",
        "𝔘",
        "a" * 5000,
        "9" * 5000,
        "²",
        "٣",
        "0Hx_",
        "(?:a|a)" * 45 + "b",
        "a?" * 40 + "a" * 40 + "b",
        "((a*)*)*b",
        r"(a)+\\1",
        "(?<=a)(?!b).*",
        "a\nerror: b\n  where: c\n  fix:   d",
        "\r\x1b[31ma\u2028b",
    ]
)
leaves = st.one_of(st.none(), st.booleans(), numbers, text, nasty)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.one_of(text, nasty), inner, max_size=3)),
    max_leaves=8,
)


def table(known: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """A table with these fields, each usually right, sometimes anything, sometimes absent."""
    fields = {k: st.one_of(s, s, s, values) for k, s in known.items()}
    return st.builds(
        lambda a, b: {**b, **a}, st.fixed_dictionaries({}, optional=fields), st.dictionaries(text, values, max_size=2)
    )


changes = st.lists(
    st.tuples(
        st.sampled_from(["put", "over", "cut", "end", "double"]),
        st.floats(0, 1),  # where, as a share of the length: that of a torch file varies from run to run
        st.one_of(st.binary(max_size=6), st.sampled_from([b"\xff" * 8, b'"', b"{", b"}", b"[", b"9" * 30, b"\0"])),
    ),
    min_size=1,
    max_size=3,
)


@st.composite
def bent(draw: st.DrawFn, sound: st.SearchStrategy[Any], odd: st.SearchStrategy[Any] = values) -> Any:
    """A sound value with something odd in up to two places, or one of them absent."""
    value = copy.deepcopy(draw(sound))
    for _ in range(draw(st.integers(0, 2))):
        place: Any = value
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(place[key], dict | list) and draw(st.integers(0, 3)):
                place = place[key]
            elif draw(st.integers(0, 4)):
                place[key] = copy.deepcopy(draw(odd))
                break
            else:
                del place[key]
                break
    return value


def as_json(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    """The values as JSON, sometimes damaged."""
    right = strategy.map(lambda v: json.dumps(v).encode())
    return st.one_of(right, right, right.flatmap(damaged))


def damaged(content: bytes) -> st.SearchStrategy[bytes]:
    """The content with a few bytes changed, cut, doubled or put in."""
    return changes.map(lambda c: _apply(content, c))


def _apply(content: bytes, changes: list[tuple[str, float, bytes]]) -> bytes:
    for kind, share, piece in changes:
        at = int(share * len(content))
        rest = {
            "put": piece + content[at:],
            "over": piece + content[at + len(piece) :],
            "cut": content[at + max(len(piece), 1) :],
            "end": b"",
            "double": content[max(at - 9, 0) :],
        }[kind]
        content = content[:at] + rest
    return content


fills = st.one_of(
    st.sampled_from(
        [b"\0\0\x80?", b"\0\0\0\0", b"\xff\xff\xff\xff", b"\0\0\x80\x7f", b"\1\0\0\0", b"\xff\xff\x7f\x7f", b"\0\0\x80\x5f",
         b"\0\0\x80\x20", b"\1\0\x80\x7f", b"\xff\xff\x7f\0"]
    ),
    st.sampled_from([b"\0" * 6 + b"\xf0?", b"\1" + b"\0" * 7, b"\xff" * 6 + b"\xef\x7f", b"\0" * 7 + b"\x60", b"\1" + b"\0" * 5 + b"\xf0\x7f"]),
    st.binary(min_size=8, max_size=8),
)  # fmt: skip
"""Numbers to fill a tensor with. In fp32: ones, zeros, NaN, infinities, the smallest numbers, the largest ones, 2**64,
2**-62, a NaN that signals, the largest subnormal. In fp64: one, the smallest and the largest number, about 1e154, whose
square is infinite, a NaN that signals. Any 8 bytes."""

SIZES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I64": 8, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I32": 4}


@st.composite
def checkpoints(
    draw: st.DrawFn, names: st.SearchStrategy[str], metadata: st.SearchStrategy[Any] | None = None
) -> bytes:
    """A right file of a few small tensors with these names, of any dtype, shape and bits."""
    header: dict[str, Any] = {"__metadata__": draw(metadata)} if metadata is not None else {}
    data = b""
    for name in draw(st.lists(names, max_size=5, unique=True)):
        dtype = draw(st.sampled_from(["F32", "F32", "F32", *SIZES]))
        shape = draw(
            st.one_of(st.sampled_from([[4, 4], [2, 4], [4, 2], [4], [], [1]]), st.lists(st.integers(0, 4), max_size=4))
        )
        size = prod(shape) * SIZES[dtype]
        fill = draw(fills)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + size]}
        data += (fill * size)[:size]
    return blob(header, data)


@st.composite
def adapters(draw: st.DrawFn, modules: list[str], groups: list[dict[str, list[int]]]) -> bytes:
    """Complete groups of tensors that fit, often with one thing wrong: absent, another shape, dtype or value."""
    header: dict[str, Any] = {}
    data = b""
    for module in draw(st.lists(st.sampled_from(modules), min_size=1, max_size=2, unique=True)):
        group = dict(draw(st.sampled_from(groups)))
        odd = draw(st.one_of(st.none(), st.sampled_from([*group, "alpha"])))
        group["alpha"] = []
        for ending, fits in group.items():
            shape, dtype, fill = fits, "F32", b"\0\0\0?"
            if ending == odd:
                shape = draw(st.one_of(st.just(fits), st.lists(st.integers(0, 4), max_size=4)))
                dtype = draw(st.sampled_from(["F32", *SIZES]))
                fill = draw(fills)
                if draw(st.integers(0, 4)) == 0:
                    continue
            size = prod(shape) * SIZES[dtype]
            span = [len(data), len(data) + size]
            header[f"{module}.{ending}"] = {"dtype": dtype, "shape": shape, "data_offsets": span}
            data += (fill * size)[:size]
    return blob(header, data)


class Call:
    """Pickles as a call of anything."""

    def __init__(self, function: Any, args: tuple[Any, ...]) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> Any:
        return self.function, self.args


def torch_file(content: Any, *, zipped: bool) -> bytes:
    """As torch.save writes it."""
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(content, out, _use_new_zipfile_serialization=zipped)
    return out.getvalue()


@st.composite
def torch_objects(draw: st.DrawFn) -> Any:
    """A state dict with tensors of odd geometry, odd values and calls of what the unpickler allows."""
    small = st.integers(-2, 5)
    base = torch.arange(12.0)

    def rebuilt(offset: int, size: list[int], stride: list[int]) -> Call:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            storage = base.storage()
        args = (storage, offset, tuple(size), tuple(stride), False, {})
        return Call(torch._utils._rebuild_tensor_v2, args)

    tensors = st.one_of(
        st.sampled_from([base, base.reshape(3, 4), base.reshape(3, 4).t(), base.half(), base[2:5], base[:0],
                         base.to_sparse()]),
        st.builds(rebuilt, small, st.lists(small, max_size=3), st.lists(small, max_size=3)),
        st.builds(lambda f, a: Call(f, tuple(a)), st.sampled_from([bytearray, torch.Size, set, torch.Tensor]),
                  st.lists(st.one_of(small, st.sampled_from([10**12, "x", b"x"])), max_size=2)),
    )  # fmt: skip
    keys = st.one_of(st.sampled_from(["a.weight", "b", "model", "epoch", "__metadata__"]), text, st.integers(0, 3))
    first = st.fixed_dictionaries({"a": tensors})
    more = st.dictionaries(keys, st.one_of(tensors, tensors, leaves), max_size=3)
    inner = st.builds(lambda a, b: {**a, **b}, first, more)
    return draw(st.one_of(inner, inner, st.fixed_dictionaries({"state_dict": inner}), tensors, values))

"""What differs between two results of one call: in JSON the first place, in files the numbers of each tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load

from tests.corpus.calls import normalised, outcome

LOSSES = ("residual", "worst_ulp")
"""Entries of a report that must not grow."""

MOST = 8
"""Tensors that are named of one file."""


def differences(scene: Path, then: dict[str, Any], now: dict[str, Any], old: Path, new: Path) -> Iterator[str]:
    """Yield what differs between two results and the folders of their outputs, a line each."""
    for kind in ("plan", "report"):
        ends = outcome(then[kind]), outcome(now[kind])
        if ends[0] != ends[1]:
            yield f"{kind}: {ends[0]} → {ends[1]}: {now[kind] if ends[0] == 'done' else then[kind]}"
        elif place := first(then[kind], now[kind]):
            yield f"{kind}: {place}"
    names = [{p.relative_to(f).as_posix() for p in f.rglob("*") if p.is_file()} for f in (old, new)]
    if names[0] != names[1]:
        yield f"bytes: files only before {sorted(names[0] - names[1])}, only now {sorted(names[1] - names[0])}"
    changed = False
    for name in sorted(names[0] & names[1]):
        for line in of_files(scene, old / name, new / name, (old, new)):
            changed = True
            yield f"bytes: {name}: {line}"
    if changed:
        yield from grown(then["report"], now["report"])


def first(then: Any, now: Any, place: str = "") -> str:
    """The first place where two JSON values differ; "" if there is none."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in [*then, *(k for k in now if k not in then)]:
            here = f"{place}.{key}" if place else key
            if key not in then or key not in now:
                return f"{here} is {'new' if key not in then else 'gone'}"
            if difference := first(then[key], now[key], here):
                return difference
        return ""
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        pairs = enumerate(zip(then, now, strict=True))
        return next((line for n, (a, b) in pairs if (line := first(a, b, f"{place}[{n}]"))), "")
    return "" if (type(then), then) == (type(now), now) else f"{place}: {then!r:.200} → {now!r:.200}"


def grown(then: Any, now: Any) -> Iterator[str]:
    """Say of the losses in a report whether they grew."""
    was, is_now = losses(then), losses(now)
    moved = {place: is_now[place] - was[place] for place in was if place in is_now and was[place] != is_now[place]}
    more = {place: by for place, by in moved.items() if by > 0}
    worst = max(more, key=lambda place: more[place], default="")
    if worst:
        yield f"bytes: losses that grew: {len(more)}, most {worst}: {was[worst]:.6g} → {is_now[worst]:.6g}"
    else:
        yield f"bytes: no loss grew, {len(moved)} fell"


def losses(value: Any, place: str = "") -> dict[str, float]:
    """Place in a report → residual or error of rounding."""
    rows: dict[str, float] = {}
    if isinstance(value, list):
        value = {f"[{n}]": one for n, one in enumerate(value)}
    for key, one in value.items() if isinstance(value, dict) else ():
        here = place + key if key.startswith("[") else f"{place}.{key}" if place else key
        rows |= {here: float(one)} if key in LOSSES and isinstance(one, int | float) else losses(one, here)
    return rows


def of_files(scene: Path, old: Path, new: Path, folders: tuple[Path, Path]) -> Iterator[str]:
    """Yield the differences of two files of the same name."""
    raw = old.read_bytes(), new.read_bytes()
    if raw[0] == raw[1]:
        return
    reader = READERS.get(old.suffix, text)
    parts = [reader(path, data) for path, data in zip((old, new), raw, strict=True)]
    said = [normalised(header, scene, folder) for (header, _), folder in zip(parts, folders, strict=True)]
    if place := first(*said):
        yield f"header: {place}"
    before, after = (tensors for _, tensors in parts)
    lines = [line for name in before if name in after and (line := of_tensors(name, before[name], after[name]))]
    yield from lines[:MOST]
    if len(lines) > MOST:
        yield f"and {len(lines) - MOST} more tensors"
    if not lines and parts[0][0] == parts[1][0]:
        yield "header: another layout of the same entries"


Part = tuple[Any, dict[str, tuple[Any, bytes]]]
"""A file: its header as JSON; tensor → its numbers and its bytes."""


def safetensors(_: Path, data: bytes) -> Part:
    """Metadata, names in order, dtypes, shapes and places; the tensors."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    entries = header.pop("__metadata__", {})
    places = {name: tuple(start + at for at in row["data_offsets"]) for name, row in header.items()}
    tensors = load(data)
    numbers = {name: (tensors[name], data[a:b]) for name, (a, b) in places.items()}
    return {"metadata": {k: unfolded(v) for k, v in entries.items()}, "tensors": [*header.items()]}, numbers


def gguf(path: Path, _: bytes) -> Part:
    """Entries, types and shapes; the tensors, as the library decodes them."""
    from gguf import GGUFReader, quants

    reader = GGUFReader(path)
    entries = {name: field.contents() for name, field in reader.fields.items()}
    rows = {t.name: [t.tensor_type.name, [int(n) for n in t.shape], int(t.data_offset)] for t in reader.tensors}
    numbers = {t.name: (torch.tensor(quants.dequantize(t.data, t.tensor_type)), bytes(t.data)) for t in reader.tensors}
    entries = {k: unfolded(v) if isinstance(v, str) else v for k, v in entries.items()}
    return json.loads(json.dumps({"entries": entries, "tensors": rows}, default=str)), numbers


def text(_: Path, data: bytes) -> Part:
    """A side file: JSON, words or bytes."""
    whole = data.decode(errors="surrogateescape")
    return unfolded(whole) if whole[:1] in "{[" else whole.splitlines(), {}


READERS = {".safetensors": safetensors, ".gguf": gguf}


def unfolded(value: str) -> Any:
    """The JSON that a text holds, or the text."""
    try:
        return json.loads(value) if value[:1] in ("{", "[") else value
    except ValueError:
        return value


def of_tensors(name: str, then: tuple[Any, bytes], now: tuple[Any, bytes]) -> str:
    """By how much the numbers of a tensor differ; "" if its bytes are the same."""
    (a, old), (b, new) = then, now
    if old == new:
        return ""
    if a.shape != b.shape:
        return f"{name}: shape {tuple(a.shape)} → {tuple(b.shape)}"
    if a.dtype != b.dtype:
        return f"{name}: dtype {a.dtype} → {b.dtype}"
    away = (b.double() - a.double()).abs()
    largest = float(a.double().abs().max())
    return f"{name}: {int((away != 0).sum())} of {away.numel()} numbers, at most {float(away.max()):.3g} (largest {largest:.3g})"

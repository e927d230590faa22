"""Hostile files for the commands that write adapters and compare, and hostile GGUF files: groups of `hostile_names`."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from lora_merge.adapters_out.dialects import DIALECTS
from tests.kit.hostile_inputs import Files, command, pair, tensors
from tests.kit.hostile_names import SHAPES, configured, counted, endings, flat, looked_at, lora, metadata, some

Act = Callable[[Path], int]

# ------------------------------------------------------------------ GGUF


def text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, value: Any) -> bytes:
    """One entry of a header: text, a float, a whole number, a truth value, or a list of texts or of whole numbers."""
    if isinstance(value, list):
        of_texts = bool(value) and isinstance(value[0], str)
        items = b"".join(text(v) if of_texts else struct.pack("<i", v) for v in value)
        return text(key) + struct.pack("<IIQ", 9, 8 if of_texts else 5, len(value)) + items
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    if isinstance(value, bool):
        return text(key) + struct.pack("<I?", 7, value)
    if isinstance(value, float):
        return text(key) + struct.pack("<If", 6, value)
    return text(key) + struct.pack("<II", 4, value) if value < 2**32 else text(key) + struct.pack("<IQ", 10, value)


def gguf(entries: Mapping[str, Any], names: Iterable[str], shape: tuple[int, ...] = (2, 2)) -> bytes:
    """A file of these entries and of tensors of one shape, F16, all numbers one; halves of a LoRA of rank 1 are vectors
    of its first and last axis."""
    entries = {"general.alignment": 8, **entries}
    infos, data = [], b""
    for name in names:
        axes = {".lora_a": (1, *shape[-1:]), ".lora_b": (*shape[:1], 1)}.get(name[-7:], shape)
        infos.append(text(name) + struct.pack(f"<I{len(axes)}QIQ", len(axes), *axes[::-1], 1, len(data)))
        data += b"\0<" * prod(axes)
        data += bytes(-len(data) % 8)
    kvs = [entry(key, value) for key, value in entries.items()]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(kvs)) + b"".join(kvs) + b"".join(infos)
    return head + bytes(-len(head) % 8) + data


LLAMA = {"general.architecture": "llama", "llama.attention.head_count": 1, "llama.attention.head_count_kv": 1}
ADAPTER = {**LLAMA, "general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 1.0}
LAYERS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_gate", "ffn_down")


def fitting(names: Iterable[str], limit: int) -> list[str]:
    """As many names as a file of `limit` bytes holds."""
    return some(names, limit - 500, 46)


def halves(names: Iterable[str], limit: int) -> list[str]:
    """The tensors of a LoRA of as many weights as fit."""
    keys = fitting((f"{name}.lora_{x}" for name in names for x in "ab"), limit)
    return keys[: len(keys) // 2 * 2]


def gguf_files(limit: int) -> Iterator[tuple[str, Files]]:
    """Bases and adapters of llama.cpp: many, long and odd names, entries and arrays."""
    blocks = [f"blk.{i}.{layer}.weight" for i in range(limit // 200) for layer in LAYERS]
    model = gguf(LLAMA, fitting(blocks, limit))
    adapter = gguf(ADAPTER, halves(blocks, limit))
    yield "layers", {"base": model, "a": adapter}
    yield "layers: a file of the trainer", {"base": model, "a": lora((f"model.layers.{i}.self_attn.q_proj.weight" for i in itertools.count()), limit)}  # fmt: skip
    yield "layers: in other files", {"base": flat(some(counted("model.layers.#.self_attn.q_proj.weight"), limit)), "a": adapter}  # fmt: skip
    for kind, names in SHAPES.items():
        plain = gguf({"general.architecture": "flux"}, fitting(names(), limit))
        yield f"{kind}: base", {"base": plain, "a": lora(names(), limit)}
        yield f"{kind}: a model of words", {"base": gguf(LLAMA, fitting(names(), limit)), "a": adapter}
        yield f"{kind}: adapter", {"base": model, "a": gguf(ADAPTER, halves(names(), limit))}  # fmt: skip
    few = fitting(counted("blk.#.attn_q.weight"), 9000)
    odd = halves(few, 9000)
    for what, value in {
        "a long text": "x" * (limit - 20_000), "texts": ["t"] * (limit // 10), "numbers": list(range(limit // 5)),
        "a list of nothing": [], "a number": 2**63, "a word": "many", "zero": 0, "NaN": float("nan"), "minus": -1.0, "no": False,
        "infinite": float("inf"), "digits": "9" * 5000,
    }.items():  # fmt: skip
        for key in (
            "general.architecture", "general.type", "general.alignment", "general.file_type", "adapter.type", "split.count",
            "adapter.lora.alpha", "llama.attention.head_count", "llama.attention.head_count_kv", "tokenizer.ggml.tokens",
            "comfy.gguf.orig_shape.blk.0.attn_q.weight", "lora_merge.recipe", "lora_merge.padding",
        ):  # fmt: skip
            yield f"{key} is {what}", {"base": gguf({**LLAMA, key: value}, few), "a": gguf({**ADAPTER, key: value}, odd)}  # fmt: skip
    many = {f"k.{i}": i for i in range(limit // 30)}
    yield "thousands of entries", {"base": gguf({**LLAMA, **many}, few), "a": gguf({**ADAPTER, **many}, odd)}
    shapes = {f"comfy.gguf.orig_shape.{name}": [1, 1] for name in fitting(counted("blk.#.x.weight"), limit // 2)}
    yield "a shape for each of many", {"base": gguf({"general.architecture": "flux", **shapes}, fitting(counted("blk.#.x.weight"), limit // 2)), "a": lora(counted("blk.#.x.weight"), limit)}  # fmt: skip
    for shape in ((), (0,), (1,), (0, 0), (1, 1, 1), (2, 1), (1, 2)):
        yield f"the shape {shape}", {"base": gguf(LLAMA, fitting(blocks, limit), shape), "a": gguf(ADAPTER, halves(blocks, limit), shape)}  # fmt: skip


# ------------------------------------------------------------------ adapters that become other adapters


def changed(folder: Path) -> int:
    """Every command that reads adapters and is not a merge; then `verify` and `replay` of what was written."""
    a, out = folder / "a", folder / "out.safetensors"
    base = ["--base", folder / "base"] if (folder / "base").exists() else []
    codes = [command("inspect", a, "--weights"), command("compare", a, a, *base)]
    for number, act in enumerate(
        (
            ("combine", a, a, "-o", out),
            ("combine", a, a, "--method", "ties", "--rank", "1", "-o", folder / "ties.safetensors"),
            ("resize", a, "--rank", "1", "-o", folder / "small.safetensors"),
            ("average", a, a, "-o", folder / "mean.safetensors"),
            *(("convert", a, "--to", to, "-o", folder / f"{to}.safetensors") for to in DIALECTS),
        )
    ):
        codes.append(command(*act, *base, *(["--unmatched", "skip"] if number else [])))
    if out.exists():
        codes += [command("verify", out, "--full"), command("replay", out, "-o", folder / "again.safetensors")]
    return max(codes)


def adapters(limit: int) -> Iterator[tuple[str, Files]]:
    """Adapters of every kind of names, alone and beside a base of those names."""
    for kind, names in SHAPES.items():
        yield f"{kind}: alone", {"a": lora(names(), limit)}
        kohya = (f"lora_unet_{n.removesuffix('.weight').replace('.', '_')}" for n in names())
        yield f"{kind}: of kohya", {"base": flat(some(names(), limit)), "a": lora(kohya, limit)}
        peft = (f"base_model.model.{n}" for n in names())
        yield f"{kind}: of PEFT", {"base": flat(some(names(), limit)), **configured({"peft_type": "LORA", "r": 1}, lora(peft, limit, ".lora_B.weight", ".lora_A.weight"))}  # fmt: skip
    yield from endings(limit)
    for what, files in metadata(limit):
        yield what, {"a": files.get("a", b"") or tensors(pair())}


def recipes(limit: int) -> Iterator[tuple[str, Files]]:
    """Adapters that say they were combined."""
    one = {"name": "a", "sha256": "0" * 64, "strength": 1}
    said: dict[str, Any] = {"version": "0.1.0", "command": "combine", "adapters": [one], "options": {}, "method": "sum"}
    few = limit // 130
    for what, more in {
        "thousands of adapters": {"adapters": [one] * few}, "thousands of options": {"options": {f"o{i}": i for i in range(few)}},
        "parts": {"adapters": [{**one, "parts": [[f"re:a{i}", 1] for i in range(few)]}]}, "a deep rank": {"rank": json.loads("[" * 90 + "]" * 90)},
        "a rank of digits": {"rank": "9" * 5000}, "ranks": {"rank_for": {f"IN{i}": "1" for i in range(few)}}, "another command": {"command": "x" * (limit // 2)},
    }.items():  # fmt: skip
        for key in ("lora_merge.recipe", "lora_merge.adapter"):
            stored = tensors(pair(), metadata={key: json.dumps({**said, **more})})
            yield f"{key}: {what}", {"a": stored, "out.safetensors": stored}


def compared(limit: int) -> Iterator[tuple[str, Files]]:
    """Two models of every kind of names: the same ones, the same in another order, and others."""
    for kind, names in SHAPES.items():
        keys = some(names(), limit)
        yield f"{kind}: the same", {"base": flat(keys), "b": flat(keys[::-1])}
        yield f"{kind}: others", {"base": flat(keys), "b": flat(some((f"other.{n}" for n in names()), limit))}
        yield f"{kind}: a model and an adapter", {"base": flat(keys), "b": lora(names(), limit)}


def told_apart(folder: Path) -> int:
    """`compare` in both directions, and `inspect` of both files at once."""
    one, other = folder / "base", folder / "b"
    return max(command("compare", one, other), command("compare", other, one), command("inspect", one, other))


def apart(limit: int) -> Iterator[tuple[str, Files]]:
    """Two models of every kind of names whose numbers differ, and an adapter for them."""
    for kind, names in SHAPES.items():
        shapes = {name: [1, 1] for name in some(names(), limit)}
        tuned = tensors(shapes, "BF16", fill=b"\x00@")
        yield f"{kind}: a base and its training", {"base": flat(shapes), "b": tuned, "a": lora(names(), limit)}


def taken_apart(folder: Path) -> int:
    """`extract`, a merge that is taken apart again, and a page about the adapter on the base."""
    base, adapter, out = folder / "base", folder / "a", folder / "out.safetensors"
    codes = [command("extract", base, folder / "b", "--rank", "1", "-o", folder / "made.safetensors")]
    codes.append(command("inspect", base, adapter, "--html", folder / "page.html"))
    codes.append(command(base, adapter, "-o", out, "--device", "cpu", "--unmatched", "skip"))
    if out.exists():
        codes.append(command("unmerge", out, adapter, "-o", folder / "again", "--unmatched", "skip"))
    return max(codes)


GROUPS: dict[str, tuple[Callable[[int], Iterator[tuple[str, Files]]], Act]] = {
    "gguf": (gguf_files, looked_at), "adapters": (adapters, changed), "combined": (recipes, changed), "compared": (compared, told_apart),
    "apart": (apart, taken_apart),
}  # fmt: skip

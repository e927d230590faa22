"""Hostile files for what is shown, and for batches: groups of `hostile_names`."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.kit.hostile_commands import text
from tests.kit.hostile_inputs import Files, command, loaded, pair, tensors, yaml
from tests.kit.hostile_names import configured, counted, flat, lora, some

Act = Callable[[Path], int]


# ------------------------------------------------------------------ pages and cards


def shown(folder: Path) -> int:
    """Every way to look at an adapter, and at its base with it."""
    base, a = folder / "base", folder / "a"
    codes = [command("inspect", a, "--json"), command("inspect", a, "--html", folder / "one.html")]
    if base.exists():
        codes.append(command("inspect", base, a, "--html", folder / "two.html"))
    return max(codes)


def said(limit: int) -> Iterator[tuple[str, Files]]:
    """What trainers say of a file, in metadata of almost a megabyte."""
    few = limit // 40
    folders: dict[str, Any] = {
        "a folder of many tags": {"1_x": {f"tag {i}": i for i in range(few)}},
        "folders of one tag": {f"{i}_x": {"tag": i} for i in range(few)},
        "a tag of counts beyond": {"1_x": {f"t{i}": 10**300 for i in range(limit // 330)}},
        "tags of line breaks": {"1\n_x": {f"\n\r{i}": i for i in range(few)}},
        "tags that are lists": {"1_x": {f"t{i}": [i] for i in range(few)}},
        "folders in folders": json.loads('{"a":' * 90 + "1" + "}" * 90),
        "long tags": {"1_x": {"<b>" * 30_000: 1, "&" * 90_000: 2}},
    }
    for what, value in folders.items():
        for entry in ("ss_tag_frequency", "ss_dataset_dirs", "ss_datasets", "ss_bucket_info", "modelspec.tags"):
            stored = tensors(pair(), metadata={entry: json.dumps(value)[: limit - 900]})
            yield f"{entry}: {what}", {"base": tensors({"x.weight": [4, 4]}), "a": stored}
    spec = {
        f"modelspec.{n}": "[" * (limit // 20) for n in ("title", "author", "description", "date", "license", "tags")
    }
    yield "modelspec: deep", {"a": tensors(pair(), metadata=spec)}
    picture = "data:image/png;base64," + "A" * (limit // 2)
    yield "modelspec: a thumbnail", {"a": tensors(pair(), metadata={"modelspec.thumbnail": picture})}


# ------------------------------------------------------------------ layers that are not square


def oblong(limit: int) -> Iterator[tuple[str, Files]]:
    """Weights that are not square, with a bias each: the signs of their orientation are looked for."""
    for shape in ([1, 2], [2, 1]):
        names = some((f"h.{i}.c_fc.{x}" for i in itertools.count() for x in ("weight", "bias")), limit)
        base = tensors({n: shape if n.endswith("weight") else shape[:1] for n in names}, "BF16")
        modules = [f"base_model.model.{n.removesuffix('.weight')}" for n in names if n.endswith("weight")]
        halves = {".lora_A.weight": [1, shape[1]], ".lora_B.weight": [shape[0], 1]}
        stored = tensors({m + end: axes for m in modules[: limit // 200] for end, axes in halves.items()}, "BF16")
        for more in ({}, {"fan_in_fan_out": True}, {"use_dora": True}, {"bias": "all"}):
            config = {"peft_type": "LORA", "r": 1, **more}
            yield f"{shape}, {[*more]}", {"base": base, **configured(config, stored)}
        whole = {f"{m}.ia3_l": [1, shape[1]] for m in modules[: limit // 200]}
        config = {"peft_type": "IA3", "feedforward_modules": ["c_fc"]}
        yield f"{shape}, IA3", {"base": base, **configured(config, tensors(whole, "BF16"))}


def patterns(limit: int) -> Iterator[tuple[str, Files]]:
    """Thousands of patterns, each of which thousands of modules could match."""
    base = flat(some(counted("layers.#.q.weight"), limit))
    stored = lora((f"base_model.model.{n}" for n in counted("layers.#.q.weight")), limit, ".lora_B.weight", ".lora_A.weight")  # fmt: skip
    for what, form in {
        "ends": "q#", "any character": "layers.#.q.*", "letters before": ".*#.q", "a class": "[a-z]+\\.#\\.[qk]",
        "a count": "(?:layers\\.){1}#.q", "looks ahead": "(?=layers).*\\.#\\.q", "each its own start": "l#a?yers",
        "nothing": "(?:)#", "two wildcards": ".*.#.*q.*", "in any case": "(?i:LAYERS)\\.#\\.Q",
    }.items():  # fmt: skip
        table = {form.replace("#", str(i)): 2 for i in range(limit // (len(form) + 16))}
        for field in ("rank_pattern", "alpha_pattern"):
            config = {"peft_type": "LORA", "r": 1, field: table}
            yield f"{field}: {what}", {"base": base, **configured(config, stored)}


def planned(folder: Path) -> int:
    return command(folder / "base", folder / "a", "-o", folder / "out", "--device", "cpu", "--unmatched", "skip")


# ------------------------------------------------------------------ GGUF


def array(levels: int, width: int) -> bytes:
    """An array of arrays, some levels deep, of `width` empty arrays."""
    outer = b"".join(struct.pack("<IQ", 9, 1) for _ in range(levels))
    return outer + struct.pack("<IQ", 9, width) + struct.pack("<IQ", 4, 0) * width


def arrays(limit: int) -> Iterator[tuple[str, Files]]:
    """Headers whose arrays hold arrays, or claim more than the file has."""
    claims = {
        "deep": array(limit // 14, 1), "wide": array(1, limit // 14), "both": array(limit // 28, limit // 28),
        "texts that are not there": struct.pack("<IQ", 8, 2**40), "bytes that are not there": struct.pack("<IQ", 0, 2**62),
        "empty texts": struct.pack("<IQ", 8, limit // 9) + bytes(8) * (limit // 9),
        "truth values": struct.pack("<IQ", 7, limit - 900) + b"\1" * (limit - 900),
    }  # fmt: skip
    for what, raw in claims.items():
        for key in ("general.tags", "tokenizer.ggml.tokens", "comfy.gguf.orig_shape.x", "llama.attention.head_count"):
            head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text(key) + struct.pack("<I", 9) + raw
            yield f"{key}: {what}", {"a": head + bytes(64)}


# ------------------------------------------------------------------ batches


def jobs(limit: int) -> Iterator[tuple[str, Files]]:
    """Jobs files: aliases of aliases, and tables that are used again and again."""
    job = "{base: b, adapters: [a], output: 'o-{x}', matrix: {x: *l}}"
    many = ", ".join(["*l"] * (limit // 8))
    letters = ", ".join("abcdefghi" * (limit // 60))
    lines = ["a0: &a0 [x]", *(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]" for i in range(limit // 60))]
    files = {
        "aliases of aliases": "\n".join(["version: 1", *lines, f"jobs: *a{limit // 60}"]),
        "a list, again and again": f"version: 1\nl: &l [{letters}]\njobs: [{many[: limit // 2].rpartition(',')[0]}]",
        "a matrix for each job": f"version: 1\nx: &l [{letters[: limit // 4]}]\njobs: [{', '.join([job] * (limit // 90))}]",
        "merged tables": f"version: 1\nx: &l {{{', '.join(f'k{i}: 1' for i in range(limit // 30))}}}\njobs: [{', '.join(['{<<: *l}'] * (limit // 24))}]",
        "tables of one field merged": "version: 1\njobs: [{<<: [" + ", ".join(f"{{k{i}: 1}}" for i in range(limit // 16)) + "]}]",
        "tables without fields merged": "version: 1\ne: &e {}\njobs: [{<<: [" + ", ".join(["*e"] * (limit // 8)) + "], adapters: [a], output: '{x}{y}'}]",
        "an alias of itself": "version: 1\njobs: &l [*l, *l]",
        "anchors": "version: 1\njobs: [" + ", ".join(f"&a{i} x" for i in range(limit // 12)) + "]",
        "deep": "version: 1\njobs: " + "[" * (limit // 2),
        "deep by lines": "version: 1\njobs:\n" + "".join(" " * i + "- \n" for i in range(int((2 * limit) ** 0.5) - 20)),
        "one text of lines": "version: 1\njobs: |\n" + "  x\n" * (limit // 5),
        "quotes": "version: 1\njobs: ['" + "''" * (limit // 3) + "']",
        "comments": "version: 1\n" + "#\n" * (limit // 3) + "jobs: []",
        "a key of keys": "version: 1\n? " * 90 + "x: 1",
        "tags": "version: 1\njobs: [" + ", ".join(["!!python/object:os.system x"] * (limit // 40)) + "]",
        "numbers in sixties": "version: 1\njobs: [" + "1:" * (limit // 3) + "1]",
        "exponents": "version: 1e999999999\njobs: []",
        "underscores": "version: 1" + "_" * (limit // 2) + "\njobs: []",
    }  # fmt: skip
    for what, content in files.items():
        yield what, {"jobs.yaml": content.encode()}
    one = {"base": "b", "adapters": ["a"], "output": "o-{x}"}
    for what, more in {
        "patterns of strength": {"strength_for": {f"re:{'(a|b)' * 20}{i}": 1 for i in range(limit // 130)}},
        "a product of long names": {"matrix": {n: [n * (limit // 4000) + str(i) for i in range(90)] for n in "xy"}},
        "excluded by long names": {"matrix": {n: list(range(100)) for n in "xyz"}, "exclude": ["y" * (limit // 2)]},
    }.items():  # fmt: skip
        yield what, {"jobs.yaml": yaml({"version": 1, "jobs": [{**one, "matrix": {"x": ["1"]}, **more}]})}


GROUPS: dict[str, tuple[Callable[[int], Iterator[tuple[str, Files]]], Act]] = {
    "said": (said, shown), "oblong": (oblong, planned), "patterns": (patterns, planned), "arrays": (arrays, shown),
    "batch": (jobs, loaded),
}  # fmt: skip

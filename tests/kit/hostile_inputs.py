"""Small inputs that are built to take long, or much memory: files by name, and what to do with the folder they are in.

`python -m tests.kit.hostile_inputs FOLDER` makes all of them and gives them to the command line, in one process, and prints
one JSON line for each.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import shutil
import struct
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any

from tests.kit.files import blob

LIMIT = 60_000  # bytes of an input; with 1 000 000 all hold as well, and take 17 times as long
Files = dict[str, bytes]


# ------------------------------------------------------------------ pickles


def op(name: str, *args: int) -> bytes:
    """One operation of the unpickler."""
    return getattr(pickle, name) + b"".join(struct.pack("<I", a) for a in args)


def text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return op("BINUNICODE", len(raw)) + raw


def named(name: str) -> bytes:
    module, _, what = name.rpartition(".")
    return pickle.GLOBAL + f"{module}\n{what}\n".encode()


def archive(stream: bytes) -> bytes:
    """A torch file with this pickle in it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as z:
        z.writestr("x/data.pkl", stream)
        z.writestr("x/byteorder", b"little")
        z.writestr("x/version", b"3\n")
        z.writestr("x/data/0", bytes(64))
    return out.getvalue()


def stream(*parts: bytes) -> bytes:
    return archive(b"\x80\x02" + b"".join(parts) + pickle.STOP)


def put(n: int) -> bytes:
    return op("LONG_BINPUT", n)


def get(n: int) -> bytes:
    return op("LONG_BINGET", n)


def pickles() -> Iterator[tuple[str, bytes]]:
    """Each is one state dict to torch, or would be."""
    call, one, none = pickle.REDUCE, pickle.TUPLE1, pickle.NONE
    huge = op("LONG1")[:1] + b"\x08" + struct.pack("<q", 6 << 30)
    yield "bytearray of a number", stream(named("__builtin__.bytearray"), huge, one, call)
    yield "bytearray of a number, by name of 3", stream(named("builtins.bytearray"), huge, one, call)
    hexed = text("a" * 100) + put(0) + b"".join(
        put(0) + named("_codecs.encode") + get(0) + text("hex") + pickle.TUPLE2 + call for _ in range(30)
    )  # fmt: skip
    yield "codec after codec", stream(hexed)
    yield (
        "a codec that grows",
        stream(named("_codecs.encode"), text("a" * 100_000), text("utf-32"), pickle.TUPLE2, call),
    )
    numbers = pickle.EMPTY_LIST + put(0) + pickle.MARK + b"K\1" * (LIMIT // 10) + pickle.APPENDS
    for name in ("builtins.set", "collections.Counter", "torch.Size", "collections.OrderedDict"):
        yield (
            f"{name} of one list, again and again",
            stream(numbers, *(named(name) + get(0) + one + call for _ in range(LIMIT // 50))),
        )
    table = (
        pickle.EMPTY_DICT
        + put(0)
        + pickle.MARK
        + b"".join(text(str(n)) + none for n in range(LIMIT // 50))
        + pickle.SETITEMS
    )
    ordered = named("collections.OrderedDict") + pickle.EMPTY_TUPLE + call
    yield "a state, again and again", stream(table, *(ordered + get(0) + pickle.BUILD for _ in range(LIMIT // 50)))
    row = pickle.EMPTY_LIST + put(0) + pickle.MARK + b"K\1" * (LIMIT // 10) + pickle.APPENDS + put(1)
    rows = pickle.EMPTY_LIST + pickle.MARK + b"".join(get(1) for _ in range(LIMIT // 10)) + pickle.APPENDS
    yield "a list of one list, a hundred thousand times", stream(row, rows)
    levels = pickle.EMPTY_LIST + put(0) + b"".join(
        pickle.EMPTY_LIST + pickle.MARK + get(n) * 20 + pickle.APPENDS + put(n + 1) for n in range(40)
    )  # fmt: skip
    yield "lists of lists", stream(levels)
    pairs = pickle.EMPTY_TUPLE + put(0) + b"".join(get(n) * 2 + pickle.TUPLE2 + put(n + 1) for n in range(60))
    yield "tuples of tuples", stream(pairs)
    yield "tuples of tuples as a key", stream(pickle.EMPTY_DICT, pairs, none, pickle.SETITEM)
    yield "tuples of tuples in a set", stream(named("builtins.set"), pairs, one, one, call)
    yield "tuples of tuples as a storage", stream(pairs, pickle.BINPERSID)
    yield "tables", stream(pickle.MARK, pickle.EMPTY_DICT * (LIMIT - 600), pickle.TUPLE)
    yield "sets", stream(pickle.MARK, pickle.EMPTY_SET * (LIMIT - 600), pickle.TUPLE)
    yield "marks", stream(pickle.MARK * (LIMIT - 600))
    yield "memos", stream(none, *(put(n) for n in range(LIMIT // 5 - 200)))
    yield "one tuple in the other", stream(none, one * (LIMIT - 600))
    yield "counters", stream(named("collections.Counter"), put(0), *((get(0) + b")R") for _ in range(LIMIT // 7 - 200)))
    yield "short names", stream(pickle.MARK, *(b"U\1a" for _ in range(LIMIT // 3 - 200)), pickle.TUPLE)
    yield "a name without an end", stream(pickle.GLOBAL + b"a" * (LIMIT - 700))
    yield "a text of four gigabytes", stream(op("BINUNICODE", 0xFFFFFFFF))
    storage = text("storage") + named("torch.FloatStorage") + text("0") + text("cpu")
    giant = pickle.MARK + storage + huge + pickle.TUPLE + pickle.BINPERSID
    yield "a storage of gigabytes", stream(giant)
    sizes = b"J\xff\xff\xff\x7f" + one + b"K\0" + one
    strewn = (
        named("torch._utils._rebuild_tensor_v2")
        + pickle.MARK
        + giant
        + b"K\0"
        + sizes
        + pickle.NEWFALSE
        + ordered
        + pickle.TUPLE
        + call
    )
    yield "a number seen as gigabytes", stream(pickle.EMPTY_DICT, text("a.weight"), strewn, pickle.SETITEM)
    yield "a set of a tensor's numbers", stream(named("builtins.set"), strewn, one, call)
    yield "a set of a storage's numbers", stream(named("builtins.set"), giant, one, call)
    yield "a state that is a tensor", stream(ordered, strewn, pickle.BUILD)
    for name in ("torch.Tensor", "torch.FloatTensor", "torch.storage.UntypedStorage", "torch.storage.TypedStorage"):
        yield f"{name} of a number", stream(named(name), huge, one, call)
        yield f"a new {name} of a number", stream(named(name), huge, one, pickle.NEWOBJ)
    typed = named("torch._tensor._rebuild_from_type_v2") + pickle.MARK + named("builtins.bytearray")
    yield "a call of a call", stream(typed, named("torch.Tensor"), huge, one, pickle.EMPTY_DICT, pickle.TUPLE, call)
    legacy = b"".join(pickle.dumps(v, 2) for v in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}))
    yield (
        "a storage of gigabytes, without an archive",
        legacy + b"\x80\x02" + pickle.MARK + storage + huge + none + b"tQ.",
    )
    yield "a bytearray, without an archive", b"\x80\x02" + named("builtins.bytearray") + huge + one + call + b"."


# ------------------------------------------------------------------ text


def yaml(value: Any) -> bytes:
    """JSON is YAML."""
    return json.dumps(value).encode()


def jobs() -> Iterator[tuple[str, bytes]]:
    """Jobs files: refused, whatever they multiply out to."""
    job = {"base": "b", "adapters": ["a"], "output": "o-{x}"}

    def matrix(axes: dict[str, Any], exclude: list[Any] | None = None) -> bytes:
        return yaml({"version": 1, "jobs": [{**job, "matrix": {**axes, "exclude": exclude or []}}]})

    thousand = list(range(1000))
    yield "1000 to the third, all excluded", matrix({n: thousand for n in "xyz"}, [{"x": n} for n in thousand])
    yield "1000 to the fourth, the first excluded", matrix({n: thousand for n in "xyzw"}, [{"x": 0}])
    names = [f"n{i}" for i in range(60)]
    many = [{names[i]: "b", names[j]: "b"} for i in range(60) for j in range(i)]
    yield "two to the sixtieth", matrix({n: ["a", "b"] for n in names}, many)
    yield (
        "two to the sixteenth, and many kinds of rows",
        matrix({n: ["a", "b"] for n in names[:16]} | {n: ["b"] for n in names[16:]}, many),
    )
    yield (
        "thousands of names of one value",
        matrix({f"n{i}": ["a"] for i in range(3000)} | {n: list(range(300)) for n in "xy"}),
    )
    wrong = {"base": 1, "adaptors": ["a"], "output": "", "dtype": "fp61", "unmatched": "maybe"}
    yield "mistakes in every job", yaml({"version": 1, "jobs": [wrong] * (LIMIT // 100)})
    yield "as many names as letters", matrix({f"x{n}": ["a", "b"] for n in range(LIMIT // 20)})
    yield "thousands of adapters", yaml({"version": 1, "jobs": [{**job, "adapters": ["a"] * (LIMIT // 6)}]})
    yield "a template of templates", matrix({"x": ["b" * (LIMIT // 2)]}).replace(b"o-{x}", b"{x}" * (LIMIT // 8))
    for glob in ("/**/no-such-name", "/**/" * 900 + "x", "[" * (LIMIT // 2), "../" * (LIMIT // 4) + "*"):
        yield f"a glob of {glob[:20]}", matrix({"x": {"glob": glob}})  # type: ignore[dict-item]
    yield "a number of 5000 digits", b"version: " + b"9" * 5000
    yield (
        "numbers of other scripts",
        yaml({"version": "\u00b2", "jobs": [{**job, "max_memory": "\u0663GiB", "matrix": {"x": ["1"]}}]}),
    )
    yield "thousands of parts", yaml({"version": 1, "jobs": [{**job, "matrix": {"x": ["a"]},
                                     "strength_for": {f"re:{i}": 1 for i in range(3000)}}]})  # fmt: skip
    yield (
        "a part that never ends",
        yaml({"version": 1, "jobs": [{**job, "matrix": {"x": ["a"]}, "strength_for": {"re:(": 1}}]}),
    )


def maps() -> Iterator[tuple[str, bytes]]:
    """Tables of names (`--map`)."""
    head = "title: x\nlayouts: {native: [x.weight]}\n"
    for name, body in {
        "a range in another script": "ranges: {i: '\u00b2'}\n",
        "a range of 5000 digits": f"ranges: {{i: {'9' * 5000}}}\n",
        "a range of billions": "ranges: {i: 9999999999}\nnative: {'a.{i+1}': 'b.{i+2}'}\n",
        "a turn of 5000 digits": f"native: {{a: '[q,k]/{'9' * 5000}'}}\n",
        "a condition of nothing times H": None,
        "a condition of 5000 digits": None,
        "thousands of alternatives": f"ranges: {{i: 9999}}\nnative: {{'({'|'.join('a' * 400)}).{{i+1}}': '({'|'.join('b' * 400)}).{{i+2}}'}}\n",
        "thousands of rows of one form": "native: {" + ", ".join(f"a.{i}: b.{i}" for i in range(LIMIT // 20)) + "}\n",
    }.items():
        shape = "0Hx_" if "nothing" in name else "9" * 5000
        yield name, (head + body if body else f"title: x\nlayouts: {{native: ['x.weight {shape}']}}\n").encode()


def folders() -> Iterator[tuple[str, Files]]:
    """Models whose JSON says odd things."""
    weights = {"m/model.safetensors": tensors({"x.weight": [4, 4]})}
    for value in (1.5, [1.5], [None], {"a": 1}, True, "x" * 100_000, [["x"]], 10**400):
        for name in ("architectures", "model_type", "_class_name", "quantization_config", "tie_word_embeddings"):
            yield f"config.json: {name} is {str(value)[:20]}", {**weights, "m/config.json": yaml({name: value})}
    for file in ("model.safetensors.index.json", "model_index.json", "modules.json", "config.json"):
        for value in (
            [],
            {},
            None,
            1,
            {"weight_map": [1]},
            {"weight_map": {"x.weight": 1}},
            [{"path": 5}],
            [{"path": "../../"}],
        ):
            yield f"{file}: {str(value)[:40]}", {**weights, f"m/{file}": yaml(value)}
        yield f"{file}: deep", {**weights, f"m/{file}": b"[" * (LIMIT // 2)}
        yield f"{file}: digits", {**weights, f"m/{file}": b'{"a": ' + b"9" * (LIMIT // 2) + b"}"}


def tensors(
    shapes: dict[str, list[int]], dtype: str = "F32", metadata: dict[str, str] | None = None, fill: bytes = b"\0\0\x80?"
) -> bytes:
    """A checkpoint of these shapes, all numbers one."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    data, width = b"", {"F32": 4, "I64": 8, "BF16": 2, "U8": 1}[dtype]
    for name, shape in shapes.items():
        size = prod(shape) * width
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + size]}
        data += (fill * (size // len(fill) + 1))[:size]
    return blob(header, data)


def pair(module: str = "x") -> dict[str, list[int]]:
    return {f"{module}.lora_up.weight": [4, 2], f"{module}.lora_down.weight": [2, 4]}


def adapters() -> Iterator[tuple[str, Files]]:
    """Adapters for a base with x.weight [4, 4]; some of them are none."""
    digits = "9" * 5000
    for entry, value in {
        "block_size": {"algo": "dylora", "block_size": digits}, "block size in another script": {"algo": "dylora", "block_size": "\u0663"},
        "block_size of a list": {"algo": "dylora", "block_size": [1]}, "algo of a list": {"algo": [1], "block_size": {}},
        "preset": {"apply_preset": {"module_algo_map": {"x": {"algo": 5}}}}, "bypass": {"algo": "boft", "bypass_mode": [[]]},
    }.items():  # fmt: skip
        yield f"ss_network_args: {entry}", {"a": tensors(pair(), metadata={"ss_network_args": json.dumps(value)})}
    for slot in ("alpha", "lora_alpha", "dora_scale", "reshape_weight", "bias_indices", "on_input", "scale"):
        for shape in ([], [0], [0, 4], [4, 0], [1, 1], [4, 4, 4]):
            yield f"{slot} {shape}", {"a": tensors({**pair(), f"x.{slot}": shape})}
            yield (
                f"{slot} {shape} of whole numbers",
                {"a": tensors({**pair(), f"x.{slot}": shape}, "I64", fill=b"\xff")},
            )
        yield f"{slot} alone", {"a": tensors({f"x.{slot}": [0]}, "BF16")}
    yield "a name of digits", {"a": tensors(pair(f"text_encoder_{digits}.x"))}
    yield (
        "a base of digits",
        {"base": tensors({f"conditioner.embedders.{digits}.model.x.weight": [4, 4]}), "a": tensors(pair())},
    )
    yield "thousands of names", {"a": tensors({f"x.{i}.lora_up.weight": [0] for i in range(LIMIT // 90)})}
    configs: dict[str, Any] = {
        "version of digits": {"peft_type": "OFT", "peft_version": f"{digits}.{digits}", "use_cayley_neumann": True},
        "rank of digits": {"peft_type": "LORA", "r": 10**400}, "alpha of digits": {"peft_type": "LORA", "lora_alpha": 10**400},
        "a key for each of many": {"peft_type": "LORA", "r": 2, "rank_pattern": {f"m{i}.{'a' * (i % 40)}": i for i in range(LIMIT // 60)}},
        "patterns": {"peft_type": "LORA", "r": 2, "rank_pattern": {f"(a|b)*{i}": i for i in range(LIMIT // 20)}},
        "a pattern of alternatives": {"peft_type": "LORA", "r": 2, "rank_pattern": {"|".join(["(a?)*x"] * 10_000): 2}},
        "targets": {"peft_type": "LORA", "r": 2, "target_parameters": [f"m{i}" for i in range(LIMIT // 12)], "target_modules": "(a|a)*" * 30},
        "a regular expression for each of many": {"peft_type": "LORA", "r": 2, "alpha_pattern": {rf"m\.{i}\.(q|k)": i for i in range(LIMIT // 20)}},
        "a name for each of many": {"peft_type": "LORA", "r": 2, "alpha_pattern": {f"m.{i}.q": i for i in range(LIMIT // 12)}},
        "ends": {"peft_type": "LORA", "modules_to_save": [f"m{i}" for i in range(LIMIT // 10)], "exclude_modules": [f"m{i}" for i in range(LIMIT // 10)]},
        "tokens": {"peft_type": "TRAINABLE_TOKENS", "token_indices": [2**63]}, "kind": {"peft_type": [1]}, "no kind": {"r": 1},
        "topk": {"peft_type": "VBLORA", "topk": -1}, "group": {"peft_type": "ROAD", "group_size": 0},
    }  # fmt: skip
    for name, config in configs.items():
        stored = tensors(pair("base_model.model.x"))
        yield (
            f"adapter_config.json: {name}",
            {"a/adapter_model.safetensors": stored, "a/adapter_config.json": yaml(config)},
        )


SPENT: list[float] = []
"""Processor seconds of every command."""


def command(*arguments: object) -> int:
    """The exit code of the program in this process; AssertionError unless a failure is told as one error of ours."""
    started = time.process_time()
    from lora_merge.cli.main import main

    sys.argv = ["lora-merge", *map(str, arguments)]
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            SPENT.append(time.process_time() - started)
    in_table = (arguments[0], code) == ("inspect", 4)  # a misfit may be told there
    if code and (errors.getvalue() or not in_table):
        assert "\n  where: " in errors.getvalue(), errors.getvalue()[:300]
        assert "\n  fix:   " in errors.getvalue(), errors.getvalue()[:300]
        assert "Traceback" not in errors.getvalue()
        assert len(errors.getvalue()) < 20_000
    return code


def looked_at(folder: Path) -> int:
    """`inspect` of each file, and a merge."""
    codes = [command("inspect", folder / name) for name in ("m", "a", "base") if (folder / name).exists()]
    if not (folder / "base").exists():
        (folder / "base").write_bytes(tensors({"x.weight": [4, 4]}))
    base = folder / ("m" if (folder / "m").exists() else "base")
    if not (folder / "a").exists():
        (folder / "a").write_bytes(tensors(pair()))
    table = ["--map", folder / "map.yaml"] if (folder / "map.yaml").exists() else []
    codes.append(command(base, folder / "a", "-o", folder / "out", "--device", "cpu", *table))
    return max(codes)


def loaded(folder: Path) -> int:
    return command("batch", folder / "jobs.yaml", "--dry-run")


# ------------------------------------------------------------------ all


def opened(folder: Path) -> int:
    return command("inspect", folder / "x.pt")


def inputs() -> Iterator[tuple[str, Files, Callable[[Path], Any]]]:
    """(name, files, what to do with their folder)."""
    for name, content in pickles():
        yield f"pickle: {name}", {"x.pt": content}, opened
    for name, content in jobs():
        yield f"jobs: {name}", {"jobs.yaml": content}, loaded
    for name, content in maps():
        yield f"map: {name}", {"map.yaml": content}, looked_at
    for name, files in (*folders(), *adapters()):
        yield name, files, looked_at


def peak() -> float:
    """The most memory since it was set back, in MB; 0 where the system does not say."""
    status = Path("/proc/self/status")
    line = (
        next((x for x in status.read_text().splitlines() if x.startswith("VmHWM")), "0 0") if status.exists() else "0 0"
    )
    return int(line.split()[1]) / 1024


def run(root: Path, cases: Iterable[tuple[str, Files, Callable[[Path], Any]]]) -> None:
    """Give every input to the command line; one line each: name, bytes, what came of it, seconds of the slowest command, MB."""
    import torch
    import torch._subclasses.fake_tensor

    import lora_merge.batch.run
    import lora_merge.engine.merge
    import lora_merge.recipes.replay
    from lora_merge.process import collect_rarely

    torch.set_num_threads(1)
    collect_rarely()  # as the program does
    assert lora_merge.__version__
    for number, (name, files, act) in enumerate(cases):
        folder = root / str(number)
        folder.mkdir()
        for file, content in files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(content)
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        before = peak()
        SPENT.clear()
        try:
            answer: Any = act(folder)
        except Exception as e:  # noqa: BLE001  # one that is none of ours is what is looked for
            answer = repr(e)[:300]
        shutil.rmtree(folder)
        print(
            json.dumps(
                [
                    name,
                    max(map(len, files.values()), default=0),
                    answer,
                    round(max(SPENT, default=0), 2),
                    round(peak() - before),
                ]
            ),
            flush=True,
        )


if __name__ == "__main__":
    run(Path(sys.argv[1]), inputs())

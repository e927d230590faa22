"""Files of up to a megabyte whose names, entries or fields are as many, as long, or as alike as that allows.

`python -m tests.kit.hostile_names FOLDER [BYTES [GROUP [EVERY [FIRST]]]]` makes them, or one group of GROUPS, or each
EVERY-th of it from FIRST on, and gives them to the command line, in one process; one JSON line for each, as `hostile_inputs` does.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lora_merge.adapters.suffixes import SUFFIXES
from lora_merge.files.formats.unread import SIGNS
from lora_merge.models.architectures import shipped
from lora_merge.models.prefixes import PREFIXES
from tests.kit.hostile_inputs import Files, command, pair, run, tensors, yaml

MEGABYTE = 1_000_000
Names = Iterable[str]
Act = Callable[[Path], int]


# ------------------------------------------------------------------ names


def counted(form: str) -> Iterator[str]:
    """The form with 0, 1, 2, … for `#`."""
    return (form.replace("#", str(i)) for i in itertools.count())


def nested(level: str) -> Iterator[str]:
    """x, a.x, a.a.x, …: each name one level deeper."""
    return (level * i + "x.weight" for i in itertools.count())


def alike() -> Iterator[str]:
    """Names that are one name once every dot is an underscore: a.b.c, a_b.c, a.b_c, …"""
    letters = "abcdefghijklmnopqrst"
    return (
        "".join(a + s for a, s in zip(letters, (*choice, ""), strict=True)) + ".weight"
        for choice in itertools.product("._", repeat=len(letters) - 1)
    )


def products(*axes: Sequence[str]) -> Iterator[str]:
    return map("".join, itertools.product(*axes))


def numbers(count: int) -> list[str]:
    return list(map(str, range(count)))


def models() -> Iterator[tuple[str, dict[str, list[int]]]]:
    """For every layout of every known model: the tensors that tell it."""
    for architecture in shipped():
        for layout, conditions in architecture.layouts.items():
            shapes = {c.key: [size(a) for a in c.shape or ("1", "1")] for c in conditions if not c.absent}
            yield f"{architecture.title} ({layout})", shapes


def size(axis: str) -> int:
    """A length that fits an axis of a condition, with 1 for each of its letters."""
    digits = axis.rstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ_")
    return int(digits or 1)


BLOCK = "transformer_blocks.#.attn1.to_"
SHAPES: dict[str, Callable[[], Iterator[str]]] = {
    "one name": lambda: iter(["a." * 440_000 + "weight"]),
    "names of 9000 letters": lambda: (f"{i}." + "ab." * 3000 + "weight" for i in itertools.count()),
    "short names": lambda: counted("#"),
    "short names with a dot": lambda: counted("#.weight"),
    "layers": lambda: counted("layers.#.q.weight"),
    "biases": lambda: counted("layers.#.q.bias"),
    "many levels": lambda: counted("#." * 40 + "weight"),
    "ever deeper": lambda: nested("a."),
    "ever deeper, numbers": lambda: nested("0."),
    "ever deeper, underscores": lambda: nested("a_"),
    "ever longer numbers": lambda: ("1" * i + ".weight" for i in itertools.count(1)),
    "braces": lambda: counted("{i}.{i+#}.{.weight"),
    "percents": lambda: counted("%s%#.weight"),
    "separators": lambda: ("a" + "." * i + "_" * i + "b.weight" for i in itertools.count()),
    "slashes": lambda: counted("x/#.weight"),
    "points": lambda: ("." * i for i in itertools.count(1)),
    "all spellings of one name": alike,
    "numbers between": lambda: products(*[["1", "2"], [".", "_"]] * 9, [".weight"]),
    "prefix each": lambda: counted("p#.model.diffusion_model.x.weight"),
    "encoders": lambda: counted("conditioner.embedders.#.model.x.weight"),
    "encoders by name": lambda: counted("text_encoders.e#.transformer.x.weight"),
    "encoders by number": lambda: counted("text_encoder_#.x.weight"),
    "containers in containers": lambda: nested("model.diffusion_model."),
    "unet.unet.": lambda: nested("unet."),
    "prefix on prefix": lambda: products([""], *[[p for p, _ in PREFIXES]] * 3, ["x.weight"]),
    "module.module.": lambda: nested("module."),
    "_orig_mod._orig_mod.": lambda: nested("_orig_mod."),
    "base_layer.base_layer.": lambda: nested("base_layer."),
    "base_layer": lambda: (f"l.{i}.{x}" for i in itertools.count() for x in ("base_layer.weight", "lora_A.default.weight")),
    "base_model.model.": lambda: nested("base_model.model."),
    "wrapped": lambda: counted("base_model.model.model.layers.#.q_proj.base_layer.weight"),
    "kohya": lambda: counted("lora_unet_down_blocks_#_attentions_0_transformer_blocks_0_attn1_to_q.weight"),
    "kohya, no number": lambda: (f"lora_unet_{'_'.join('ab' * i)}.weight" for i in itertools.count(1)),
    "diffusers": lambda: (f"{BLOCK.replace('#', str(i))}{p}.weight" for i in itertools.count() for p in "qkv"),
    "experts": lambda: (f"model.layers.0.mlp.experts.{i}.{p}_proj.weight" for i in itertools.count() for p in ("up", "gate", "down")),
    "layers of experts": lambda: (f"model.layers.{i}.mlp.experts.{j}.up_proj.weight" for i in itertools.count() for j in range(8)),
    "experts stacked": lambda: (f"model.layers.{i}.mlp.experts.{p}" for i in itertools.count() for p in ("gate_up_proj", "down_proj")),
    "q without k": lambda: counted("model.layers.#.self_attn.q_proj.weight"),
    "qkv": lambda: (f"model.layers.{i}.self_attn.{p}_proj.weight" for i in itertools.count() for p in ("qkv", "o")),
    "q, k and v": lambda: (f"model.layers.{i}.self_attn.{p}_proj.weight" for i in itertools.count() for p in "qkvo"),
    "gate and up": lambda: (f"model.layers.{i}.mlp.{p}.weight" for i in itertools.count() for p in ("gate_up_proj", "down_proj")),
    "Conv1D": lambda: (f"transformer.h.{i}.{p}.weight" for i in itertools.count() for p in ("attn.c_attn", "attn.c_proj", "mlp.c_fc")),
    "tied ends": lambda: (f"m{i}.{p}.weight" for i in itertools.count() for p in ("lm_head", "model.embed_tokens", "wte")),
    "unet blocks": lambda: (f"model.diffusion_model.input_blocks.{i}.{j}.transformer_blocks.{k}.attn1.to_q.weight" for i in itertools.count() for j in range(3) for k in range(3)),
    "double blocks": lambda: (f"double_blocks.{i}.img_attn.{p}.weight" for i in itertools.count() for p in ("qkv", "proj")),
    "norms": lambda: (f"layers.{i}.norm.{p}" for i in itertools.count() for p in ("scale", "gamma", "beta")),
    "processors": lambda: counted("blocks.#.processor.to_q_lora.up.weight"),
    "Unicode": lambda: ("".join(map(chr, (0x4E00 + i % 9000, 0xE9, 0x301))) + f"{i}.weight" for i in itertools.count()),
    "line breaks": lambda: counted("a\n#\r.weight"),
    "averages": lambda: counted("model_ema.diffusion_model#.weight"),
    "letters in another case": lambda: products(*[["a", "A"]] * 14, [".weight"]),
}  # fmt: skip


def some(names: Names, limit: int, cost: int = 72) -> list[str]:
    """As many names as a header of `limit` bytes holds, if each takes `cost` bytes beside its letters."""
    fitting: dict[str, None] = {}
    for name in names:
        limit -= cost + len(json.dumps(name))
        if limit < 0:
            break
        fitting[name] = None
    return list(fitting)


def flat(names: Names, shape: Sequence[int] = (1, 1)) -> bytes:
    """A checkpoint of these tensors, all of one shape."""
    return tensors({name: list(shape) for name in names}, "BF16", fill=b"\x80?")


def lora(names: Names, limit: int, up: str = ".lora_up.weight", down: str = ".lora_down.weight") -> bytes:
    """A LoRA of rank 1 for the layers with these weights, as many as fit."""
    modules = (n.removesuffix(".weight") for n in names)
    return flat(k for m in some(modules, limit // 2, 90) for k in (m + up, m + down))


# ------------------------------------------------------------------ files


def named(limit: int) -> Iterator[tuple[str, Files]]:
    """Every kind of names as a base, as an adapter, as both, and as both with an adapter in kohya's spelling."""
    for kind, names in SHAPES.items():
        base = flat(some(names(), limit))
        yield f"{kind}: base", {"base": base, "a": tensors(pair())}
        yield f"{kind}: adapter", {"a": lora(names(), limit)}
        yield f"{kind}: both", {"base": base, "a": lora(names(), limit)}
        peft = (f"base_model.model.{n}" for n in names())
        yield f"{kind}: of PEFT", {"base": base, **configured({"peft_type": "LORA", "r": 1}, lora(peft, limit, ".lora_B.weight", ".lora_A.weight"))}  # fmt: skip
        kohya = (f"lora_unet_{n.removesuffix('.weight').replace('.', '_')}" for n in names())
        yield f"{kind}: of kohya", {"base": base, "a": lora(kohya, limit)}
        yield f"{kind}: other names", {"base": base, "a": lora((f"other.{n}" for n in names()), limit)}


def endings(limit: int) -> Iterator[tuple[str, Files]]:
    """Every ending of an adapter's tensors, alone on thousands of layers that the base has."""
    base = flat(some(counted("layers.#.q.weight"), limit))
    for row in SUFFIXES:
        for shape in ((1, 1), (0,)):
            yield (
                f"{row.ending} {shape}",
                {"base": base, "a": flat(some(counted(f"layers.#.q{row.ending}"), limit), shape)},
            )
    kinds = sorted({name for row in SUFFIXES for name in row.algorithms})
    for kind in kinds:
        of_kind = [row.ending for row in SUFFIXES if kind in row.algorithms]
        names = (f"layers.{i}.q{ending}" for i in itertools.count() for ending in of_kind)
        yield f"all of {kind}", {"base": base, "a": flat(some(names, limit))}
    every = (f"layers.{i}.q{row.ending}" for i in itertools.count() for row in SUFFIXES)
    yield "all endings", {"base": base, "a": flat(some(every, limit))}
    parts = (f"layers.0.q.lora_{x}.{i}.weight" for i in range(9999) for x in ("up", "down"))
    yield "thousands of parts", {"base": base, "a": flat(some(parts, limit))}
    several = (f"layers.0.q.lora_{x}.n{i}.weight" for i in itertools.count() for x in "AB")
    yield "thousands of adapters' names", {"base": base, "a": flat(some(several, limit))}
    alphas = (f"layers.0.q{e}" + "" * i for i in itertools.count() for e in (".alpha", ".lora_alpha"))
    yield "alphas", {"base": base, "a": flat(some(alphas, 9000))}


def methods(limit: int) -> Iterator[tuple[str, Files]]:
    """Every method of PEFT, on thousands of layers."""
    from lora_merge.adapters.peft.methods import PEFT_METHODS

    base = flat(some(counted("layers.#.q.weight"), limit))
    for name, method in PEFT_METHODS.items():
        suffixes = list(method.suffixes) or [".lora_A.weight", ".lora_B.weight"]
        names = (f"base_model.model.layers.{i}.q{ending}" for i in itertools.count() for ending in suffixes)
        stored = flat(some(names, limit))
        for config in ({}, {"r": 1, "lora_alpha": 1, "target_modules": ["q"], "peft_version": "0.17.0"}):
            yield (
                f"PEFT {name}, {len(config)} fields",
                {"base": base, **configured({"peft_type": name, **config}, stored)},
            )
        whole = [*(e for e in suffixes), ""]
        yield f"PEFT {name}, shared", {"base": base, **configured({"peft_type": name, "r": 1}, flat([f"base_model{e}" for e in whole] + some(names, limit)))}  # fmt: skip


def configured(config: Any, stored: bytes) -> Files:
    return {
        "a/adapter_model.safetensors": stored,
        "a/adapter_config.json": config if isinstance(config, bytes) else yaml(config),
    }


def quantised(limit: int) -> Iterator[tuple[str, Files]]:
    """Tensors that stand beside quantised weights, and what a header says of them."""
    for last in SIGNS:
        for others in (("weight",), ("weight", "scale"), ()):
            names = (f"layers.{i}.q.{x}" for i in itertools.count() for x in (last, *others))
            yield f"{last} beside {others}", {"base": flat(some(names, limit)), "a": tensors(pair("layers.0.q"))}
        deep = (f"{'a.' * i}{last}" for i in itertools.count())
        yield f"{last}, ever deeper", {"base": flat(some(deep, limit))}
        inside = (f"{'weight.' * i}{last}" for i in itertools.count())
        yield f"{last} of weights", {"base": flat(some(inside, limit)), "a": lora(counted("weight.#"), limit)}
    layers = {f"layers.{i}.q": {"format": "float8_e4m3fn"} for i in range(limit // 60)}
    for entry in ("_quantization_metadata", "quantization_config"):
        for what, value in {
            "layers": {"format_version": "1.0", "layers": layers}, "layers of lists": {"layers": {k: [1] for k in layers}},
            "a list": list(layers), "text": "x" * (limit - 900), "other layers": {"layers": {f"x{k}": v for k, v in layers.items()}},
        }.items():  # fmt: skip
            said = json.dumps(value)[: limit - 900]
            yield f"{entry}: {what}", {"base": tensors({"layers.0.q.weight": [4, 4]}, metadata={entry: said})}
        yield f"{entry}: deep", {"base": tensors({"x.weight": [4, 4]}, metadata={entry: "[" * (limit // 2)})}
        said = json.dumps(
            {"format_version": "1.0", "layers": {f"l.{i}": {"format": "float8_e4m3fn"} for i in range(limit // 120)}}
        )
        stored = some(
            (f"l.{i}.{x}" for i in itertools.count() for x in ("weight", "weight_scale", "comfy_quant")), limit // 2
        )
        yield (
            f"{entry}: stored layers",
            {"base": tensors({name: [1, 1] for name in stored}, "U8", {entry: said}, b"\1")},
        )


FIELDS = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules", "modules_to_save", "target_parameters",
          "layers_pattern", "layers_to_transform", "layer_replication", "bias", "fan_in_fan_out", "init_lora_weights", "use_dora", "peft_version",
          "base_model_name_or_path", "trainable_token_indices", "auto_mapping", "feedforward_modules", "revision", "lora_bias", "eva_config")  # fmt: skip
CONFIG = ("architectures", "model_type", "_class_name", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "text_config",
          "vision_config", "quantization_config", "quantization", "tie_word_embeddings", "torch_dtype", "layer_types", "rope_scaling", "auto_map")  # fmt: skip


def values(limit: int) -> Iterator[tuple[str, Any]]:
    """What a field may hold, of up to `limit` bytes."""
    few = limit // 12
    yield "a long text", "x" * (limit - 900)
    yield "a list of texts", [f"m{i}" for i in range(few)]
    yield "a list of one text", ["q"] * (few * 2)
    yield "a list of numbers", list(range(few))
    yield "a list of lists", [[i, i + 1] for i in range(few)]
    yield "an object", {f"layers.{i}.q": i for i in range(limit // 24)}
    yield "an object of patterns", {f".*\\.{i}\\..*(q|k)": i for i in range(limit // 24)}
    yield "an object of objects", {f"l{i}": {"q": {"k": i}} for i in range(limit // 30)}
    yield "a pattern", "|".join(f"layers\\.{i}\\.q" for i in range(5000))
    yield "a pattern of loops", "(?:" * 40 + "a" + ")*" * 40 + "q"
    yield "a pattern of options", "a?" * 3000 + "q"
    yield "a number of digits", 10**4000
    nest: Any = 1
    for _ in range(95):
        nest = [nest]
    yield "deep", nest


def fields(limit: int) -> Iterator[tuple[str, Files]]:
    """Every field of both configurations, with all that it may hold."""
    base = flat(some(counted("layers.#.q.weight"), limit))
    peft = [f"base_model.model.{n}" for n in itertools.islice(counted("layers.#.q.weight"), limit // 100)]
    stored = lora(peft, limit, ".lora_B.weight", ".lora_A.weight")
    few, few_stored = (
        flat(some(counted("layers.#.q.weight"), limit // 10)),
        lora(peft, limit // 10, ".lora_B.weight", ".lora_A.weight"),
    )
    for what, value in values(limit):
        for field in FIELDS:
            config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, field: value}
            many = field.endswith(("pattern", "modules", "parameters", "save"))  # asked about for every module
            yield (
                f"adapter_config.json: {field} is {what}",
                {"base": base if many else few, **configured(config, stored if many else few_stored)},
            )
        for field in CONFIG:
            model = {"m/model.safetensors": few, "m/config.json": yaml({"model_type": "llama", field: value})}
            yield f"config.json: {field} is {what}", {**model, "a": few_stored}
    layers = [f"{'a' * 20}.{i}.q" for i in range(3000)]
    loops = {"peft_type": "LORA", "r": 1, "alpha_pattern": {"(?:" * 90 + "a" + ")*" * 90 + "q": 2}}
    adapter = lora([f"base_model.model.{layer}" for layer in layers], limit, ".lora_B.weight", ".lora_A.weight")
    weights = flat(f"{layer}.weight" for layer in layers)
    yield "90 loops on 3000 modules", {"base": weights, **configured(loops, adapter)}
    for depth in (10, 30, 90):
        for text in (
            "(?:" * depth + "a?" + ")*" * depth + "b",
            "(?:" * depth + "a|a" + ")+" * depth + "b",
            "(?=" * depth + ".*" + ")" * depth,
        ):
            for field in ("alpha_pattern", "rank_pattern"):
                yield (
                    f"{field}: {text[:12]} {depth}",
                    {"base": base, **configured({"peft_type": "LORA", "r": 1, field: {text: 1}}, stored)},
                )
            yield f"target_modules: {text[:12]} {depth}", {"base": base, **configured({"peft_type": "LORA", "r": 1, "target_modules": text, "modules_to_save": text}, stored)}  # fmt: skip


ENTRIES = ("ss_network_args", "lycoris_config", "ss_network_module", "ss_base_model_version", "ss_tag_frequency", "modelspec.architecture",
           "lora_adapter_metadata", "format", "lora_merge.recipe", "sd_merge_recipe", "sd_merge_models", "modelspec.merged_from", "recipe")  # fmt: skip


def metadata(limit: int) -> Iterator[tuple[str, Files]]:
    """What the headers of both files say."""
    for what, value in values(limit - 1000):
        said = value if isinstance(value, str) else json.dumps(value)
        for entry in ENTRIES:
            yield f"{entry} is {what}", {"base": tensors({"x.weight": [4, 4]}, metadata={entry: said}), "a": tensors(pair(), metadata={entry: said})}  # fmt: skip
        said = json.dumps({"algo": value, "block_size": value, "apply_preset": {"module_algo_map": value}})[
            : limit - 900
        ]
        yield f"arguments are {what}", {"a": tensors(pair(), metadata={"ss_network_args": said})}
        said = json.dumps({"unet.rank_pattern": value, "unet.r": 1, "unet.alpha_pattern": value})
        yield (
            f"diffusers, {what}",
            {"a": tensors(pair("unet.x"), metadata={"lora_adapter_metadata": said[: limit - 900]})},
        )
    entries = {f"k{i}": "v" for i in range(limit // 15)}
    yield (
        "thousands of entries",
        {"base": tensors({"x.weight": [4, 4]}, metadata=entries), "a": tensors(pair(), metadata=entries)},
    )
    yield (
        "one long entry",
        {"base": tensors({"x.weight": [4, 4]}, metadata={"k" * (limit // 2): "\x00" * (limit // 13)})},
    )


def indexed(limit: int) -> Iterator[tuple[str, Files]]:
    """Folders: what an index and its kin list."""
    weights = {"m/model.safetensors": tensors({"x.weight": [4, 4]})}
    place = "m/model.safetensors.index.json"
    few = limit // 40
    for what, table in {
        "names that no file has": {f"x{i}.weight": "model.safetensors" for i in range(few)},
        "files that are not there": {f"x{i}": f"f{i}.safetensors" for i in range(few)},
        "one file in many spellings": {f"x{i}": "./" * (i % 300) + "model.safetensors" for i in range(few // 8)},
        "files outside": {f"x{i}": "../" * 9 + f"f{i}.safetensors" for i in range(few // 2)},
        "the same name": {"x.weight": "model.safetensors"},
        "line breaks": {f"x\n{i}": "model\n.safetensors" for i in range(few)},
    }.items():
        yield f"{what}", {**weights, place: yaml({"metadata": {}, "weight_map": table})}
    yield (
        "metadata",
        {
            **weights,
            place: yaml(
                {"metadata": {f"k{i}": i for i in range(few)}, "weight_map": {"x.weight": "model.safetensors"}}
            ),
        },
    )
    for file, value in {
        "model_index.json": {f"c{i}": ["diffusers", "UNet2DConditionModel"] for i in range(few)},
        "modules.json": [{"idx": i, "name": str(i), "path": f"{i}_x", "type": "t"} for i in range(few // 2)],
        "config.json": {f"c{i}": i for i in range(few)},
        "generation_config.json": {f"c{i}": i for i in range(few)},
        "tokenizer.json": {"model": {"vocab": {f"c{i}": i for i in range(few)}}},
    }.items():
        yield f"{file}: many", {**weights, f"m/{file}": yaml(value)}
    yield "thousands of side files", {**weights, **{f"m/s{i}.json": b"{}" for i in range(3000)}}


def typed(limit: int) -> Iterator[tuple[str, Files]]:
    """Options with texts as long as a command line allows (128 KiB each)."""
    limit = min(limit, 120_000)
    for what, said in {
        "blocks": ",".join(f"IN{i:02}=0.5" for i in range(limit // 9)), "ranges": ",".join("layers.0-999999999=0" for _ in range(limit // 21)),
        "a list": "lbw=" + ",".join("1" for _ in range(limit // 2)), "one block": "IN04=" + "9" * 4000, "a range": f"layers.0-{'9' * 3000}=0",
        "dashes": "-" * (limit - 9), "commas": "," * (limit - 9), "colons": "1:" + "te=0," * (limit // 6), "parts": "1:" + ",".join(f"re:a{i}=0" for i in range(limit // 12)),
        "numbers": ",".join("0.5" for _ in range(limit // 4)), "letters": "x" * (limit - 9), "nested": "re:" + "(" * 90 + "a" + ")*" * 90 + "=0.5",
    }.items():  # fmt: skip
        for option in ("-s", "--strength-for", "--map", "--setting", "--dtype", "--max-memory", "--metadata"):
            yield f"{option} {what}", {"options": json.dumps([option, said]).encode()}


# ------------------------------------------------------------------ what is done with them


def looked_at(folder: Path) -> int:
    """`inspect` of each file, `parts` of the base, and a merge; with options only that."""
    options = json.loads((folder / "options").read_bytes()) if (folder / "options").exists() else []
    if not (folder / "base").exists() and not (folder / "m").exists():
        (folder / "base").write_bytes(tensors({"x.weight": [4, 4]}))
    if not (folder / "a").exists():
        (folder / "a").write_bytes(tensors(pair()))
    base = folder / ("m" if (folder / "m").exists() else "base")
    codes = [] if options else [command("inspect", folder / "a"), command("inspect", base), command("parts", base)]
    out = folder / ("out.gguf" if base.is_file() and base.read_bytes()[:4] == b"GGUF" else "out")
    codes.append(command(base, folder / "a", "-o", out, "--device", "cpu", "--unmatched", "skip", *options))
    return max(codes)


def verified(folder: Path) -> int:
    """`verify` and `replay` of a file that says that it is an output."""
    return max(command("verify", folder / "out", "--full"), command("replay", folder / "out", "-o", folder / "again"))


def recipes(limit: int) -> Iterator[tuple[str, Files]]:
    for what, value in values(limit - 2000):
        for field in ("adapters", "base", "options", "parts", "map", "strength", "version"):
            recipe = {
                "version": 1,
                "base": {"name": "b", "sha256": "0" * 64},
                "adapters": [{"name": "a", "strength": 1, "sha256": "0" * 64}],
                field: value,
            }
            yield (
                f"{field} is {what}",
                {"out": tensors({"x.weight": [4, 4]}, metadata={"lora_merge.recipe": json.dumps(recipe)})},
            )
            one = {"name": "a", "sha256": "0" * 64, "strength": 1, field: value}
            recipe = {**recipe, "adapters": [one]}
            yield (
                f"an adapter's {field} is {what}",
                {"out": tensors({"x.weight": [4, 4]}, metadata={"lora_merge.recipe": json.dumps(recipe)})},
            )
    one = {"name": "a", "sha256": "0" * 64, "strength": 1}
    recipe = {"version": 1, "base": {"name": "b", "sha256": "0" * 64}, "adapters": [one] * (limit // 110)}
    yield (
        "thousands of adapters",
        {"out": tensors({"x.weight": [4, 4]}, metadata={"lora_merge.recipe": json.dumps(recipe)})},
    )


def known(limit: int) -> Iterator[tuple[str, Files]]:
    """Bases with the signs of a known model: with thousands of layers more, and thousands of such networks."""
    for kind, shapes in models():
        layers = (re.sub("[0-9]+", str(i), n) for i in itertools.count() for n in shapes)
        more = {name: [1, 1] for name in some(layers, limit - 9000)}
        flat_names = (n.replace(".", "_").removesuffix("_weight") for n in more)
        yield kind, {"base": tensors({**more, **shapes}, "BF16"), "a": lora(flat_names, limit)}
        below = (f"text_encoders.e{i}.{n}" for i in itertools.count() for n in shapes)
        yield f"{kind}, many times", {"base": flat(some(below, limit)), "a": tensors(pair())}


GROUPS: dict[str, tuple[Callable[[int], Iterator[tuple[str, Files]]], Act]] = {
    "names": (named, looked_at), "endings": (endings, looked_at), "methods": (methods, looked_at), "models": (known, looked_at),
    "quantised": (quantised, looked_at), "fields": (fields, looked_at), "metadata": (metadata, looked_at),
    "index": (indexed, looked_at), "recipe": (recipes, verified), "options": (typed, looked_at),
}  # fmt: skip


def groups() -> dict[str, tuple[Callable[[int], Iterator[tuple[str, Files]]], Act]]:
    """All groups: of names, of the commands that write adapters, and of what is shown."""
    from tests.kit.hostile_commands import GROUPS as COMMANDS
    from tests.kit.hostile_views import GROUPS as VIEWS

    return {**GROUPS, **COMMANDS, **VIEWS}


def inputs(limit: int, word: str = "") -> Iterator[tuple[str, Files, Act]]:
    """(name, files, what to do with their folder) of one group, or of all."""
    for group, (files_of, act) in groups().items():
        if group.startswith(word):
            for name, files in files_of(limit):
                yield f"{group}: {name}", files, act


if __name__ == "__main__":
    folder, limit, word, every, first = (*sys.argv[1:], *("", str(MEGABYTE), "", "1", "0")[len(sys.argv) - 1 :])
    run(Path(folder), itertools.islice(inputs(int(limit), word), int(first), None, int(every)))

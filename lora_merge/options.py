"""The tables of all options, and the checks of their values; each wrong value is a UsageError.

The command line, jobs files, recipes and plans of batches take names, defaults and help from the tables. Tests compare
them with the lists that are written out for type checkers (typed_options.py, `Job`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from os import PathLike
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

from .dtypes import COMPUTE_DTYPES, DTYPE_ROWS, DTYPES, GGUF_TYPES, QUANTISED_DTYPES
from .errors import ResourceError, UsageError
from .grouping import by_key
from .merge_methods import DIVISORS, ELECTIONS, METHODS, SAME_COMBINATION, SUM
from .text import HUGE, described, is_finite, number_of, python_code, shown, with_article

MEANT: Final[Mapping[str, str]] = MappingProxyType({
    **dict.fromkeys(("precision", "save_precision", "torch_dtype"), "dtype"),
    **dict.fromkeys(("out", "output_path", "output_dir", "output_file", "save_to"), "output"),
    **dict.fromkeys(("weight", "weights", "ratio", "ratios", "multiplier", "alpha", "lora_scale"), "strengths"),
    **dict.fromkeys(("force", "exist_ok"), "overwrite"),
    **dict.fromkeys(("model", "base_model", "model_path", "checkpoint", "ckpt"), "base"),
    **dict.fromkeys(("lora", "loras", "adapter_path", "lora_path"), "adapters"),
    **dict.fromkeys(("dim", "network_dim", "new_rank", "lora_rank"), "rank"),
    "format": "to", "to": "format",
})  # fmt: skip
"""Keyword of other libraries → the one of the same meaning here."""

AN_ADAPTER: Final = 'a path, or a pair such as ("a.safetensors", 0.8)'
"""What an adapter is in Python, in words."""

GIVE_STATE_DICT: Final = "give its state_dict()"
"""The advice on a module in the place of an adapter, for functions that take state dicts."""

REGEX: Final = "re:"
"""The beginning of a part of `--strength-for` that is a regular expression for keys of the base."""

NO_DEFAULTS: Final = "none"
"""The value of `--keep-precision` with which the usual exceptions are quantised too."""

BLOCK_WEIGHTS: Final = "lbw"
"""The part whose value is a list of one weight for each block, or the name of a preset; see models/blocks.py."""

BLOCK_LIST: Final = f"{BLOCK_WEIGHTS}:"
"""The beginning of a part whose name holds these weights as text."""

Unmatched: TypeAlias = Literal["error", "skip"]
OnOverflow: TypeAlias = Literal["error", "saturate"]
Rounding: TypeAlias = Literal["nearest", "stochastic"]
MethodName: TypeAlias = Literal[
    "sum", "compose", "mean", "ties", "dare", "dare_ties", "della", "della_ties", "breadcrumbs", "breadcrumbs_ties",
    "prune", "slerp", "karcher", "model_stock", "consensus",
]  # fmt: skip


STRENGTHS: Final = "strengths"
"""Another name for the option `strength` in Python, where it is a list."""


DEVICE: Final = r"auto|(cpu|cuda|mps|xpu)(:\d+)?(, *(cpu|cuda|mps|xpu)(:\d+)?)*"
DEVICES: Final = "auto, cpu, cuda, cuda:N, mps or xpu"
"""Names of devices, for messages. Only torch knows which of them this machine has."""

OptionKind: TypeAlias = Literal[
    "dtype", "device", "numbers", "number", "parts", "word", "settings", "path", "switch", "size", "whole", "text",
    "entries", "rank", "ranks", "alpha", "texts", "list", "name", "folder",
]  # fmt: skip
"""The kind of value that an option takes."""

Record: TypeAlias = Literal["always", "given", "adapters", "never"]
"""When a recipe records an option, as it changes bytes of the output: always, where it is not the default (given), with
each adapter, or never."""


class Option(NamedTuple):
    """One option of a merge."""

    name: str  # in Python, in jobs files and in recipes
    kind: OptionKind
    default: Any
    help: str
    recorded: Record
    words: tuple[str, ...] = ()  # the allowed values, if they are a few words; the first is the default
    examples: tuple[str, ...] = ()  # words that are among its values, if there are others
    same_in_read: bool = False  # whether jobs that share one read of their base must have the same value
    in_batch: bool = True  # whether it is a field of a jobs file
    in_verify: bool = False  # whether `verify` takes it, for outputs without a recipe
    short: str = ""  # short form on the command line
    metavar: str | None = None
    group: str = "Output"  # heading under which --help lists it; "": it is no option of the command line
    required: bool = False  # whether its command cannot do without it

    @property
    def flag(self) -> str:
        """The long form on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def planned(self) -> bool:
        """Whether a plan depends on the option: it changes bytes of the output, or limits memory."""
        return self.recorded != "never" or self.kind == "size"


TOKENIZERS: Final = ("adapter", "base")
"""The values of `--tokenizer` that are no path."""

_DTYPES: Final = ("keep", *DTYPES, *QUANTISED_DTYPES)
_COMPUTE: Final = tuple(COMPUTE_DTYPES)

OPTIONS: Final[Mapping[str, Option]] = MappingProxyType({
    row.name: row
    for row in (
        Option("dtype", "dtype", "keep", "Write tensors in this dtype or format; keep: as in the base.", "always",
               _DTYPES),
        Option("compute_dtype", "dtype", "fp32", "Compute formulas in this dtype.", "always", _COMPUTE,
               same_in_read=True, in_verify=True, group="Computation"),
        Option("device", "device", "auto", f"Compute on {DEVICES}; several: cuda:0,cuda:1.", "never", same_in_read=True,
               metavar="DEVICE",
               group="Computation"),
        Option("strength", "numbers", None, "Multiply the adapters: one value for each, in order.", "adapters",
               in_batch=False, short="-s",
               metavar="FLOAT", group="Strength"),
        Option("strength_for", "parts", (), "Multiply parts: te=0.5, IN04-IN08=0, lbw=LIST, re:REGEX=0.8 …",
               "adapters", in_verify=True, metavar="PART=FLOAT", group="Strength"),
        Option("unmatched", "word", "error", "Stop if adapter modules match nothing in the base (error), or leave "
               "them out (skip).", "always",
               get_args(Unmatched), in_verify=True, group="Input"),
        Option("on_overflow", "word", "error",
               "Stop at values too large for the output's dtype (error), or cut them to its largest (saturate).",
               "given",
               get_args(OnOverflow), same_in_read=True, in_verify=True),
        Option("rounding", "word", "nearest",
               "Round merged weights; stochastic keeps changes smaller than a step, on average.", "given",
               get_args(Rounding), same_in_read=True, in_verify=True),
        Option("seed", "whole", 0, "Seed the random draws of stochastic rounding, dare and della.", "given",
               same_in_read=True, in_verify=True, metavar="INT"),
        Option("keep_precision", "texts", (),
               "Leave weights unquantised: parts, re:REGEX or globs of base keys; none: quantise norms … too.", "given",
               metavar="PATTERN"),
        Option("method", "word", SUM, "Combine several adapters by this method.", "given",
               tuple(METHODS), in_verify=True, group="Method"),
        Option("density", "number", None, "Keep this share of the entries (ties, dare, della …).", "given",
               in_verify=True,
               metavar="X", group="Method"),
        Option("gamma", "number", None, "Drop this share of the largest entries (breadcrumbs).", "given",
               in_verify=True,
               metavar="X", group="Method"),
        Option("epsilon", "number", None, "Vary the density by at most this much (della).", "given", in_verify=True,
               metavar="X",
               group="Method"),
        Option("t", "number", None, "Interpolate (slerp): 0 is the first adapter, 1 the second.", "given",
               in_verify=True,
               metavar="X", group="Method"),
        Option("elect", "word", ELECTIONS[0], "Decide each sign by the sum of changes, or by their count (ties).",
               "given", ELECTIONS, in_verify=True,
               group="Method"),
        Option("normalise", "word", DIVISORS[0], "Divide elected entries by their count, by Σ|strength| (weight), or "
               "not (ties).", "given", DIVISORS,
               in_verify=True, group="Method"),
        Option("agree", "whole", None, "Require one sign in this many adapters (consensus). [default: all]",
               "given", in_verify=True, metavar="INT", group="Method"),
        Option("scale", "number", 1.0, "Scale the combined change (not for sum and compose).", "given",
               in_verify=True, metavar="X", group="Method"),
        Option("setting", "settings", (), "Supply a value that the file lacks, e.g. lora_alpha=16.", "given",
               in_verify=True, metavar="NAME=VALUE", group="Input"),
        Option("map", "path", None, "Read the names of an unknown model from this table (YAML).", "given",
               in_verify=True,
               metavar="FILE", group="Input"),
        Option("tokenizer", "folder", None, "Take tokenizer and chat template from adapter, base or a folder. "
               "[default: adapter if the embeddings grew to its size, else base]", "given", examples=TOKENIZERS,
               metavar="WHOSE"),
        Option("cache", "path", None, "Store downloads in this folder; without it, object stores and URLs are read "
               "in place.", "never", metavar="DIR", group="Input"),
        Option("overwrite", "switch", default=False, help="Replace the output if it exists.", recorded="never"),
        Option("max_memory", "size", "1GiB", "Limit the memory of the weights that are merged at a time, e.g. 512MiB.",
               "never", same_in_read=True, metavar="SIZE", group="Computation"),
        Option("max_vram", "size", None, "Limit the device memory in use, e.g. 4GiB.", "never", same_in_read=True,
               metavar="SIZE", group="Computation"),
        Option("verify", "switch", default=True, help="Verify the written file.", recorded="never", group="Report"),
        Option("title", "text", None, "Set the title in the output's metadata (modelspec.title).", "given",
               in_verify=True,
               metavar="TEXT"),
        Option("metadata", "entries", (), "Add an entry to the output's metadata.", "given", in_verify=True,
               metavar="KEY=VALUE"),
        Option("no_metadata", "switch", default=False, recorded="given",
               help="Leave out recipe, names and hashes: verify then needs --base and --adapter."),
        Option("card", "switch", None, "Write a model card. [default: with folders]", "never"),
    )
})  # fmt: skip
"""Name → option, in the order of recipes."""

DIALECT_NAMES: Final = ("kohya", "lycoris", "onetrainer", "comfy", "ai-toolkit", "diffusers", "xlabs", "peft")
"""The dialects that adapters are written in, for help; a test compares them with the table of `adapters_out`."""

_FORMATS: Final = f"Write the format of {', '.join(DIALECT_NAMES[:-1])} or {DIALECT_NAMES[-1]}."

KEEP: Final = "keep"
"""The dialect, way to store layers or alpha that the input has."""


_PARTS: Final = ("unet", "te", "vae", "transformer", "prior", "denoiser", "model")


def _row(name: str, kind: OptionKind, metavar: str, text: str, **more: Any) -> Option:
    default = () if kind in ("ranks", "texts") else None
    return Option(name, kind, default, text, "given", **more, metavar=metavar, group="Options")


ADAPTER_OPTIONS: Final[Mapping[str, Option]] = MappingProxyType({
    row.name: row
    for row in (
        _row("rank", "rank", "RULE", "Set the rank: 32, same, energy:0.99, fro:0.9, size:50MiB …"),
        _row("conv_rank", "rank", "RULE", "Set the rank of convolutions."),
        _row("max_rank", "whole", "N", "Limit the ranks that rules choose."),
        _row("rank_for", "ranks", "PART=RULE", "Set the rank of a part, as in --strength-for; repeatable."),
        _row("algorithm", "name", "WAY", "Store layers as lora, full (whole matrices) or auto; extract: lokr too.",
             examples=("lora", "full", "auto", "lokr")),
        _row("alpha", "alpha", "ALPHA", "Store this alpha: rank (alpha = rank), keep, or a number."),
        _row("to", "name", "FORMAT", f"{_FORMATS} [default: {KEEP}]", examples=DIALECT_NAMES),
        _row("include", "texts", "PART", "Keep only these: unet, te1, IN04 … or re:REGEX of keys; repeatable.",
             examples=_PARTS),
        _row("exclude", "texts", "PART", "Leave out these: unet, te1, IN04 … or re:REGEX of keys; repeatable.",
             examples=_PARTS),
        _row("others", "text", "WHAT", "Store changes of biases and norms (diff), leave them out (skip), or stop. "
             "[default: diff]", words=("diff", "skip", "error")),
        _row("format", "name", "FORMAT", _FORMATS, examples=DIALECT_NAMES),
        _row("factor", "whole", "N", "Set the smaller factor of lokr, as in LyCORIS. [default: -1, near the root]"),
        _row("weights", "list", "W,W…", "Weight the snapshots, one value for each. [default: equal]"),
        _row("ema", "number", "BETA", "Average exponentially with this decay."),
        _row("ema_to", "number", "BETA", "Change the decay to this value at the last step, linearly."),
        _row("sigma_rel", "number", "X", "Average by a post-hoc EMA of this width, up to 0.288."),
        _row("space", "text", "WHAT", "Average changes (delta) or tensors (factors). [default: delta]",
             words=("delta", "factors")),
    )
})  # fmt: skip
"""Name → option that only commands which write adapters have; each command takes it with a default of its own
(recipes/commands.py)."""

OF_MERGE: Final = (
    "dtype", "strength", "strength_for", "unmatched", "map", "setting", "cache", "overwrite", "device", "max_memory",
    "max_vram", "verify",
)  # fmt: skip
"""The options that mean what they mean for `merge`. All others of a command are fields of its `AdapterJob`."""

JOB_OPTIONS: Final[Mapping[str, Option]] = MappingProxyType({**OPTIONS, **ADAPTER_OPTIONS})
"""The options of all commands that write."""

EVERY_VALUE: Final = "full"
"""The option by which `verify` compares all values."""

READING: Final[Mapping[str, Option]] = MappingProxyType(
    {
        name: Option(name, "switch", default=False, help=text, recorded="never", in_batch=False)
        for name, text in (
            ("weights", "Read the weights too: norms, ranks; with a base, how much of the change survives."),
            ("hashes", "Hash large files, too."),
            (EVERY_VALUE, "Check every byte and every row instead of a sample."),
        )
    }
)
"""Options of `inspect` and `verify`: how much they read."""

COMMAND_ONLY: Final = ("quiet", "verbose", "report", "html", "plot", "json", "dry_run", "debug")
"""Options that only the command line has: they choose what is printed, or that nothing is written."""

LONGEST_METADATA: Final = 2**20  # characters of one entry of the metadata; a preview picture has 200 thousand


def number(value: float | str) -> float:
    """Return a number, or the number that a text holds; ValueError for other text and for 1_0, Python's own 10."""
    if isinstance(value, str) and "_" in value:
        raise ValueError(f"{value!r} is not a number")
    return float(value)


def factor(value: Any, where: str) -> float:
    """Return a strength; UsageError if the value is not a finite number."""
    if (right := number_of(value)) is not None:
        raise UsageError(f"strength {value!r} is a text, not a number", where, f"write {right} without quotes")
    if not is_finite(value):
        text = f"{value[:40]!r}" if isinstance(value, str) else shown(value)
        raise UsageError(f"strength {text} is not a finite number", where, "use a number such as 0.8")
    return float(value)


def switch(value: Any, flag: str) -> bool:
    """Return the value of an option that is on or off; UsageError for other values."""
    if not isinstance(value, bool):
        raise unlike(value, flag, "True or False", SWITCHED.get(shown(value).lower()))
    return value


def finite(value: Any, where: str) -> float:
    """Return a finite number; UsageError for other values."""
    if not is_finite(value):
        raise unlike(value, where, "a finite number", number_of(value))
    return float(value)


def whole(value: Any, where: str) -> int:
    """Return a whole number of up to 63 bits; UsageError for other values."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < HUGE:
        negative = isinstance(value, int) and not isinstance(value, bool) and value < 0
        raise unlike(value, where, "a whole number from 0 on, below 2**63", 0 if negative else number_of(value))
    return value


def text(value: Any, where: str) -> str:
    """Return a text that a header can hold; UsageError for another value, or a text that is too long."""
    if not isinstance(value, str):
        raise unlike(value, where, "a text")
    if len(value) > LONGEST_METADATA or value.encode(errors="replace").decode() != value:
        raise UsageError(
            "the text is too long, or not valid Unicode", where, f"give at most {LONGEST_METADATA} characters"
        )
    return value


def path(value: Any, where: str) -> Any:
    """Return a path as it was given; UsageError for another value."""
    if value is not None and not isinstance(value, str | PathLike):
        raise unlike(value, where, "a path")
    return value


SWITCHED: Final = {
    **dict.fromkeys(("true", "yes", "on", "1"), True), **dict.fromkeys(("false", "no", "off", "0"), False),
}  # fmt: skip
"""What people write for a switch → its value."""


def values_of(text: str) -> list[Any]:
    """Return the values of a text with commas between them; between numbers there may be spaces or semicolons, too."""
    words = [word for word in re.split(r"[,;\s]+", text.strip(" []()")) if word]
    words = words if words and all(number_of(word) is not None for word in words) else text.split(",")
    return [word if number_of(word) is None else number_of(word) for word in words]


def unlike(value: Any, where: str, kind: str, right: Any = None) -> UsageError:
    """Return the error for a value of a wrong type. `where`: the option or the parameter; `right`: the value that was
    probably meant."""
    name = where.removeprefix("--").replace("-", "_") if where.startswith("--") else where
    what = f"{name} must be {kind}, not {described(value)}"
    if right is None:
        return UsageError(what, name, f"give {kind}")
    if where.startswith("--") and isinstance(right, int | float) and not isinstance(right, bool):
        return UsageError(what, name, f"write `{where} {right}`")
    return UsageError(what, name, f"write {name}={python_code(right)}")


def a_list(value: Any, where: str, expected: str) -> list[Any]:
    """Return the items of a list, or of any iterable that is not text or a table; UsageError for other values."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable) or hasattr(value, "state_dict"):
        right = values_of(value) if isinstance(value, str) and where.startswith("--") else []
        of_numbers = expected.startswith("a list of numbers") and not all(map(is_finite, right))
        raise unlike(value, where, expected, None if of_numbers else right or None)
    try:
        return list(value)
    except Exception as e:  # of the caller's iterator, or a closed file
        raise UsageError(
            f"{type(e).__name__} while {with_article(type(value).__name__)} was read: {e}", where, f"give {expected}"
        ) from e


def _table(text: str) -> dict[str, Any]:
    """Return the table that a text such as "te=0, unet=0.5" means."""
    words = (entry.strip().rpartition("=")[::2] for entry in text.split(","))
    return {name: word if number_of(word) is None else number_of(word) for name, word in words}


def pairs(value: Any, where: str) -> list[tuple[str, Any]]:
    """Return pairs of name and value, from a table or from pairs; UsageError for other values."""
    expected = 'a table such as {"NAME": VALUE}, or a list of pairs'
    if isinstance(value, str):
        raise unlike(value, where, expected, _table(value) if "=" in value else None)
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and not isinstance(value[1], tuple):
        raise unlike(value, where, expected, {value[0]: value[1]})
    entries = [*value.items()] if isinstance(value, Mapping) else a_list(value, where, expected)
    if entries and all((isinstance(entry, str) and "=" in entry) or isinstance(entry, Mapping) for entry in entries):
        tables = [e if isinstance(e, Mapping) else _table(str(e)) for e in entries]
        raise unlike(value, where, expected, {name: v for table in tables for name, v in table.items()})
    entries = [tuple(p) if isinstance(p, list | tuple) else (p,) for p in entries]
    wrong = next((p for p in entries if len(p) != 2 or not isinstance(p[0], str)), None)
    if wrong is not None:
        raise unlike(wrong, where, 'a pair such as ("NAME", VALUE)')
    return entries


def without_part(parts: Any, part: str) -> Any:
    """Return the parts of the model that an option names, or pairs of a part and a value, without one of them."""
    if isinstance(parts, Mapping):
        return {name: value for name, value in parts.items() if name != part}
    return tuple(name for name in parts if part not in (name, name[0] if isinstance(name, tuple) else name))


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options, with defaults for those not given; UsageError for an unknown name or a wrong value.

    Checked here are names, words, dtypes, switches and devices; `make_job` checks the other kinds.
    """
    if STRENGTHS in options:
        if "strength" in options:
            raise UsageError("strengths are given twice", "strength and strengths", "use one of the two")
        options = {"strength" if name == STRENGTHS else name: value for name, value in options.items()}
    for name in options:
        if name not in OPTIONS:
            raise UsageError(f"there is no option {name!r}", name, f"use one of {', '.join(OPTIONS)}")
    return {o.name: checked_value(o, options[o.name]) if o.name in options else o.default for o in OPTIONS.values()}


def checked_value(option: Option, value: Any) -> Any:
    """Return the value of an option as jobs have it; UsageError for a wrong word, dtype, switch or device."""
    if value is None and option.default is None:
        return None
    if check := _CHECKS.get(option.kind):
        return check(value, option.flag)
    if option.kind == "dtype":
        return dtype_name(value, option)
    if option.kind == "device":
        if type(value).__name__ not in ("str", "device"):  # of torch, which is not imported for this check
            raise unlike(value, option.flag, DEVICES, f"cuda:{value}" if type(value) is int else None)
        name = spelled(option, str(value))
        if not re.fullmatch(DEVICE, name):
            right = _device_meant(name)
            fix = f"write `{option.flag} {right}`" if right else f"use {DEVICES}"
            raise ResourceError(f"unknown device {shown(value)!r}", option.flag, fix)
        return name
    if option.kind == "word":
        name = spelled(option, value) if isinstance(value, str) else ""
        if name in option.words:
            return name
        foreign = OTHER_WORDS.get(option.name, {}).get(name)
        near = [foreign] if foreign else get_close_matches(name, option.words, 1, 0.7)
        fix = f"did you mean {near[0]}?" if near else f"use one of {', '.join(option.words)}"
        error = UsageError(f"{shown(value)!r} is not a value of {option.flag}", option.flag, fix)
        raise error.instead(str(value), *near)
    return value


OTHER_DEVICES: Final = {
    **dict.fromkeys(("nvidia", "rocm", "hip", "amd"), "cuda"), **dict.fromkeys(("metal", "apple"), "mps"),
    **dict.fromkeys(("intel", "arc"), "xpu"), **{name: name for name in ("auto", "cpu", "cuda", "mps", "xpu")},
}  # fmt: skip
"""Name of a device in other programs, or here → its name in torch."""


def _device_meant(name: str) -> str:
    """Return the devices that a text was probably meant for: cuda:0 for "cuda0", cuda:0,cuda:1 for "0,1"; "" for
    none."""
    devices = []
    for word in name.split(","):
        match = re.fullmatch(r"([a-z]*)[\s:_-]*(\d*)", word.strip())
        kinds = get_close_matches(match[1] or "cuda", OTHER_DEVICES, 1, 0.7) if match else []
        devices += [f"{OTHER_DEVICES[kind]}{f':{match[2]}' if match[2] else ''}" for kind in kinds if match]
    return ",".join(devices) if re.fullmatch(DEVICE, ",".join(devices)) else ""


OTHER_WORDS: Final[Mapping[str, Mapping[str, str]]] = {
    "method": SAME_COMBINATION, "unmatched": dict.fromkeys(("ignore", "drop", "warn", "allow"), "skip"),
    "on_overflow": dict.fromkeys(("clip", "clamp", "cut"), "saturate"), "rounding": {"random": "stochastic"},
}  # fmt: skip
"""Option → its value in other programs → the value here."""

_CHECKS: Final[Mapping[str, Callable[[Any, str], Any]]] = {
    "switch": switch, "whole": whole, "number": finite, "text": text, "path": path, "folder": path,
}  # fmt: skip


SAME_DTYPE: Final = {
    "half": "fp16", "float": "fp32", "double": "fp64", "bfloat": "bf16", "f16": "fp16", "f32": "fp32", "f64": "fp64",
    "single": "fp32", **dict.fromkeys(("original", "same", "auto"), "keep"),
    "e4m3": "fp8_e4m3fn", "e4m3fn": "fp8_e4m3fn", "e5m2": "fp8_e5m2",
}  # fmt: skip
"""Name of a dtype in other programs → its name here."""


PLAIN_FP8: Final = ("fp8_e4m3fn", "fp8_e5m2")
"""The dtypes of fp8 without scales."""

FEW_WORDS: Final = 4
"""Values of an option that are listed where nothing shows which was meant."""

QUANTISED: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("fp8", "float8", "f8"), ("fp8_scaled", "fp8_block", *PLAIN_FP8)),
    **dict.fromkeys(
        ("4", "int4", "4bit", "w4", "bnb4", "bnb", "awq", "gptq", "hqq", "exl2", "exl3"), ("nf4", "q4_0", "q4_k")
    ),
    **dict.fromkeys(("fp4", "mxfp4"), ("nvfp4", "nf4")),
    **dict.fromkeys(("8", "8bit", "w8", "bnb8"), ("int8", "q8_0")), "gguf": ("q8_0", "q4_k"),
}  # fmt: skip
"""Name of a quantised dtype in other programs, where it may mean several formats → these formats."""


DTYPE_USES: Final = {
    "fp8_scaled": "scales, a file for ComfyUI", "fp8_block": "scales by block, a folder for transformers and vLLM",
    **dict.fromkeys(PLAIN_FP8, "no scales, the largest loss"),
    "nf4": "a file for Forge, a folder for transformers", "nvfp4": "a file for ComfyUI, a folder for transformers",
    "int8": "a file for ComfyUI, a folder for transformers",
    **dict.fromkeys(GGUF_TYPES, "GGUF for llama.cpp and ComfyUI-GGUF"),
}  # fmt: skip
"""Quantised dtype → what it is for, in answers to a name that may mean several."""


def spelled(option: Option, value: str) -> str:
    """Return a word of an option as it is spelled here: bf16 for torch.bfloat16, cuda for GPU."""
    name = value.lower()
    if option.kind != "dtype":
        return name.replace("gpu", "cuda") if option.kind == "device" else name.replace("-", "_")
    known = {row.library: row.option for row in DTYPE_ROWS.values() if row.option} | SAME_DTYPE
    name = name.removeprefix("torch.")
    return known.get(name, name)


def alike(word: str, known: Iterable[str]) -> list[str]:
    """Return the words with the digits of a misspelt one, or else the only one with its letters: fp61 may be meant as
    fp16, and bf17 as bf16; fp64 may not."""
    names = [*known]
    digits, letters = (
        [name for name in names if sorted(filter(kind, name)) == sorted(filter(kind, word))]
        for kind in (str.isdigit, str.isalpha)
    )
    return digits or (letters if len(letters) == 1 else [])


def nearest_in_bits(name: str, words: Sequence[str]) -> list[str]:
    """Return the dtypes whose bits are the nearest to those in a name, of its first letter if there are any: fp32 for
    fp80, q8_0 for q9_0, fp16 and bf16 for int16 and 16; none for a name without bits."""
    bits = {word: int(match[0]) for word in (name, *words) if (match := re.search("[0-9]{1,3}", word))}
    if name not in bits:
        return []
    apart = {word: (abs(bits[word] - bits[name]), word[0] != name[0]) for word in words if word in bits}
    least = min(apart.values())
    return [word for word in apart if apart[word] == least and not (name.isdigit() and least[0])]


def dtype_name(value: object, option: Option) -> str:
    """Return the name of a dtype on the command line, also for a torch dtype; UsageError if the option rejects it."""
    name = spelled(option, str(getattr(value, "__name__", value)))  # numpy.float16 is a class
    if name not in option.words:
        near = [word for word in QUANTISED.get(name, ()) if word in option.words]
        near = near or [word for word in option.words if name and word.startswith(name)]  # q8
        near = near or get_close_matches(name, alike(name, option.words), 1, 0.7)
        near = near or nearest_in_bits(name, option.words)
        some = near or option.words[:FEW_WORDS]
        fix = f"use {near[0]}" if len(near) == 1 else f"use one of {', '.join(some)}"
        if not near and len(some) < len(option.words):
            fix += "; lora-merge help merge lists all"
        uses = by_key((DTYPE_USES[word], word) for word in filter(DTYPE_USES.get, near))
        if len(uses) > 1:
            fix += "".join(f"; {' and '.join(words)}: {use}" for use, words in uses.items())
        error = UsageError(f"{value!r} is not a value of {option.flag}", option.flag, fix)
        raise error.instead(str(value), *(near if len(near) == 1 else ()))
    return name

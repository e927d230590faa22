"""The job: what the user asked for, validated and frozen. No file is read for that."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache
from numbers import Real
from os import PathLike, sep
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from .adapter_arguments import adapter_path
from .addresses import downloads_in, with_addresses
from .algorithms import ALGORITHMS, COUNT
from .errors import UsageError
from .merge_methods import SUM, MethodParameters, method_parameters
from .options import (
    AN_ADAPTER,
    BLOCK_LIST,
    BLOCK_WEIGHTS,
    GIVE_STATE_DICT,
    REGEX,
    TOKENIZERS,
    OnOverflow,
    Rounding,
    Unmatched,
    a_list,
    checked,
    factor,
    pairs,
    text,
    unlike,
)
from .paths import (
    ENDINGS,
    absolute,
    exists,
    expand,
    input_name,
    input_path,
    is_file,
    is_folder,
    is_split,
    names_folder,
    of_index,
    output_file,
    output_path,
    with_found_ending,
)
from .safe_regex import Refused, Steps
from .text import HUGE, Shown, described, is_finite, number_of, plural, python_code, shown

_BLOCK: Final = r"(?:[A-Z]{1,8}|[A-Za-z]{1,8}[0-9]{1,4})"
_RANGE: Final = rf"{_BLOCK}(?:-(?:{_BLOCK}|[0-9]{{1,4}}))?"
BLOCK_NAMES: Final = re.compile(rf"{_RANGE}(?:\+{_RANGE})*")
"""Names of blocks: `IN04`, a range `IN04-IN08` or `IN04-08`, a stack `IN`, several with +. Matching compares them with
the base."""

_NETWORK: Final = r"[A-Za-z_]\w* "
PART: Final = re.compile(
    rf"[A-Za-z_*?][\w.*?]*(?:-[0-9]{{1,6}})?|{_NETWORK}(?:{BLOCK_NAMES.pattern}|[A-Za-z_][\w.]*(?:-[0-9]{{1,6}})?)",
    re.ASCII,
)
"""A component (`te`), the path of a stack or of layers (`mid_block`, `double_blocks.0-9`), a block or a path in a
component (`unet IN04`), or a name with * and ?. Matching looks it up."""

MOST_ADAPTERS: Final = 1000
"""Limit of one merge; each adapter is matched with the whole base."""

MODEL_FILES: Final = ("config.json", "model_index.json", "adapter_config.json")
"""Files by which a folder is known as a model or an adapter."""

MOST_PARTS: Final = 500
"""Limit of `--strength-for` for one adapter; each part is looked up for each tensor."""

_UNITS: Final = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
                 "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}  # fmt: skip


@dataclass(frozen=True)
class Adapter(Shown):
    """One adapter, its strength, and factors that multiply the strength in parts of the model.

    Attributes:
        path: An adapter file, or a PEFT folder.
        strength: 1 is the trained change, 0 none.
        parts: Pairs of a part (`te`, `IN04-IN08`, `re:attn2` …) and its factor.

    Examples:
        >>> style = lora_merge.Adapter("style.safetensors", 0.8, (("te", 0.0), ("IN04-IN08", 0.5)))
        >>> report = lora_merge.merge("sdxl.safetensors", [style, "detail.safetensors"], "out.safetensors")
    """

    path: Path
    strength: float = 1.0
    parts: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Job(Shown):
    """One merge, checked and frozen. The fields have the names of the long options, which `merge` explains.

    Examples:
        >>> job = lora_merge.plan("base.safetensors", "style.safetensors", dtype="bf16").job
        >>> job.dtype, job.adapters[0].strength
        ('bf16', 1.0)
    """

    base: Path
    adapters: tuple[Adapter, ...]
    output: Path
    dtype: str = "keep"
    compute_dtype: str = "fp32"
    device: str = "auto"
    method: str = SUM
    """Name of a row of METHODS: the rule by which several adapters change one weight."""
    density: float | None = None
    gamma: float | None = None
    epsilon: float | None = None
    t: float | None = None
    elect: str = "sum"
    normalise: str = "count"
    agree: int | None = None
    scale: float = 1.0
    unmatched: Unmatched = "error"
    on_overflow: OnOverflow = "error"
    """Whether a number that is too large for the output's dtype is an error, or is replaced by the largest number."""
    rounding: Rounding = "nearest"
    """The ways to round merged values to those of the output: the nearest one, or one of both neighbours by draws."""
    seed: int = 0
    keep_precision: tuple[str, ...] = ()
    """Weights that `dtype` does not quantise: `re:` and an expression, or a glob; `none` for no usual exceptions."""
    tokenizer: str | None = None
    """Whose tokenizer an output folder gets: `adapter`, `base`, or that of a folder; None: by the embeddings' rows."""
    cache: Path | None = None
    """Where files of addresses are kept; the hub has a cache of its own."""
    overwrite: bool = False
    max_memory: int = 2**30
    max_vram: int | None = None
    verify: bool = True
    map: Path | None = None
    setting: tuple[tuple[str, Any], ...] = ()
    """Values that a formula needs and the adapter's file lacks: name → number, flag, text or nested tuples."""
    title: str | None = None
    metadata: tuple[tuple[str, str], ...] = ()
    """Entries that the header of the output gets in addition to the base's, or in their place."""
    no_metadata: bool = False
    """Whether the header of the output holds no recipe, and no entries of the base but those that loading needs."""
    card: bool | None = None
    """Whether a model card is written; None: with folders that name their inputs."""

    @property
    def output_name(self) -> str:
        """The output as users name it: a path, or the address that its local copy is uploaded to."""
        return with_addresses(str(self.output))


@dataclass(frozen=True, repr=False)
class ResolvedJob(Job):
    """A job whose base is open: its output has the suffix of the container, and the parts of its adapters have the
    labels of the base's networks. Planning makes it once, from the job that the user asked for."""


class AdapterValue:
    """An opened adapter, or a sum of several; the room `memory` makes them."""

    terms: Sequence[tuple[Any, float]]
    """Pairs of an opened adapter, which has a `path`, and its strength."""


OneAdapter: TypeAlias = str | PathLike[str] | tuple[str | PathLike[str] | AdapterValue, float] | Adapter | AdapterValue
Adapters: TypeAlias = OneAdapter | Sequence[OneAdapter] | Mapping[str, float] | Mapping[Path, float]
"""The adapters that Python functions take: a path, an opened adapter or a sum, each also with a strength, a list of
them, or path → strength."""


def parse_size(text: str | int, option: str = "--max-memory") -> int:
    """Return the number of bytes for "512MiB", "4GB", "1.5 GiB" or a plain number of bytes; UsageError for others."""
    fix = "write it like 512MiB or 4GB"
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", shown(text, None).lower())
    if match is None or match[2] == "i":
        right = _size_meant(shown(text).lower())
        raise UsageError(f"{shown(text)!r} is not a size", option, f"write `{option} {right or '4GB'}`")
    size = float(match[1]) * _UNITS[match[2]]
    if size >= HUGE:
        raise UsageError(f"{shown(text)} is more than any machine has", option, fix)
    return int(size)


LEAST_LIMIT: Final = 100_000  # bytes of memory; a smaller number was probably meant in MB or GB


def memory_limit(text: str | int, option: str = "--max-memory") -> int:
    """Return the number of bytes of a limit of memory; UsageError for what is no size, and for a small number without
    its unit, such as 4."""
    size = parse_size(text, option)
    if 0 < size < LEAST_LIMIT and str(text).strip().isdigit():
        right = _with_unit(size)
        error = UsageError(f"{size} is a number of bytes", f"`{option} {size}`", f"write `{option} {right}`")
        raise error.instead(str(size), right)
    return size


def _size_meant(text: str) -> str:
    """Return the size that a text was probably meant for: 4GB for "-4", "4 gigs", "4,0 Go" and "4e9"; "" without a
    number."""
    match = re.fullmatch(r"\D*?(\d+(?:[.,]\d+)?(?:e\+?\d)?)\s*(?:([kmgt])[a-z]*)?\W*", text.replace("%", "percent"))
    if match is None:
        return ""
    number = float(match[1].replace(",", "."))
    return f"{number:g}{match[2].upper()}B" if match[2] else _with_unit(number)


def _with_unit(number: float) -> str:
    """Return a size with the unit that it was probably meant in."""
    if number < LEAST_LIMIT:
        return f"{number:g}{'GB' if number <= 64 else 'MB'}"
    return f"{number / 10**9:g}GB"


def make_job(base: str | Path, adapters: Any, output: str | Path | None = None, **options: Any) -> Job:
    """Return a Job made of the arguments that the API and the command line pass; UsageError if one of them is wrong.

    `adapters`: paths, `(path, strength)` pairs, Adapter objects, or a single one of these. `options`: names of the
    table `OPTIONS`. `dtype` and `compute_dtype` also take torch dtypes, `max_memory` also text such as "2GiB".
    """
    values = checked(options)
    if values["cache"] is not None:
        values["cache"] = expand(values["cache"])
    with downloads_in(values["cache"]):
        return _job(base, adapters, output, values)


def _job(base: str | Path, adapters: Any, output: str | Path | None, values: dict[str, Any]) -> Job:
    """Return the job of checked `values`."""
    # The adapters, with their strengths.
    base = input_path(base)
    adapters = adapter_list(adapters) or [base]  # the adapter that is attached inside the base
    if len(adapters) > MOST_ADAPTERS:
        raise UsageError(f"{len(adapters)} adapters for one merge", "the list of adapters",
                         f"give at most {MOST_ADAPTERS}, and merge the rest into the result")  # fmt: skip
    strength, strength_for = values.pop("strength"), values.pop("strength_for")
    adapters = adapters if strength is None else _with_strengths(adapters, strength)
    steps = Steps()
    parts = tuple(_part(p, f, steps) for p, f in pairs(strength_for, "--strength-for"))
    refs = tuple(_adapter(a, parts, steps) for a in adapters)
    # Values of options that have a spelling of their own.
    values["max_memory"] = memory_limit(values["max_memory"])
    texts = a_list(values["keep_precision"], "--keep-precision", "a list of patterns")
    values["keep_precision"] = tuple(text(pattern, "--keep-precision") for pattern in texts)
    values["setting"] = _settings({} if values["setting"] is None else values["setting"])
    entries = dict(pairs(() if values["metadata"] is None else values["metadata"], "--metadata"))
    values["metadata"] = tuple((key, text(value, f"`--metadata {key[:80]}`")) for key, value in entries.items())
    if values["max_vram"] is not None:
        values["max_vram"] = memory_limit(values["max_vram"], "--max-vram")
    if values["map"] is not None:
        values["map"] = expand(values["map"])
    if values["tokenizer"] is not None:
        values["tokenizer"] = _whose(values["tokenizer"])
    # The output, by default in the current folder.
    out = absolute(Path()) / _default_name(base, refs) if output is None else _output(output, base, refs)
    job = Job(base=base, adapters=refs, output=out, **values)
    parameters(job)
    return job


def _whose(value: Any) -> str:
    """Return the value of `--tokenizer`: a word, or the path of a folder; UsageError where there is no such folder."""
    if isinstance(value, str) and value in TOKENIZERS:
        return value
    if not is_folder(path := expand(value)):
        raise UsageError("there is no such folder", f"`--tokenizer {shown(value, 200)}`",
                         f"name a folder, or one of {' and '.join(TOKENIZERS)}")  # fmt: skip
    return str(path)


def parameters(job: Job) -> MethodParameters:
    """Return the parameters of the job's method; UsageError where one is wrong."""
    if job.method == SUM and job.scale != 1:
        each = ", ".join(f"{input_name(a.path)}:{a.strength * job.scale:g}" for a in job.adapters)
        raise UsageError("sum has no scale", "--scale", f"leave it out, and multiply each strength by it: {each}")
    return method_parameters(job.method, vars(job), [a.strength for a in job.adapters])


def validated(job: Job) -> Job:
    """Return the job that `make_job` makes of the fields of a given one; UsageError if a field is wrong."""
    return make_job(job.base, job.adapters, job.output, **{f.name: getattr(job, f.name) for f in fields(Job)[3:]})


def _output(path: str | Path, base: Path, adapters: tuple[Adapter, ...]) -> Path:
    """Return the path of the output; if the user names a folder for a file, the file in it has the default name."""
    path_of_output, base = output_path(path), of_index(base)
    inside = names_folder(path) if is_file(base) else str(path).endswith(("/", sep)) and _holds_others(path_of_output)
    if inside:
        return path_of_output / _default_name(base, adapters)
    return output_file(path, _ending(base)) if is_file(base) else path_of_output


def _holds_others(folder: Path) -> bool:
    """Return whether a folder is there and is no model, as a folder of models is."""
    return is_folder(folder) and not any(is_file(folder / name) for name in MODEL_FILES) and not any(
        folder.glob("*.safetensors"))  # fmt: skip


def _default_name(base: Path, adapters: tuple[Adapter, ...]) -> str:
    others = [a.path for a in adapters if a.path != base]
    name = "+".join(map(_title, (base, *others))) if others else f"{_title(base)}+adapter"
    base = of_index(base)
    return name if is_folder(base) else f"{name}{_ending(base)}"


def _title(path: Path) -> str:
    """Return the name of an input without its ending, and without the number of a part."""
    folder = of_index(path)
    if is_split(path):
        return path.stem[: -len("-00001-of-00002")]
    return input_name(folder) if is_folder(folder) else path.stem


def _ending(base: Path) -> str:
    """Return the ending of an output, for a base that is a file."""
    return ".gguf" if base.suffix.lower() == ".gguf" else ".safetensors"


def adapter_list(adapters: Any) -> list[Any]:
    """Return the adapters that the user named as a list: of paths, of Adapters, and of pairs with a strength."""
    if isinstance(adapters, Mapping):
        if not all(isinstance(strength, Real | str) for strength in adapters.values()) or pair_in(adapters):
            raise wrong_adapter(adapters)
        adapters = [*adapters.items()]
    if isinstance(adapters, list | tuple) and not is_pair(adapters) and _path_and_number(adapters):
        raise wrong_adapter(adapters)
    single = isinstance(adapters, str | PathLike | Adapter | AdapterValue) or is_pair(adapters)
    expected = "a path, or a list of them"
    adapters = [adapters] if single else [] if adapters is None else a_list(adapters, "the list of adapters", expected)
    return [Path(item) if isinstance(item, PathLike) else item for item in summands(adapters)]


def is_pair(value: object) -> bool:
    """Return whether a value is a pair of one adapter and its strength, and not a list of two adapters."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Real)


def summands(adapters: Sequence[Any]) -> Iterator[Any]:
    """Yield the adapters; an opened one or a sum as pairs of each opened adapter and its strength."""
    for item in adapters:
        source, strength = item if isinstance(item, tuple) and len(item) == 2 else (item, 1.0)
        if isinstance(source, AdapterValue):
            times = factor(strength, "the strength of an adapter")
            yield from ((adapter, s * times) for adapter, s in source.terms)
        else:
            yield item


def _with_strengths(adapters: Sequence[Any], strengths: Sequence[float]) -> list[Any]:
    """Return pairs of adapter and strength; UsageError unless there is one strength for each adapter."""
    expected = "a list of numbers, one per adapter"
    if is_finite(strengths):
        raise unlike(strengths, "--strength", expected, [strengths for _ in adapters])
    if isinstance(strengths, Mapping) and strengths and all(map(is_finite, strengths.values())):
        raise _of_table(strengths, adapters, unlike(strengths, "--strength", expected))
    strengths = a_list(strengths, "--strength", expected)
    if strengths and all(number_of(value) is not None for value in strengths):
        raise unlike(strengths, "--strength", expected, [*map(number_of, strengths)])
    if any(isinstance(a, tuple | Adapter) for a in adapters):
        raise UsageError("strengths are given twice", "--strength and the adapters' own", "use one of the two")
    if len(strengths) != len(adapters):
        counts = f"{plural(len(strengths), 'strength')} for {plural(len(adapters), 'adapter')}"
        raise UsageError(counts, "--strength", "give one per adapter, in order")
    return list(zip(adapters, strengths, strict=True))


def _of_table(strengths: Mapping[Any, float], adapters: Sequence[Any], error: UsageError) -> UsageError:
    """Return the error for strengths in a table, by adapter or by part of the model."""
    names = [{str(a), Path(a).name, Path(a).stem} if isinstance(a, str | PathLike) else set() for a in adapters]
    by_adapter = [next((v for name, v in strengths.items() if str(name) in known), 1.0) for known in names]
    if {*map(str, strengths)} <= set[str]().union(*names):
        return UsageError(error.what, error.where, f"write strengths={python_code(by_adapter)}")
    parts = all(isinstance(name, str) for name in strengths)
    return UsageError(error.what, error.where, f"write strength_for={python_code(strengths)}") if parts else error


def _adapter(value: Any, parts: tuple[tuple[str, float], ...], steps: Steps) -> Adapter:
    path, strength = value if isinstance(value, tuple) and len(value) == 2 else (value, 1.0)
    named: list[tuple[str, Any]] = []
    if isinstance(value, Adapter):
        path, strength, named = value.path, value.strength, pairs(value.parts, "--parts")
    if not isinstance(path, str | PathLike | AdapterValue) or number_of(strength) is not None:
        raise wrong_adapter(value)
    if isinstance(path, AdapterValue):
        path = path.terms[0][0].path
    path = adapter_path(path if isinstance(path, str) else Path(path))
    if len(named) + len(parts) > MOST_PARTS:
        raise UsageError(f"{len(named) + len(parts)} parts of one adapter", "--strength-for", f"at most {MOST_PARTS}")
    return Adapter(path, factor(strength, str(path)), (*(_part(p, f, steps) for p, f in named), *parts))


def pair_in(table: Any) -> tuple[Any, Any] | None:
    """Return path and strength of a table that states one adapter, `{"path": "a.safetensors", "strength": 0.5}`, by
    whatever names; None for others."""
    if not isinstance(table, Mapping):
        return None
    paths = [value for name, value in table.items() if _is_file_name(value) or (name == "path" and _is_word(value))]
    strengths = [value for value in table.values() if isinstance(value, Real) or number_of(value) is not None]
    is_record = len(paths) == 1 and not any(map(_is_file_name, table))
    return (paths[0], strengths[0] if strengths else 1.0) if is_record else None


def _is_word(value: Any) -> bool:
    return isinstance(value, str | Path) and number_of(value) is None


def _is_file_name(value: Any) -> bool:
    """Return whether a value is the path of a file that is there, or that has the ending of one."""
    return _is_word(value) and (str(value).endswith(ENDINGS) or exists(with_found_ending(str(value))))


def wrong_adapter(value: Any, *, in_memory: bool = False) -> UsageError:
    """Return the error for what is no adapter, with what was probably meant. `in_memory`: state dicts are adapters
    too."""
    pair = (value.path, value.strength) if isinstance(value, Adapter) else value
    if right := _path_and_number(pair_in(value) or pair):
        fix = f"write {python_code(right)}"
    elif in_memory and any(hasattr(item, "state_dict") for item in (value, *(value if is_pair(value) else ()))):
        fix = GIVE_STATE_DICT
    elif hasattr(value, "state_dict") or (
        isinstance(value, Mapping) and any(hasattr(tensor, "shape") for tensor in value.values())
    ):
        fix = "for tensors in memory use merge_state_dict() or merge_into(); to files, save them first"
    else:
        fix = f"give {AN_ADAPTER}"
    what = f"an adapter must be {AN_ADAPTER}, not {described(pair)}"
    return UsageError(what, "the list of adapters", fix)


def _path_and_number(pair: Any) -> tuple[Any, float] | None:
    """Return the pair of a path and a strength that two values are, in any order; None for others."""
    if isinstance(pair, list | tuple) and len(pair) == 2:
        for path, strength in (pair, pair[::-1]):
            value = number_of(strength) if isinstance(strength, str) else strength if is_finite(strength) else None
            if isinstance(path, str | PathLike) and number_of(path) is None and value is not None:
                return path, value
    return None


def _part(part: str, value: float | str, steps: Steps) -> tuple[str, float]:
    """Return a part of the model with its factor; UsageError if no model has such a part.

    A list of block weights becomes the name of the part, with factor 1: ("lbw:1,0,0.5", 1.0) for ("lbw", "1,0,0.5").
    """
    if part == BLOCK_WEIGHTS:
        listed = value if isinstance(value, str) else ",".join(map(str, a_list(value, part, "a list of numbers")))
        return f"{BLOCK_LIST}{listed}", 1.0
    if part.startswith(REGEX):
        try:
            steps.pattern(part.removeprefix(REGEX))
        except Refused as e:
            where = f"`--strength-for {part[:80]}`"
            raise UsageError(f"the regular expression is {e}", where, "correct the pattern") from e
    elif not any(p.fullmatch(part) for p in (BLOCK_NAMES, PART)) and not part.startswith(BLOCK_LIST):
        fix = "use a component such as unet or te, a block such as IN04 or double_blocks.0-9, or re:REGEX; "
        fix += "`lora-merge parts BASE` lists those of a base"
        raise UsageError(f"no part is called {part[:80]!r}", "--strength-for", fix)
    return part, factor(value, f"`--strength-for {part}`")


@cache
def _known_settings() -> Mapping[str, tuple[str, Callable[[Any], bool]]]:
    """Return name → (what the value must be, test of a value) for all settings of formulas, and for those of places."""
    kinds = {name: row.annotations[name] for row in ALGORITHMS.values() for name in row.settings}
    return {
        name: SETTING_KINDS[kind]
        for name, kind in {**kinds, SETTING: "bool", ROW_ORDER: "order"}.items()
        if kind in SETTING_KINDS
    }


def _settings(settings: Mapping[str, Any] | Sequence[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    """Return the settings sorted, with tuples for lists; UsageError for a name or a value that no formula takes."""
    values = {name: _frozen(value) for name, value in pairs(settings, "--setting")}
    known = _known_settings() if values else {}
    for name, value in values.items():
        if name not in known:
            near = get_close_matches(name, known, 1)
            fix = f"did you mean {near[0]}?" if near else f"use one of {', '.join(sorted(known))}"
            raise UsageError(f"no formula has a setting {name!r}", "--setting", fix).instead(name, *near)
        expected, fits = known[name]
        if not fits(value):
            raise UsageError(f"{name} is not {expected}", f"`--setting {name}={shown(value)}`", f"use {expected}")
    return tuple(sorted(values.items()))


def _frozen(value: Any) -> Any:
    return tuple(_frozen(v) for v in value) if isinstance(value, list | tuple) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and is_finite(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and COUNT.number(value) is not None


def _are_ranges(value: Any) -> bool:
    pairs = isinstance(value, tuple) and all(isinstance(v, tuple) and len(v) == 2 for v in value)
    return pairs and all(_is_whole(row) for pair in value for row in pair)


ROW_ORDER: Final = "row_order"
ORDERS: Final = ("heads", "stacked")
"""Values of ROW_ORDER, for fused projections whose names do not show it: q, k and v head by head, or stacked."""

SETTING_KINDS: Final[Mapping[str, tuple[str, Callable[[Any], bool]]]] = MappingProxyType(
    {
        "float": ("a number", _is_number),
        "int": ("a whole number", _is_whole),
        "bool": ("true or false", lambda value: isinstance(value, bool)),
        "str": ("a word", lambda value: isinstance(value, str)),
        "order": ("heads or stacked", lambda value: value in ORDERS),
        "tuple[tuple[int, int], ...]": ("ranges of rows such as [[0,8],[12,16]]", _are_ranges),
    }
)
"""Annotation of a setting → (what the value must be, test of a value)."""

SETTING: Final = "fan_in_fan_out"

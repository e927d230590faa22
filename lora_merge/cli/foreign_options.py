"""Options of other programs, and strengths at the wrong place: each is refused with the user's own line corrected.

There is a line as soon as its files are certain, and advice otherwise. What a line lacks of the user's own is named.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from ..adapter_arguments import right_form
from ..addresses import split
from ..command import MERGE
from ..errors import MergeError, UsageError
from ..merge_methods import METHODS, SUM
from ..options import BLOCK_WEIGHTS
from ..paths import exists, expand, split_strength, with_found_ending
from ..recipes.commands import COMMANDS
from ..text import plural
from .argument_values import ADAPTER_ORDER, expanded, strengths
from .compat import check_dashes
from .corrected_line import PLACES, flags, is_adapter, line, opened, path_of
from .foreign_inputs import NAME_THE_FILES, with_options
from .foreign_names import (
    FOREIGN_RULES,
    NOT_KNOWN,
    STRENGTH_FORMS,
    THE_BASE,
    UNKNOWN,
    Foreign,
    Role,
    advice_on,
    alike,
    hyphened,
    meaning_of,
)  # fmt: skip
from .foreign_programs import program_of
from .typed_line import (
    MISTAKES,
    NO_OPTION,
    OTHER_SYNTAX,
    OUR_OPTIONS,
    OWN_STRENGTHS,
    OWN_WEIGHTS,
    NotClear,
    Setting,
    TypedLine,
    TypedStrength,
    by_option,
    names_file,
    numbers_in,
    right_value,
)

FEW: Final = 4
"""Numbers in one word that may be strengths of adapters."""


class Correction(NamedTuple):
    """The line that is meant."""

    words: list[str]
    left_out: list[tuple[str, str]]
    """Option as it is typed → reason."""
    unclear: list[tuple[str, str]]
    """Option as it is typed, which the line lacks → the advice on it."""
    conflicts: list[str]
    """What has two values, of which the line has the last."""
    mistake: str
    """What is wrong with the strengths of the line as it is typed; "" for nothing."""
    repeated: bool
    """Whether a strength is for several adapters, which the user did not write."""


def corrected(reading: TypedLine) -> Correction:
    """Return the line that is meant; NotClear if its files are too few, too many, or of another kind."""
    reading.take_output()
    files, first = _files(reading)
    command, settings = reading.command, _settings(reading)
    settings += _take_required(reading, {s.words[0] for s in settings})
    terms = [_Term.of(word) for word in (expanded(files[first:]) if command.options else files[first:])]
    # Step 1: each strength gets its adapter.
    if command.merges:
        _fit_parts(reading, files[0], terms)
    _take_share(reading, settings, terms)
    count, repeated = _take_strengths(reading, terms)
    mistake = (command.merges and _scaled(settings, terms)) or _mistake(reading, terms, count)
    # Step 2: options become strengths, or are left out.
    _take_alphas(reading, settings, terms)
    settings += (s for s in _take_part_strengths(reading, terms) if s.words not in {other.words for other in settings})
    # Step 3: strengths follow the adapters, or become --weights.
    paths, options = [term.word for term in terms], [word for setting in settings for word in setting.words]
    if reading.weighted and any(term.strength for term in terms):
        paths = [with_found_ending(term.path) if term.stated else term.path for term in terms]
        options += [OWN_WEIGHTS, ",".join(term.strength or "1" for term in terms)]
    words = [*filter(None, [command.typed]), *files[:first], *paths, *options]
    name = terms[0].path if len(terms) == 1 else "ADAPTER"
    unclear = [(option, advice.replace("ADAPTER", name)) for option, advice in reading.unclear]
    left_out = [(option, reason.replace("ADAPTER", name)) for option, reason in reading.left_out]
    return Correction(words, left_out, unclear, reading.conflicts, mistake, repeated)


def _take_required(reading: TypedLine, stated: Collection[str]) -> list[Setting]:
    """Return the option that a command cannot do without, if the number of the line is its value: `resize FILE 16`."""
    required = [row for row in reading.command.options.values() if row.required and row.flag not in stated]
    numbers = reading.strengths[""]
    values = [right_value(row, s.value) for row in required for s in numbers]
    if required and (len(values) != 1 or not values[0]):
        raise NotClear(required[0].flag)
    if required:
        reading.mistakes[NO_OPTION] = [numbers.pop().value]
    return [Setting(value, (required[0].flag, value)) for value in values[: len(required)]]


def _take_share(reading: TypedLine, settings: list[Setting], terms: Sequence[_Term]) -> None:
    """Make the alpha of a weighted sum, which is the share of the second file, the strengths of both files."""
    shares = [TypedStrength(s.typed, s.words[1], "") for s in settings if s.words[0] == "--alpha"] * reading.foreign
    shares = [s for s in shares if right_form(s.value).startswith("0.")]
    settings[:] = [s for s in settings if s.typed not in {share.typed for share in shares}]
    shares += [s for s in reading.strengths[""] if reading.weighted and "alpha" in s.typed]
    if not shares:
        return
    if len(terms) != 2 or {s.typed for s in reading.strengths[""]} - {s.typed for s in shares}:
        raise NotClear(shares[0].typed)
    share = float(right_form(shares[-1].value))
    reading.strengths[""] = [TypedStrength(shares[-1].typed, f"{value:g}", "") for value in (1 - share, share)]


def _take_strengths(reading: TypedLine, terms: Sequence[_Term]) -> tuple[int, bool]:
    """Give each strength to its adapter: in order, or to those without a strength in order. Return how many there are,
    and whether one is for several adapters."""
    stated = reading.strengths[""]
    if blocks := next((s for s in stated if len(numbers_in(s.value)) > max(len(terms), FEW)), None):
        raise NotClear(blocks.typed)  # weights of blocks
    values = _values([s.value for s in stated], terms)
    if values and not reading.weighted and "strength" not in reading.command.options:
        raise NotClear(values[0])
    receivers = _receivers(stated, len(values), terms, [term for term in terms if not term.strength])
    repeated = 0 < len(values) < len(receivers)
    if repeated and reading.weighted:
        raise NotClear(values[-1])
    reading.left_out += [(value, "every adapter has a strength") for value in values[len(receivers) :]]
    for term, value in zip(receivers, [*values, *values[-1:] * len(receivers)], strict=False):
        if term.strength and float(term.strength) != float(value):
            reading.conflicts.append(f"{term.path} has two strengths, {term.strength} and {value}")
        term.strength = value
    return len(values), repeated


def _receivers(
    stated: Sequence[TypedStrength], count: int, terms: Sequence[_Term], bare: Sequence[_Term]
) -> Sequence[_Term]:
    """Return the adapters whose strengths these are, in order: all of them; those right before the strengths; or those
    without a strength. `count`: of the strengths."""
    named = {s.after for s in stated} - {""}
    if count == len(stated) == len(named) < len(terms):  # one 0.8 two
        return [term for term in terms if term.word in named or term.path in named]
    return terms if count == len(terms) else bare


def _fit_parts(reading: TypedLine, base: str, terms: Sequence[_Term]) -> None:
    """Make strengths of the denoiser those of the whole adapters if the base has nothing else: a strength of its text
    encoders is left out."""
    if not (reading.foreign or reading.mistakes):
        return
    from ..files.checkpoint import open_checkpoint
    from ..models.names import names

    try:
        labels = {part.label for part in names(open_checkpoint(expand(path_of(base)))).parts}
    except MergeError:  # the merge itself reports it
        return
    encoders = {label for label in labels if label.startswith("te")}
    absent = [part for part in reading.strengths if part.startswith("te") and not encoders & {part, "te"}]
    absent += ["te2"] if encoders == {"te"} and "te2" in reading.strengths else []
    left_out = [s.typed for part in absent for s in reading.strengths.pop(part)]
    reading.left_out += [(option, f"the base has no {'second ' * bool(encoders)}text encoder") for option in left_out]
    changed = [term for term in terms if _has_text_encoder(term)]
    if not encoders and changed and not any("te=" in term.parts for term in changed):
        reading.strengths["te"] = [TypedStrength("", "0", "")]
    elif not encoders and "unet" in reading.strengths:
        reading.strengths[""] = reading.strengths.pop("unet")
    elif encoders and not changed and all(names_file(term.path) for term in terms):
        stated = [
            s.typed for part in [*reading.strengths] if part.startswith("te") for s in reading.strengths.pop(part)
        ]
        reading.left_out += [(option, f"{terms[0].path} changes no text encoder") for option in stated]
    for term in terms:  # of a tag, <lora:style:0.8:0.5>
        if "unet" in labels and (term not in changed or not encoders):
            term.parts = re.sub(",te=[0-9.]+", ",te=0" if term in changed else "", term.parts)


def _take_part_strengths(reading: TypedLine, terms: Sequence[_Term]) -> list[Setting]:
    """Return the strengths of parts as options; those of one adapter, or of one with another strength than 1, become
    factors of the adapter, as other programs have them in place of the whole strength."""
    settings = list[Setting]()
    for part, stated in reading.strengths.items():
        texts = [[s.value.strip("[]()")] if part == BLOCK_WEIGHTS else numbers_in(s.value) for s in stated]
        values = [value for text in texts for value in text]
        if not part or not values:
            continue
        if reading.weighted or not terms:
            reading.unclear += [(s.typed, STRENGTH_FORMS) for s in stated]
            continue
        receivers = _receivers(stated, len(values), terms, terms)
        if len(terms) == 1 and len(stated) == len(values) > 1 and len({*values}) > 1:
            reading.conflicts.append(f"{stated[-2].typed} and {stated[-1].typed} contradict each other")
            values = values[-1:]
        reading.left_out += [(value, "every adapter has a strength") for value in values[len(receivers) :]]
        typed = [term for term in receivers if f",{part}=" in term.parts]
        reading.conflicts += [f"{term.path} has two strengths of {part}" for term in typed]
        whole = all(term.strength in ("", "1") for term in terms) and not typed
        if len(values) == 1 and len(receivers) == len(terms) and whole:
            settings.append(Setting(stated[-1].typed, ("--strength-for", f"{part}={values[0]}")))
            continue
        for term, value in zip(receivers, [*values, *values[-1:] * len(receivers)], strict=False):
            term.of_parts[part] = value
    for term in terms:
        _apply_parts(term, {s.words[1].partition("=")[0] for s in settings})
    return settings


def _apply_parts(term: _Term, common: Collection[str]) -> None:
    """Write the strengths of parts as factors behind an adapter. `common`: the parts that have an option."""
    parts = {**term.of_parts}
    if not parts:
        return
    if term.strength not in ("", "1") and {*parts} != {BLOCK_WEIGHTS}:  # it is that of the other parts
        encoders = ("te1", "te2") if {"te1", "te2"} & {*parts} else ("te",)
        every = dict.fromkeys(("unet", *encoders, *parts))
        parts = {part: parts.get(part, term.strength) for part in every if part not in common}
        term.strength = "1"
    term.strength = term.strength or "1"
    others = re.sub(rf",(?:{'|'.join(parts)})=[^,=]*(?=,|$)", "", term.parts)
    term.parts = "".join(f",{part}={value}" for part, value in parts.items()) + others


def _scaled(settings: list[Setting], terms: Sequence[_Term]) -> str:
    """Take the factor of a merge by sum out of the settings, as one of each strength; return what is wrong with it."""
    by_name = {setting.words[0]: setting for setting in settings}
    method = by_name["--method"].words[1] if "--method" in by_name else SUM
    scale, row = right_form(by_name["--scale"].words[1]) if "--scale" in by_name else "", METHODS.get(method)
    if not scale or float(scale) == 1 or row is None or row.combines:
        return ""
    settings.remove(by_name["--scale"])
    for term in terms:
        term.strength = f"{float(term.strength or 1) * float(scale):g}"
    return f"{method} has no scale"


def _take_alphas(reading: TypedLine, settings: list[Setting], terms: Sequence[_Term]) -> None:
    """Make an alpha of another program that of the output if all files state theirs; a merge has none."""
    alphas = [s for s in settings if s.words[0] == "--setting" and not s.typed.startswith("--setting")]
    if not alphas or not all(map(_states_alpha, terms)):
        return
    settings[:] = [setting for setting in settings if setting not in alphas]
    if "alpha" in reading.command.options:
        settings += [Setting(s.typed, ("--alpha", s.words[1].partition("=")[2])) for s in alphas[-1:]]
    else:
        reading.left_out += [(setting.typed, "the adapter states its alpha") for setting in alphas]


def _mistake(reading: TypedLine, terms: Sequence[_Term], count: int) -> str:
    """Return what is wrong with the strengths as they are typed; "" for nothing. `count`: of those by option."""
    if reading.conflicts:
        return reading.conflicts[0]
    for what in MISTAKES:
        words = reading.mistakes.get(what, ())
        is_tag = "<" in "".join(words)  # another word alone has an error with all of its readings
        if words and (what != OTHER_SYNTAX or len(words) > 1 or is_tag):
            return f"{what}: {' '.join(words)}"
    texts = [s.value for s in reading.strengths[""]]
    try:
        _ = [*map(float, ",".join(texts or ["1"]).split(","))] if reading.weighted else []
        _ = strengths([text for text in texts if not right_form(text)], 0)
    except (UsageError, ValueError):
        return f"{OWN_WEIGHTS if reading.weighted else OWN_STRENGTHS[1]} has another syntax: {' '.join(texts)}"
    stated = [term for term in terms if term.stated]
    if reading.weighted:
        return "snapshots have weights, not strengths" if stated else ""
    if not count or (count == len(terms) and not stated):
        return ""
    few = f"{plural(count, 'strength')} for {plural(len(terms), 'adapter')}"
    return few if count != len(terms) else "strengths are given twice"


def _states_alpha(term: _Term) -> bool:
    """Return whether an adapter states its alpha, as tensors, in its metadata or in its configuration."""
    file = opened(term.path)
    return file is not None and any("alpha" in name for name in (*file.stored, *file.metadata, *file.config))


def _has_text_encoder(term: _Term) -> bool:
    """Return whether an adapter changes a text encoder."""
    from ..models.prefixes import innermost

    file = opened(term.path)
    return file is not None and any(innermost(name)[0].startswith(("te", "=")) for name in file.stored)


def _files(reading: TypedLine) -> tuple[list[str], int]:
    """Return the files in the order of our commands, and how many of the first are no adapters."""
    command, base, tuned = reading.command, reading.file(Role.BASE), reading.file(Role.TUNED)
    first = 2 if command.inputs == "checkpoints" else int(command.merges)
    stated = {_Term.of(word).path: word for word in reading.adapters}  # named with an option, and maybe without one too
    files = [stated.get(word, word) for word in reading.files if word not in base]
    if reading.foreign:
        files = [word for n, word in enumerate(files) if word not in files[:n] or word not in reading.adapters]
    if first == 2:
        files = [*base, *tuned, *files] if base else [*files, *tuned]
    elif first and not base:
        others = [word for word in files if word not in reading.adapters]
        checked = others if reading.foreign or reading.mistakes else []
        models = [word for word in checked if names_file(word) and not is_adapter(_Term.of(word).path)]
        base = models if len(models) == 1 else others[:1]
        if base and files.count(base[0]) > 1:
            raise NotClear(base[0])
        files = [*base, *(word for word in files if word not in base), *tuned]
    else:
        files = [*base, *files, *tuned]
    if command.options and reading.foreign and len(files) < 1 + command.merges:
        files = _with_places(reading, files)
    most = len(files) if command.several or command.merges else max(first, 1)
    if not reading.required <= len(files) <= most or (tuned and command.options and first < 2):
        raise NotClear(" ".join(files))
    if command.options and (reading.foreign or reading.mistakes):  # otherwise the command itself reports it
        of_adapters = {n: is_adapter(_Term.of(word).path) for n, word in enumerate(files) if names_file(word)}
        if any(adapter is not (n >= first) for n, adapter in of_adapters.items()):
            raise NotClear(" ".join(files))
    if (command.merges or not command.options) and {*files[:1]} & {*files[1:]}:  # a base is not its own adapter
        raise NotClear(files[0])
    return files, first


def _with_places(reading: TypedLine, files: list[str]) -> list[str]:
    """Return the one file of a merge, or none, with places for what is missing."""
    if not files:
        of_others = ("BASE", "TUNED") if reading.command.inputs == "checkpoints" else ("ADAPTER", "ADAPTER2")
        places = ("BASE", "ADAPTER") if reading.command.merges else of_others
        return [*places][: reading.required if reading.settings else 0]
    of_adapter = files[0] in reading.adapters or (names_file(files[0]) and is_adapter(_Term.of(files[0]).path))
    return ["BASE", *files] if of_adapter else [*files, "ADAPTER"]


def _settings(reading: TypedLine) -> list[Setting]:
    """Return the options of ours, the output first."""
    settings = [setting for setting in reading.settings if setting.words[0].startswith("-")]
    of_role = {setting.words[0]: setting for setting in reading.settings if setting not in settings}
    # Step 1: a precision is that of the computation if the line has another one for the output.
    if setting := of_role.get(Role.PRECISION):
        name = "--compute-dtype" if any(s.words[0] == "--dtype" for s in settings) else "--dtype"
        try:
            settings.append(Setting(setting.typed, reading.words_for(f"{name} {{}}", setting.words[1])))
        except NotClear:
            in_fp32 = (reading.left_out, "sums are computed in fp32 or fp64")
            kind, advice = (reading.unclear, "use --dtype fp16, bf16 or fp32") if name == "--dtype" else in_fp32
            kind.append((setting.typed, advice))
    # Step 2: a share with its rule is the rank, and a rank next to it is a limit.
    if {Role.RULE, Role.SHARE} & {*of_role}:
        of_resize, share = (of_role[role].words[1] if role in of_role else "" for role in (Role.RULE, Role.SHARE))
        rule = f"{FOREIGN_RULES.get(of_resize)}:{share}"
        if "rank" not in reading.command.options or not right_value(reading.command.options["rank"], rule):
            raise NotClear(rule)
        settings = [Setting(s.typed, ("--max-rank", s.words[1])) if s.words[0] == "--rank" else s for s in settings]
        settings = [Setting("--dynamic-param", ("--rank", rule)), *settings]
    # Step 3: an output has one place.
    of_hub = [s for s in settings if s.words[1:] and s.words[1].startswith("hf://") and s.words[1] not in s.typed]
    if any(s.words[0] in ("-o", "--output") and s not in of_hub for s in settings):
        settings = [s for s in settings if s not in of_hub]
        reading.left_out += [(s.typed, "upload the output by hf upload OWNER/NAME FOLDER") for s in of_hub]
    # Step 4: two spellings of one option have one value.
    by_place = dict[Any, Setting]()
    settings = _with_folder(settings)
    for setting in (*(s for s in reading.settings if s.words[0] in (Role.BASE, Role.TUNED)), *settings):
        name, *value = setting.words
        parameter = reading.known.get(name)
        several = parameter is not None and parameter.multiple
        place = (parameter.name if parameter else name, several and (value[0].rpartition("=")[0] or value[0]))
        before = by_place.get(place, setting)
        foreign = [s for s in (before, setting) if hyphened(s.typed.split()[0]) not in reading.known]
        if before.words[1:] != setting.words[1:] and foreign:
            reading.conflicts.append(f"{before.typed} and {setting.typed} contradict each other")
        by_place[place] = setting
    of_ours = [setting for setting in by_place.values() if setting.words[0].startswith("-")]
    return sorted(of_ours, key=lambda s: s.words[0] not in ("-o", "--output"))


def _with_folder(settings: Sequence[Setting]) -> list[Setting]:
    """Return options with one output in place of its folder and its name: `--output_dir out --output_name style`."""
    names = [s for s in settings if s.words[0] == "-o" and hyphened(s.typed).partition(" ")[0].endswith("-name")]
    folders = [s for s in settings if s.words[0] == "-o" and re.match(".*-(?:dir|folder|path)[ =]", hyphened(s.typed))]
    if len(names) != 1 or len(folders) != 1:
        return [*settings]
    whole = f"{folders[0].words[1].rstrip('/')}/{names[0].words[1]}"
    return [s for s in settings if s not in (*names, *folders)] + [Setting(names[0].typed, ("-o", whole))]


@dataclass
class _Term:
    """An adapter with its strength, as a line has it."""

    path: str
    strength: str = ""
    parts: str = ""
    of_parts: dict[str, str] = field(default_factory=dict)
    """Part → its strength by an option of another program."""
    stated: bool = False
    """Whether the word has a strength or parts."""

    @classmethod
    def of(cls, word: str) -> _Term:
        """Return the adapter of a word such as "lora:0.8,te=0"."""
        if exists(word):
            return cls(word)
        tail = address[1] if (address := split(word)) else ""
        text, comma, parts = word.partition(",") if not address or tail else (word, "", "")
        path, strength = split_strength(text) if not address or tail else (word, None)
        return cls(path, "" if strength is None else f"{strength:g}", comma + parts, stated=word != path)

    @property
    def word(self) -> str:
        """The word of our command line."""
        return f"{self.path}{self.strength and ':'}{self.strength}{self.parts}"


def _values(numbers: Sequence[str], terms: Sequence[_Term]) -> list[str]:
    """Return strengths as they are written here. "0,5" is one number if that gives a strength for each adapter."""
    whole, apart = [right_form(text) for text in numbers], [n for text in numbers for n in numbers_in(text)]
    counts = (len(terms), sum(not term.strength for term in terms))
    values = whole if all(whole) and len(whole) in counts else apart
    if numbers and not (values and terms):
        raise NotClear(numbers[0])
    return values


def corrected_line(
    command: str, args: Sequence[str], commands: Mapping[str, Any], *, program: bool = False
) -> Correction | None:
    """Return the line that the words of a command are meant as; None if that is not certain. `commands`: by name;
    `program`: whether the line is one of another program."""
    row = COMMANDS.get(command) or replace(COMMANDS["combine"], name=command, options=MappingProxyType({}))
    if "--" in args:
        return None
    parameters = commands[command].params
    known = {name: p for p in parameters if p.param_type_name == "option" for name in (*p.opts, *p.secondary_opts)}
    required = sum(p.param_type_name == "argument" and p.required for p in parameters) + (command == MERGE)
    reading = TypedLine(row, known, required, program, foreign=program)
    try:
        reading.take(args)
        if NOT_KNOWN in dict(reading.left_out).values() and not reading.foreign:  # neither a file nor a number
            return None
        paths = [_Term.of(word).path for word in reading.files]
        adapters = (w in reading.adapters or (names_file(w) and is_adapter(w)) for w in paths)
        only_adapters = len(paths) > 1 and all(adapters) and not reading.file(Role.BASE)
        if command == MERGE and only_adapters and (reading.foreign or reading.mistakes):  # they become one adapter
            return corrected_line("combine", args, commands, program=program)
        return corrected(reading)
    except NotClear:
        return None


def check_line(command: str, args: Sequence[str], commands: Mapping[str, Any]) -> None:
    """Raise UsageError, with the line that is meant, for an option that only other programs have, and for strengths
    that are not one for each adapter. `commands`: by name."""
    parameters = commands[command].params
    known = flags(parameters)
    check_dashes(args, known)
    if hasattr(commands[command], "commands"):  # its commands have options of their own
        return
    for at, (flag, part, value) in enumerate(zip(args, args[1:], args[2:], strict=False)):
        if flag == "--strength-for" and "=" not in part and right_form(value) and not exists(value):
            whole = [*args[: at + 1], f"{part}={right_form(value)}", *args[at + 3 :]]
            right = line(whole if command == MERGE else [command, *whole])
            raise UsageError("a part and its factor are one word", f"`{flag} {part} {value}`", f"write {right}")
    before = args[: args.index("--")] if "--" in args else args
    pairs = zip(before, [*before[1:], ""], strict=False)
    values = {arg.partition("=")[0]: arg.partition("=")[2] or following for arg, following in pairs}
    names = [name for name in values if name.startswith("-") and not right_form(name)]
    inputs = with_options(args)
    meant = MERGE if command == "batch" else command
    if inputs.typed and (correction := corrected_line(meant, inputs.words, commands, program=True)):
        raise UsageError(inputs.what, " ".join(inputs.typed)[:200], _fix(correction, ()))
    foreign = [name for name in names if _is_foreign(name, known, command)]
    misspelt = [name for name in names if hyphened(name) not in known and alike(hyphened(name), known)]
    if len({*foreign, *misspelt}) > 1:  # one alone has its own error
        foreign = [name for name in names if name in (*foreign, *misspelt)]
    correction = corrected_line(command, args, commands)
    if foreign:
        what = f"there is no option {' nor '.join(foreign)} here"
    elif correction and command in COMMANDS and {*map(hyphened, names)} <= known.keys():
        what = correction.mistake
    else:
        return
    if correction and correction.conflicts:
        what = "; ".join(correction.conflicts)
    if not what:
        return
    advised = {name: values[name] for name in foreign}
    fix = _fix(correction, foreign) if correction else _advices(advised, command, parameters)
    raise UsageError(what, " ".join(args)[:200], fix)


def check_foreign_command(args: Sequence[str], commands: Mapping[str, Any]) -> None:
    """Raise UsageError, with the line that is meant, for a line of another program: `merge_lora.py --sd_model b …`, or
    a configuration of one."""
    known = flags(commands[MERGE].params)
    program = program_of(args, commands, lambda name: _is_foreign(name, known, MERGE))
    if program is None:
        return
    correction = corrected_line(program.command, program.words, commands, program=True)
    if correction is not None:
        raise UsageError(program.what, program.name, _fix(correction, ()))
    if program.certain and program.command in COMMANDS:
        options = {name: (*values, "")[0] for name, values in by_option(program.words) if name}
        advice = _advices(options, program.command, commands[program.command].params) if options else NAME_THE_FILES
        raise UsageError(program.what, program.name, program.advice or advice)


def _is_foreign(name: str, known: Collection[str], command: str) -> bool:
    """Return whether an option belongs to other programs, or to other commands of ours if it is a strength."""
    plain = hyphened(name)
    if plain in (*known, "-h", "--help") or (command not in COMMANDS and f"{plain}s" in known):
        return False
    if plain in OWN_STRENGTHS:
        return command in COMMANDS
    if plain in OUR_OPTIONS and command not in COMMANDS:  # a field of the jobs file of `batch`
        return command != "batch"
    ours = plain[2:].replace("-", "_") in COMMANDS[MERGE].options
    unknown = re.match("--|-[A-Za-z]$", name) is not None and not ours and not alike(plain, [*known, "--help"])
    return unknown or meaning_of(name, [*known, plain] if ours else known) is not None


def _fix(correction: Correction, foreign: Sequence[str]) -> str:
    """Return the fix with the line that is meant. `foreign`: the options that are refused."""
    right = f"write {line(correction.words)}"
    if places := [word for word in correction.words[:2] if word in PLACES]:
        right = f"name the {places[0].lower()}: `{line(correction.words)}`"
        right = f"name the files: {line(correction.words)}" if len(places) > 1 else right
    if correction.conflicts:
        right = f"keep one of them: {right}"
    elif correction.repeated:
        right = f"give one for each adapter, such as {line(correction.words)}"
    by_reason: dict[str, list[str]] = {}
    for option, reason in correction.left_out:
        by_reason.setdefault(reason, []).append(option)
    names = [option.split()[0] for option, _ in correction.left_out]
    if not correction.unclear and len(by_reason) == 1 and names == [*foreign]:
        return f"leave {'it' if len(foreign) == 1 else 'them'} out: {correction.left_out[0][1]}; {right}"
    left_out = ", ".join(f"{', '.join(options)} ({reason})" for reason, options in by_reason.items())
    not_clear = [f"for {option}, {advice.partition(';')[0].replace('`', '')}" for option, advice in correction.unclear]
    return "; ".join([*not_clear, *([f"leave out {left_out}"] if left_out else []), right])


def _advices(foreign: Mapping[str, str], command: str, parameters: Sequence[Any]) -> str:
    """Return what to write for each option, if no line is certain. `foreign`: option → the word after it."""
    known = flags(parameters)
    files = [p.metavar or p.name.upper() for p in parameters if p.param_type_name == "argument"]
    usage = f"files go after the command: `lora-merge {' '.join((command, *files))}`"
    usage = f"{THE_BASE}; {ADAPTER_ORDER}" if command == MERGE else usage
    of_files, advices = {Role.BASE, Role.MODEL, Role.TUNED, Role.ADAPTERS}, list[str]()
    for name, value in foreign.items():
        meaning = meaning_of(name, known) or UNKNOWN
        if meaning is UNKNOWN and (right_form(value) or name in OWN_STRENGTHS):
            meaning = Foreign(STRENGTH_FORMS, (Role.STRENGTHS,))
        advice = "" if meaning is UNKNOWN else advice_on(meaning, known)
        advices.append(usage if of_files & {*meaning.forms} else advice)
    return "; ".join(filter(None, dict.fromkeys(advices))) or f"see `lora-merge help {command}`"

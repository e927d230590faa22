"""Options of other programs, and strengths at the wrong place: each is refused with the user's own line corrected.

There is a line as soon as its files are certain, and advice otherwise. What a line lacks of the user's own is named.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

from ..adapter_arguments import right_form
from ..command import MERGE
from ..errors import UsageError
from ..merge_methods import METHODS, SUM
from ..options import BLOCK_WEIGHTS
from ..paths import exists, with_found_ending
from ..recipes.commands import COMMANDS
from ..text import plural
from .argument_values import ADAPTER_ORDER, expanded, strengths
from .compat import check_dashes
from .corrected_line import PLACES, line, options_of
from .foreign_inputs import NAME_THE_FILES, OF_NODES, OF_PYTHON, with_options
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
from .foreign_programs import NO_PROGRAM, program_of
from .terminal import before_dashes
from .typed_file import TypedFile, numbers_in
from .typed_line import (
    MISTAKES,
    NO_OPTION,
    OF_MODELS,
    OTHER_SYNTAX,
    OWN_STRENGTHS,
    OWN_WEIGHTS,
    NotClear,
    Remark,
    RemarkKind,
    Setting,
    Syntax,
    TypedLine,
    TypedStrength,
    by_option,
    right_value,
)

FEW: Final = 4
"""Numbers in one word that may be strengths of adapters."""


class Correction(NamedTuple):
    """The line that is meant."""

    words: list[str]
    remarks: Sequence[Remark]
    """What it has in another way than the line that is typed; of two values it has the last."""
    mistake: str
    """What is wrong with the strengths of the line as it is typed; "" for nothing."""
    repeated: bool
    """Whether a strength is for several adapters, which the user did not write."""

    def by_kind(self, kind: RemarkKind) -> list[Remark]:
        """Return its remarks of a kind."""
        return [remark for remark in self.remarks if remark.kind == kind]


def corrected(reading: TypedLine) -> Correction:
    """Return the line that is meant; NotClear if its files are too few, too many, or of another kind."""
    syntax, files, settings = reading.syntax, _files(reading), _settings(reading)
    settings += _take_required(reading, {s.words[0] for s in settings})
    pairs = [(file, word) for file in files[syntax.models :] for word in expanded([file.word])]
    adapters = [file if word == file.word else TypedFile.of(word) for file, word in pairs]
    # Step 1: each strength gets its adapter.
    if syntax.merges:
        _fit_parts(reading, files[0], adapters)
    _take_share(reading, settings, adapters)
    count, repeated = _take_strengths(reading, adapters)
    mistake = (syntax.merges and _scaled(settings, adapters)) or _mistake(reading, adapters, count)
    # Step 2: options become strengths, or are left out.
    _take_alphas(reading, settings, adapters)
    others = {setting.words for setting in settings}
    settings += (s for s in _take_part_strengths(reading, adapters) if s.words not in others)
    # Step 3: strengths follow the adapters, or become --weights.
    paths, options = [file.word for file in adapters], [word for setting in settings for word in setting.words]
    if syntax.weighted and any(file.strength for file in adapters):
        paths = [with_found_ending(file.path) if file.stated else file.path for file in adapters]
        options += [OWN_WEIGHTS, ",".join(file.strength or "1" for file in adapters)]
    words = [*[syntax.name] * (syntax.name != MERGE), *(file.word for file in files[: syntax.models]), *paths, *options]
    name = adapters[0].path if len(adapters) == 1 else "ADAPTER"
    remarks = [remark._replace(reason=remark.reason.replace("ADAPTER", name)) for remark in reading.remarks]
    return Correction(words, remarks, mistake, repeated)


def _take_required(reading: TypedLine, stated: Collection[str]) -> list[Setting]:
    """Return the option that a command cannot do without, if the number of the line is its value: `resize FILE 16`."""
    required = [row for row in reading.syntax.options.values() if row.required and row.flag not in stated]
    numbers = reading.strengths[""]
    values = [right_value(row, s.value) for row in required for s in numbers]
    if required and (len(values) != 1 or not values[0]):
        raise NotClear(required[0].flag)
    if required:
        reading.remark("mistake", numbers.pop().value, NO_OPTION)
    return [Setting(value, (required[0].flag, value)) for value in values[: len(required)]]


def _take_share(reading: TypedLine, settings: list[Setting], adapters: Sequence[TypedFile]) -> None:
    """Make the alpha of a weighted sum, which is the share of the second file, the strengths of both files."""
    shares = [TypedStrength(s.typed, s.words[1]) for s in settings if s.words[0] == "--alpha"] * reading.foreign
    shares = [s for s in shares if right_form(s.value).startswith("0.")]
    settings[:] = [s for s in settings if s.typed not in {share.typed for share in shares}]
    shares += [s for s in reading.strengths[""] if reading.syntax.weighted and "alpha" in s.typed]
    if not shares:
        return
    if len(adapters) != 2 or {s.typed for s in reading.strengths[""]} - {s.typed for s in shares}:
        raise NotClear(shares[0].typed)
    share = float(right_form(shares[-1].value))
    reading.strengths[""] = [TypedStrength(shares[-1].typed, f"{value:g}") for value in (1 - share, share)]


def _leave_out(reading: TypedLine, typed: Sequence[str], reason: str) -> None:
    reading.remarks += [Remark("left out", text, reason) for text in typed]


def _take_strengths(reading: TypedLine, adapters: Sequence[TypedFile]) -> tuple[int, bool]:
    """Give each strength to its adapter: in order, or to those without a strength in order. Return how many there are,
    and whether one is for several adapters."""
    stated = reading.strengths[""]
    if blocks := next((s for s in stated if len(numbers_in(s.value)) > max(len(adapters), FEW)), None):
        raise NotClear(blocks.typed)  # weights of blocks
    values = _values([s.value for s in stated], adapters)
    if values and not reading.syntax.weighted and "strength" not in reading.syntax.options:
        raise NotClear(values[0])
    pairs = _by_adapter(reading, stated, values, adapters, [file for file in adapters if not file.strength])
    if len(values) < len(pairs) and reading.syntax.weighted:
        raise NotClear(values[-1])
    for file, value in pairs:
        if file.strength and float(file.strength) != float(value):
            reading.remark("conflict", f"{file.path} has two strengths, {file.strength} and {value}")
        file.take_strength(value)
    return len(values), len(values) < len(pairs)


def _by_adapter(
    reading: TypedLine, stated: Sequence[TypedStrength], values: list[str], adapters: Sequence[TypedFile],
    bare: Sequence[TypedFile],
) -> list[tuple[TypedFile, str]]:  # fmt: skip
    """Return the adapters whose strengths these are, each with its value, in order: all of them; those right before the
    strengths; or the bare ones. The last value is for all that follow, and further ones are left out."""
    named, receivers = {s.after for s in stated} - {""}, adapters if len(values) == len(adapters) else bare
    if len(values) == len(stated) == len(named) < len(adapters):  # one 0.8 two
        receivers = [file for file in adapters if file.word in named or file.path in named]
    _leave_out(reading, values[len(receivers) :], "every adapter has a strength")
    return [*zip(receivers, [*values, *values[-1:] * len(receivers)], strict=False)]


def _fit_parts(reading: TypedLine, base: TypedFile, adapters: Sequence[TypedFile]) -> None:
    """Make strengths of the denoiser those of the whole adapters if the base has nothing else: a strength of its text
    encoders is left out."""
    if not reading.differs or base.index is None:
        return
    from ..models.names import names

    labels = {part.label for part in names(base.index).parts}
    encoders = {label for label in labels if label.startswith("te")}
    absent = [part for part in reading.strengths if part.startswith("te") and not encoders & {part, "te"}]
    absent += ["te2"] if encoders == {"te"} and "te2" in reading.strengths else []
    of_absent = [s.typed for part in absent for s in reading.strengths.pop(part)]
    _leave_out(reading, of_absent, f"the base has no {'second ' * bool(encoders)}text encoder")
    changed = [file for file in adapters if file.has_text_encoder]
    if not encoders and changed and not any("te=" in file.parts for file in changed):
        reading.strengths["te"] = [TypedStrength("", "0")]
    elif not encoders and "unet" in reading.strengths:
        reading.strengths[""] = reading.strengths.pop("unet")
    elif encoders and not changed and all(file.kind for file in adapters):
        of_encoders = [part for part in reading.strengths if part.startswith("te")]
        typed = [s.typed for part in of_encoders for s in reading.strengths.pop(part)]
        _leave_out(reading, typed, f"{adapters[0].path} changes no text encoder")
    for file in adapters if "unet" in labels else ():  # of a tag, <lora:style:0.8:0.5>
        file.fit_encoders(in_base=bool(encoders))


def _take_part_strengths(reading: TypedLine, adapters: Sequence[TypedFile]) -> list[Setting]:
    """Return the strengths of parts as options; those of one adapter, or of one with another strength than 1, become
    factors of the adapter, as other programs have them in place of the whole strength."""
    settings = list[Setting]()
    for part, stated in reading.strengths.items():
        texts = [[s.value.strip("[]()")] if part == BLOCK_WEIGHTS else numbers_in(s.value) for s in stated]
        values = [value for text in texts for value in text]
        if not part or not values:
            continue
        if reading.syntax.weighted or not adapters:
            reading.remarks += [Remark("unclear", s.typed, STRENGTH_FORMS) for s in stated]
            continue
        if len(adapters) == 1 and len(stated) == len(values) > 1 and len({*values}) > 1:
            reading.remark("conflict", f"{stated[-2].typed} and {stated[-1].typed} contradict each other")
            values = values[-1:]
        pairs = _by_adapter(reading, stated, values, adapters, adapters)
        typed = [file for file, _ in pairs if f",{part}=" in file.parts]
        reading.remarks += [Remark("conflict", f"{file.path} has two strengths of {part}") for file in typed]
        whole = all(file.strength in ("", "1") for file in adapters) and not typed
        if len(values) == 1 and len(pairs) == len(adapters) and whole:
            settings.append(Setting(stated[-1].typed, ("--strength-for", f"{part}={values[0]}")))
            continue
        for file, value in pairs:
            file.of_parts[part] = value
    for file in adapters:
        file.apply_parts({s.words[1].partition("=")[0] for s in settings})
    return settings


def _scaled(settings: list[Setting], adapters: Sequence[TypedFile]) -> str:
    """Take the factor of a merge by sum out of the settings, as one of each strength; return what is wrong with it."""
    by_name = {setting.words[0]: setting for setting in settings}
    method = by_name["--method"].words[1] if "--method" in by_name else SUM
    scale, row = right_form(by_name["--scale"].words[1]) if "--scale" in by_name else "", METHODS.get(method)
    if not scale or float(scale) == 1 or row is None or row.combines:
        return ""
    settings.remove(by_name["--scale"])
    for file in adapters:
        file.take_strength(f"{float(file.strength or 1) * float(scale):g}")
    return f"{method} has no scale"


def _take_alphas(reading: TypedLine, settings: list[Setting], adapters: Sequence[TypedFile]) -> None:
    """Make an alpha of another program that of the output if all files state theirs; a merge has none."""
    alphas = [s for s in settings if s.words[0] == "--setting" and not s.typed.startswith("--setting")]
    if not alphas or not all(file.states_alpha for file in adapters):
        return
    settings[:] = [setting for setting in settings if setting not in alphas]
    if "alpha" in reading.syntax.options:
        settings += [Setting(s.typed, ("--alpha", s.words[1].partition("=")[2])) for s in alphas[-1:]]
    else:
        _leave_out(reading, [setting.typed for setting in alphas], "the adapter states its alpha")


def _mistake(reading: TypedLine, adapters: Sequence[TypedFile], count: int) -> str:
    """Return what is wrong with the strengths as they are typed; "" for nothing. `count`: of those by option."""
    for what in MISTAKES:
        words = [remark.typed for remark in reading.remarks if remark.reason == what]
        is_tag = "<" in "".join(words)  # another word alone has an error with all of its readings
        if words and (what != OTHER_SYNTAX or len(words) > 1 or is_tag):
            return f"{what}: {' '.join(words)}"
    texts = [s.value for s in reading.strengths[""]]
    try:
        _ = [*map(float, ",".join(texts or ["1"]).split(","))] if reading.syntax.weighted else []
        _ = strengths([text for text in texts if not right_form(text)], 0)
    except (UsageError, ValueError):
        return f"{OWN_WEIGHTS if reading.syntax.weighted else OWN_STRENGTHS[1]} has another syntax: {' '.join(texts)}"
    stated = [file for file in adapters if file.stated]
    if reading.syntax.weighted:
        return "snapshots have weights, not strengths" if stated else ""
    if not count or (count == len(adapters) and not stated):
        return ""
    few = f"{plural(count, 'strength')} for {plural(len(adapters), 'adapter')}"
    return few if count != len(adapters) else "strengths are given twice"


def _files(reading: TypedLine) -> list[TypedFile]:
    """Return the files in the order of our commands."""
    syntax, base, tuned = reading.syntax, reading.named(Role.BASE), reading.named(Role.TUNED)
    for role in OF_MODELS:
        for before, after in pairwise(file for file in reading.files if file.role == role):
            if before.word != after.word:
                reading.remark("conflict", f"{before.typed} and {after.typed} contradict each other")
    # A file may be named with an option, and without one too.
    adapters = [file for file in reading.files if file.role == Role.ADAPTERS]
    by_option = {word: file for file in adapters for word in (file.path, file.word)}
    placed = [by_option.get(file.word, file) for file in reading.placed if file.word not in [f.word for f in base]]
    if reading.foreign:
        placed = [f for n, f in enumerate(placed) if f.role != Role.ADAPTERS or f not in placed[:n]]
    if syntax.models == 2:
        files = [*base, *tuned, *placed] if base else [*placed, *tuned]
    elif syntax.merges and not base:
        others = [file for file in placed if file.role != Role.ADAPTERS]
        models = [file for file in others if reading.differs and file.kind == "model"]
        base = models if len(models) == 1 else others[:1]
        files = [*base, *(file for file in placed if file not in base), *tuned]
    else:
        files = [*base, *placed, *tuned]
    if syntax.options and reading.foreign and len(files) < 1 + syntax.merges:
        files = _with_places(reading, files)
    # The files are as many as the command takes, each of its kind, and a base is not its own adapter.
    words, first = [file.word for file in files], syntax.models
    clear = syntax.required <= len(files) and (syntax.several or len(files) <= max(first, 1))
    clear = clear and not (tuned and syntax.options and first < 2)
    if syntax.options and reading.differs:  # otherwise the command itself reports it
        clear = clear and all((file.kind == "model") is (n < first) for n, file in enumerate(files) if file.kind)
    if not clear or ((syntax.merges or not syntax.options) and {*words[:1]} & {*words[1:]}):
        raise NotClear(" ".join(words))
    return files


def _with_places(reading: TypedLine, files: list[TypedFile]) -> list[TypedFile]:
    """Return the one file of a merge, or none, with places for what is missing."""
    if not files:
        of_others = ("BASE", "TUNED") if reading.syntax.models == 2 else ("ADAPTER", "ADAPTER2")
        places = ("BASE", "ADAPTER") if reading.syntax.merges else of_others
        return [*map(TypedFile, places)][: reading.syntax.required if reading.settings else 0]
    return [TypedFile("BASE"), *files] if files[0].of_adapter else [*files, TypedFile("ADAPTER")]


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
            if name == "--dtype":
                reading.remark("unclear", setting.typed, "use --dtype fp16, bf16 or fp32")
            else:
                reading.remark("left out", setting.typed, "sums are computed in fp32 or fp64")
    # Step 2: a share with its rule is the rank, and a rank next to it is a limit.
    if {Role.RULE, Role.SHARE} & {*of_role}:
        of_resize, share = (of_role[role].words[1] if role in of_role else "" for role in (Role.RULE, Role.SHARE))
        rule = f"{FOREIGN_RULES.get(of_resize)}:{share}"
        if "rank" not in reading.syntax.options or not right_value(reading.syntax.options["rank"], rule):
            raise NotClear(rule)
        settings = [Setting(s.typed, ("--max-rank", s.words[1])) if s.words[0] == "--rank" else s for s in settings]
        settings = [Setting("--dynamic-param", ("--rank", rule)), *settings]
    # Step 3: an output has one place.
    of_hub = [s for s in settings if s.words[1:] and s.words[1].startswith("hf://") and s.words[1] not in s.typed]
    if any(s.words[0] in ("-o", "--output") and s not in of_hub for s in settings):
        settings = [s for s in settings if s not in of_hub]
        _leave_out(reading, [s.typed for s in of_hub], "upload the output by hf upload OWNER/NAME FOLDER")
    # Step 4: two spellings of one option have one value.
    by_place = dict[Any, Setting]()
    for setting in _with_folder(settings):
        name, *value = setting.words
        parameter = reading.syntax.known.get(name)
        several = parameter is not None and parameter.multiple
        place = (parameter.name if parameter else name, several and (value[0].rpartition("=")[0] or value[0]))
        before = by_place.get(place, setting)
        foreign = [s for s in (before, setting) if hyphened(s.typed.split()[0]) not in reading.syntax.known]
        if before.words[1:] != setting.words[1:] and foreign:
            reading.remark("conflict", f"{before.typed} and {setting.typed} contradict each other")
        by_place[place] = setting
    return sorted(by_place.values(), key=lambda s: s.words[0] not in ("-o", "--output"))


def _with_folder(settings: Sequence[Setting]) -> list[Setting]:
    """Return options with one output in place of its folder and its name: `--output_dir out --output_name style`."""
    names = [s for s in settings if s.words[0] == "-o" and hyphened(s.typed).partition(" ")[0].endswith("-name")]
    folders = [s for s in settings if s.words[0] == "-o" and re.match(".*-(?:dir|folder|path)[ =]", hyphened(s.typed))]
    if len(names) != 1 or len(folders) != 1:
        return [*settings]
    whole = f"{folders[0].words[1].rstrip('/')}/{names[0].words[1]}"
    return [s for s in settings if s not in (*names, *folders)] + [Setting(names[0].typed, ("-o", whole))]


def _values(numbers: Sequence[str], adapters: Sequence[TypedFile]) -> list[str]:
    """Return strengths as they are written here. "0,5" is one number if that gives a strength for each adapter."""
    whole, apart = [right_form(text) for text in numbers], [n for text in numbers for n in numbers_in(text)]
    counts = (len(adapters), sum(not file.strength for file in adapters))
    values = whole if all(whole) and len(whole) in counts else apart
    if numbers and not (values and adapters):
        raise NotClear(numbers[0])
    return values


def corrected_line(
    command: str, args: Sequence[str], commands: Mapping[str, Any], program: str = ""
) -> Correction | None:
    """Return the line that the words of a command are meant as; None if that is not certain. `commands`: by name;
    `program`: what kind of line of another program it is, "" for one of ours."""
    if "--" in args:
        return None
    reading = TypedLine(Syntax.of(command, commands), foreign=bool(program))
    try:
        reading.take(args)
        if not reading.foreign and any(remark.reason == NOT_KNOWN for remark in reading.remarks):
            return None  # a word is neither a file nor a number
        without_base = len(reading.placed) > 1 and all(file.of_adapter for file in reading.placed)
        if command == MERGE and reading.differs and without_base and not reading.named(Role.BASE):
            if program not in (OF_PYTHON, OF_NODES):  # they become one adapter
                return corrected_line("combine", args, commands, program)
            reading.files.append(TypedFile("BASE", role=Role.BASE))
        reading.take_output(program=bool(program))
        return corrected(reading)
    except NotClear:
        return None


def check_line(command: str, args: Sequence[str], commands: Mapping[str, Any]) -> None:
    """Raise UsageError, with the line that is meant, for an option that only other programs have, and for strengths
    that are not one for each adapter. `commands`: by name."""
    syntax = Syntax.of(command, commands)
    known = syntax.known
    check_dashes(args, known)
    if hasattr(commands[command], "commands"):  # its commands have options of their own
        return
    for at, (flag, part, value) in enumerate(zip(args, args[1:], args[2:], strict=False)):
        if flag == "--strength-for" and "=" not in part and right_form(value) and not exists(value):
            whole = [*args[: at + 1], f"{part}={right_form(value)}", *args[at + 3 :]]
            right = line(whole if command == MERGE else [command, *whole])
            raise UsageError("a part and its factor are one word", f"`{flag} {part} {value}`", f"write {right}")
    values = _stated(before_dashes(args))
    inputs, meant = with_options(args), MERGE if command == "batch" else command
    if inputs.typed and (correction := corrected_line(meant, inputs.words, commands, inputs.what)):
        raise UsageError(inputs.what, " ".join(inputs.typed)[:200], _fix(correction, ()))
    foreign = [name for name in values if syntax.is_foreign(name)]
    misspelt = [name for name in values if hyphened(name) not in known and alike(hyphened(name), known)]
    if len({*foreign, *misspelt}) > 1:  # one alone has its own error
        foreign = [name for name in values if name in (*foreign, *misspelt)]
    correction = corrected_line(command, args, commands)
    if foreign:
        what = f"there is no option {' nor '.join(foreign)} here"
    elif correction and syntax.options and {*map(hyphened, values)} <= known.keys():
        what = correction.mistake
    else:
        return
    if correction and (conflicts := correction.by_kind("conflict")):
        what = "; ".join(remark.typed for remark in conflicts)
    if not what:
        return
    advised = {name: values[name] for name in foreign}
    fix = _fix(correction, foreign) if correction else _advices(advised, command, commands)
    raise UsageError(what, " ".join(args)[:200], fix)


def check_foreign_command(args: Sequence[str], commands: Mapping[str, Any]) -> None:
    """Raise UsageError, with the line that is meant, for a line of another program: `merge_lora.py --sd_model b …`, or
    a configuration of one."""
    program = program_of(args, commands)
    if program is None:
        return
    correction = corrected_line(program.command, program.words, commands, program.what)
    if correction is not None:
        raise UsageError(program.what, program.name, _fix(correction, ()))
    if program.what != NO_PROGRAM and program.command in COMMANDS:
        options = _stated(program.words)
        advice = _advices(options, program.command, commands) if options else NAME_THE_FILES
        raise UsageError(program.what, program.name, program.advice or advice)


def _stated(args: Sequence[str]) -> dict[str, str]:
    """Return option → the word after it, "" for none."""
    return {option: (*words, "")[0] for option, words in by_option(args) if option}


def _fix(correction: Correction, foreign: Sequence[str]) -> str:
    """Return the fix with the line that is meant. `foreign`: the options that are refused."""
    right = f"write {line(correction.words)}"
    if places := [word for word in correction.words[:2] if word in PLACES]:
        right = f"name the {places[0].lower()}: `{line(correction.words)}`"
        right = f"name the files: {line(correction.words)}" if len(places) > 1 else right
    left_out, unclear = correction.by_kind("left out"), correction.by_kind("unclear")
    if correction.by_kind("conflict"):
        right = f"keep one of them: {right}"
    elif correction.repeated:
        right = f"give one for each adapter, such as {line(correction.words)}"
    by_reason: dict[str, list[str]] = {}
    for remark in left_out:
        by_reason.setdefault(remark.reason, []).append(remark.typed)
    if not unclear and len(by_reason) == 1 and [remark.typed.split()[0] for remark in left_out] == [*foreign]:
        return f"leave {'it' if len(foreign) == 1 else 'them'} out: {left_out[0].reason}; {right}"
    reasons = ", ".join(f"{', '.join(options)} ({reason})" for reason, options in by_reason.items())
    ways = [f"for {remark.typed}, {remark.reason.partition(';')[0].replace('`', '')}" for remark in unclear]
    return "; ".join([*ways, *([f"leave out {reasons}"] if reasons else []), right])


def _advices(foreign: Mapping[str, str], command: str, commands: Mapping[str, Any]) -> str:
    """Return what to write for each option, if no line is certain. `foreign`: option → the word after it."""
    parameters, known = commands[command].params, options_of(commands[command])
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

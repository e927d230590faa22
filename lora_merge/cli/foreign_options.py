"""Options of other programs, and strengths at the wrong place: each is refused with the user's own line corrected.

A line is read by roles: files, strengths, options of ours. An option has its role by the words of its name, and its
value must agree: a file, a number. An option that no words explain has the role of its value. What has no counterpart
here is left out, and the message says so; never a number, a file or a path: if their role is not certain, there is
advice in place of a line.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from ..adapter_arguments import right_form
from ..addresses import split
from ..command import MERGE, Command
from ..errors import MergeError, UsageError
from ..merge_methods import METHODS, SUM
from ..option_texts import value_of
from ..options import OPTIONS, SWITCHED, Option, checked_value
from ..paths import ENDINGS, exists, expand, split_strength, with_found_ending
from ..recipes.commands import COMMANDS
from ..text import plural
from .argument_values import ADAPTER_ORDER, check_adapter, check_parts, check_tag, check_two, expanded, strengths
from .compat import FOREIGN_COMMANDS, check_dashes
from .corrected_line import flags, is_adapter, line, path_of
from .foreign_names import (
    FOREIGN_RULES,
    LORA_ALPHA,
    NOT_KNOWN,
    ONLY_PARTS,
    OTHER_VALUES,
    SIMILAR,
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

HIGHEST_STRENGTH: Final = 2.0
"""The value of `--alpha` up to which it is a strength, as in supermerger; a larger one is the alpha of a training."""

OWN_STRENGTHS: Final = ("-s", "--strength")
OWN_WEIGHTS: Final = "--weights"
NO_STRENGTH: Final = "[0-9]+|-[0-9.]+|[0-9.]+(?:,[0-9.]+)+"
"""Numbers after an option without a value that are meant as its value, and not as a strength."""
FEW: Final = 4
"""Numbers in one word that may be strengths of adapters."""


class Setting(NamedTuple):
    """An option of ours with its value, or the role of a file with the file."""

    typed: str
    """The option and its value as the user has them."""
    words: tuple[str, ...]


class NotClear(Exception):
    """A line has a word whose role is not certain, so that no line is put in its place."""


@dataclass
class TypedLine:
    """A command line by roles."""

    command: Command
    known: Mapping[str, Any]
    """Option of the command → its parameter."""
    required: int
    """The number of files that the command needs."""
    foreign: bool = False
    """Whether the command lacks one of the options."""
    settings: list[Setting] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)
    """Files without an option."""
    adapters: list[str] = field(default_factory=list)
    numbers: list[str] = field(default_factory=list)
    """Strengths as they are typed."""
    rewritten: list[str] = field(default_factory=list)
    """Adapters in another syntax, as they are typed."""
    strays: list[str] = field(default_factory=list)
    """The strengths without an option."""
    followed: list[str] = field(default_factory=list)
    """The files with a strength after them."""
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """Option as it is typed → reason."""
    conflicts: list[str] = field(default_factory=list)
    """What has two values."""
    scaled: Sequence[str] = ()
    """The file of an option for one file with its strength."""
    valued: list[str] = field(default_factory=list)
    """The options of ours without a value that have one."""

    def take(self, args: Sequence[str]) -> TypedLine:
        """Return itself with the words of a line; NotClear for a word without a role."""
        option, form, value, fresh = "", "", "", False
        for word in (part for arg in args for part in (arg.split("=", 1) if arg.startswith("--") else [arg])):
            before, value = value, ""
            if word.startswith("-") and len(word) > 1 and not right_form(word):
                self._expect_value(option, form, fresh=fresh)
                option, form, fresh = word, self._form(word), True
                continue
            if form == Role.OTHER_FILE and right_form(word):  # --te 0.5
                self._take_part(option, word)
                form = ""
            elif form == Role.OTHER_FILE or (form == Role.LEFT_OUT and not _names_file(word)):
                self._leave_out(word)
                form = ""
            elif form == Role.SWITCH and (word.lower() in SWITCHED or re.fullmatch(NO_STRENGTH, word)):
                self._take_switched(option, word.lower())
                form = ""
            elif right_form(before) and right_form(word) and not exists(word):  # --rank 4 8
                if self.settings and self.settings[-1].words[0] == "--strength-for":  # one for each adapter
                    raise NotClear(word)
                self.conflicts.append(f"{option} has two values, {before} and {word}")
            elif form in ("", Role.LEFT_OUT, Role.SWITCH) or (form in Role.SEVERAL and not fresh):
                if form == Role.LEFT_OUT and self.left_out[-1][1] == NOT_KNOWN:  # the file has the role of its value
                    self.left_out.pop()
                self._take_word(word, form)
                form = "" if form in (Role.LEFT_OUT, Role.SWITCH) else form
            else:
                value = "" if form in (Role.STRENGTH, Role.ALPHA, *Role.SEVERAL) else word
                form = self._take_value(option, form, word)
            fresh = False
        self._expect_value(option, form, fresh=fresh)
        return self

    def _take_part(self, option: str, value: str) -> None:
        """Take the strength of the text encoder after an option that may also name its file."""
        if {"te", "clip", "encoder"}.isdisjoint(hyphened(option)[2:].split("-")):
            raise NotClear(option)
        self.left_out.pop()
        self.settings.append(Setting(f"{option} {value}", ("--strength-for", f"te={right_form(value)}")))

    def _take_switched(self, option: str, value: str) -> None:
        """Take "true", "false" or a number after an option that has no value here."""
        if "-" in value or "," in value:  # --gpu 0,1
            raise NotClear(value)
        if value.isdecimal() and self.settings[-1].words == ("--device", "cuda"):  # --gpu 0
            self.settings[-1] = Setting(f"{option} {value}", ("--device", f"cuda:{value}"))
            return
        if hyphened(option) in self.known:
            self.valued.append(f"{option} {value}")
        if not SWITCHED.get(value, True):
            opposite = f"--no-{self.settings.pop().words[0][2:]}"
            self.settings += [Setting(f"{option} {value}", (opposite,))] * (opposite in self.known)

    def _expect_value(self, option: str, form: str, *, fresh: bool) -> None:
        if fresh and form not in ("", Role.LEFT_OUT, Role.SWITCH):
            raise NotClear(option)

    def _leave_out(self, value: str) -> None:
        """Leave out a value with its option; NotClear for one of an unknown option that may be of use."""
        typed, reason = self.left_out.pop()
        if reason == NOT_KNOWN and (_numbers_in(value) or _looks_like_path(value)):
            raise NotClear(value)
        self.left_out.append((f"{typed} {value}", reason))

    def _form(self, option: str) -> str:
        """Return the form of an option with a value after it; SWITCH for one without, which is taken at once."""
        name, meaning = hyphened(option), None
        if name not in self.known and (meaning := meaning_of(option, self.known)) is None:
            name = next(iter(alike(name, self.known, SIMILAR)), name)
        if name in OWN_STRENGTHS or (name == OWN_WEIGHTS and name in self.known):
            return Role.STRENGTH
        if name in self.known:
            forms: tuple[str, ...] = (name if self.known[name].is_flag else f"{name} {{}}",)
        else:
            meaning = meaning or UNKNOWN
            forms = meaning.forms
            self.foreign = True
            if {Role.LEFT_OUT, Role.OTHER_FILE} & {*forms}:
                self.left_out.append((option, meaning.advice.removeprefix("leave it out: ")))
        form = next((form for form in forms if not form.startswith("-") or form.split()[0] in self.known), None)
        if form is None:
            raise NotClear(option)
        if "{}" in form or not form.startswith("-"):
            return form
        self.settings.append(Setting(option, tuple(form.split())))
        return Role.SWITCH

    def _take_word(self, word: str, form: str) -> None:
        """Take a word after an option that may have several, or after none."""
        if not _names_file(word) and (word.endswith((".yaml", ".yml", ".py")) or not (form or _may_be_file(word))):
            raise NotClear(word)
        if _numbers_in(word) and not exists(word):
            files = [*self.plain[-1:], *self.adapters[-1:]] if form != Role.STRENGTHS else self.scaled
            self.numbers.append(word)
            self.scaled = []
            self.strays += [word] * (form != Role.STRENGTHS)
            self.followed += files[-1:]
        elif form == Role.STRENGTHS and not _names_file(word):
            raise NotClear(word)
        else:
            words = _in_our_syntax(word)
            self.rewritten += [word] * (word not in words)
            if form and not all(map(_looks_like_path, words)):
                raise NotClear(word)
            by_value = form and all(is_adapter(_Term.of(word).path) for word in words)
            (self.adapters if by_value else self.plain).extend(words)
            self.scaled = words if form == Role.STRENGTHS else []

    def _take_value(self, option: str, form: str, value: str) -> str:
        """Take the value of an option; return the role of the next word."""
        typed, form = f"{option} {value}", self._agreed(form, value)
        if form in Role.SEVERAL:
            self._take_word(value, form)
            return form
        if form == Role.STRENGTH:
            self.numbers.append(value)
        elif form == "":
            self.plain.append(value)
        elif form == Role.BASE and self.required < 2 and not self.command.merges:  # of replay
            raise NotClear(option)
        elif form == Role.LEFT_OUT:
            self.left_out.append((typed, "the format is recognised"))
        elif form.startswith("-") and hyphened(option) not in self.known:
            self.settings.append(Setting(typed, self.words_for(form, value)))
        else:
            self.settings.append(Setting(typed, (form.split()[0], value)))
        return ""

    def _agreed(self, form: str, value: str) -> str:
        """Return the form of an option with this value, "" for a file as it is without an option; NotClear for a value
        that does not have the role which the words of the option state."""
        number, known = right_form(value), exists(with_found_ending(value))
        plain = not known and (bool(_numbers_in(value)) or value.lower() in SWITCHED)
        of_file = form in (Role.BASE, Role.MODEL, Role.TUNED) and not _looks_like_path(value)
        may_be_format = "to" in self.command.options and form in (Role.MODEL, "-o {}")
        if may_be_format and _is_format(value):  # --src peft --dst kohya
            return Role.LEFT_OUT if form == Role.MODEL else "--to {}"
        if form == Role.ALPHA:
            return Role.STRENGTHS if number and abs(float(number)) <= HIGHEST_STRENGTH else LORA_ALPHA.forms[0]
        if form == Role.ONLY and value in ONLY_PARTS:
            return f"--strength-for {ONLY_PARTS[value]}"
        other = form == Role.ONLY or (form == Role.JOBS and self.command.options)
        if of_file or other or (plain and form in ("-o {}", Role.ADAPTERS)):
            raise NotClear(value)
        if form == Role.MODEL and self.command.merges:
            return Role.ADAPTERS if known and is_adapter(value) else Role.BASE
        return "" if form in (Role.MODEL, Role.JOBS) else form

    def words_for(self, form: str, value: str) -> tuple[str, str]:
        """Return an option of ours with the value of another program; NotClear for a value that it does not take."""
        name, template = form.split()
        value = OTHER_VALUES.get(name, {}).get(value.lower(), value)
        if template.endswith("={}") and "=" in value:  # --block-weights IN04=0
            template = "{}"
        elif template.endswith("={}") and "lbw" not in template:
            value = right_form(value)
        row, text = self.command.options.get(name[2:].replace("-", "_")), template.format(value)
        text = right_value(row, text) if row and value else text
        if not value or not text or (name == "--to" and not _is_format(value)):
            raise NotClear(name)
        return name, text

    def file(self, role: str) -> list[str]:
        """Return the file of a role in a list; [] if the line has none."""
        return [setting.words[1] for setting in self.settings if setting.words[0] == role][-1:]


class Correction(NamedTuple):
    """The line that is meant."""

    words: list[str]
    left_out: list[tuple[str, str]]
    """Option as it is typed → reason."""
    conflicts: list[str]
    """What has two values, of which the line has the last."""
    mistake: str
    """What is wrong with the strengths of the line as it is typed; "" for nothing."""
    repeated: bool
    """Whether a strength stands for several adapters, which the user did not write."""


def corrected(reading: TypedLine) -> Correction:
    """Return the line that is meant; NotClear if its files are too few, too many, or of another kind."""
    _take_output(reading)
    files, first = _files(reading)
    left_out, conflicts, numbers = [*reading.left_out], [*reading.conflicts], reading.numbers
    settings = _settings(reading, left_out, conflicts)
    if reading.foreign and any(s.words[0] == "--alpha" and right_form(s.words[1]).startswith("0.") for s in settings):
        raise NotClear("--alpha")  # that of a network here, the share of the second input in a weighted sum
    # Step 1: each strength gets its adapter: in order, or those without a strength in order.
    weighted, has_options = "weights" in reading.command.options, bool(reading.command.options)
    terms = [_Term.of(word) for word in (expanded(files[first:]) if has_options else files[first:])]
    if any(len(_numbers_in(text)) > max(len(terms), FEW) for text in numbers):  # weights of blocks
        raise NotClear(numbers[-1])
    values = _values(numbers, terms)
    if values and not weighted and "strength" not in reading.command.options:
        raise NotClear(values[0])
    missing = {row.flag for row in reading.command.options.values() if row.required} - {s.words[0] for s in settings}
    if reading.strays and missing:  # resize FILE 16
        raise NotClear(reading.strays[0])
    bare = [term for term in terms if not term.strength]
    mistake = _mistake(reading, terms, len(values), weighted=weighted)
    free = terms if len(values) == len(terms) else bare
    if len({*reading.followed}) == len(values) == len(numbers) < len(free):  # one 0.8 two
        free = [term for term in terms if term.word in reading.followed]
    repeated = 0 < len(values) < len(free)
    left_out += [(value, "every adapter has a strength") for value in values[len(free) :]]
    for term, value in zip(free, [*values, *values[-1:] * len(free)], strict=False):
        if term.strength and float(term.strength) != float(value):
            conflicts.append(f"{term.path} has two strengths, {term.strength} and {value}")
        term.strength = value
    # Step 2: options become strengths, or are left out.
    mistake = (reading.command.merges and _scaled(settings, terms)) or mistake
    left_out += _stated_alphas(settings, terms)
    _take_part_strengths(settings, terms, reading.known)
    options = [word for setting in settings for word in setting.words]
    # Step 3: strengths follow the adapters, or become --weights.
    if weighted and values and repeated:
        raise NotClear(values[-1])
    if weighted and any(term.strength for term in terms):
        options += [OWN_WEIGHTS, ",".join(term.strength or "1" for term in terms)]
    paths = [with_found_ending(t.path) if weighted and t not in bare else t.path if weighted else t.word for t in terms]
    words = [*filter(None, [reading.command.typed]), *files[:first], *paths, *options]
    return Correction(words, left_out, conflicts, mistake, repeated)


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


def _take_part_strengths(settings: list[Setting], terms: Sequence[_Term], known: Collection[str]) -> None:
    """Move the strengths of parts, which other programs have in place of the whole one, to the adapters with another
    strength than 1: factors here multiply it."""
    of_parts = [s for s in settings if s.words[0] == "--strength-for" and "=" not in s.typed]
    of_parts = [s for s in of_parts if hyphened(s.typed.split()[0]) not in known]
    values = dict(s.words[1].split("=") for s in of_parts if s.words[1].startswith(("te=", "unet=")))
    if not values or all(term.strength in ("", "1") for term in terms):
        return
    settings[:] = [s for s in settings if s not in of_parts or s.words[1].partition("=")[0] not in values]
    for term in terms:
        parts = {part: values.get(part, term.strength or "1") for part in ("unet", "te")}
        term.strength, term.parts = "1", "".join(f",{part}={value}" for part, value in parts.items()) + term.parts


def _stated_alphas(settings: list[Setting], terms: Sequence[_Term]) -> list[tuple[str, str]]:
    """Take an alpha of another program out of the settings if all files state theirs; return what is left out."""
    alphas = [s for s in settings if s.words[0] == "--setting" and not s.typed.startswith("--setting")]
    if not alphas or not all(_states_alpha(term.path) for term in terms):
        return []
    settings[:] = [setting for setting in settings if setting not in alphas]
    return [(setting.typed, "the adapter states its alpha") for setting in alphas]


def _mistake(reading: TypedLine, terms: Sequence[_Term], count: int, *, weighted: bool) -> str:
    """Return what is wrong with the strengths as they are typed; "" for nothing. `count`: of those by option."""
    stated = [term for term in terms if term.strength or term.parts]
    if reading.conflicts or len(reading.rewritten) > 1:  # one word alone has an error with all of its readings
        return next(iter(reading.conflicts), f"adapters have another syntax: {' '.join(reading.rewritten)}")
    if reading.valued or reading.strays:
        stray = f"a number is not an adapter: {' '.join(reading.strays)}"
        return f"an option without a value has one: {', '.join(reading.valued)}" if reading.valued else stray
    try:
        _ = [*map(float, ",".join(reading.numbers or ["1"]).split(","))] if weighted else []
        _ = strengths([text for text in reading.numbers if not right_form(text)], 0)
    except (UsageError, ValueError):
        return f"{OWN_WEIGHTS if weighted else OWN_STRENGTHS[1]} has another syntax: {' '.join(reading.numbers)}"
    if weighted:
        return "snapshots have weights, not strengths" if stated else ""
    if not count or (count == len(terms) and not stated):
        return ""
    few = f"{plural(count, 'strength')} for {plural(len(terms), 'adapter')}"
    return few if count != len(terms) else "strengths are given twice"


def _states_alpha(path: str) -> bool:
    """Return whether an adapter states its alpha, as tensors, in its metadata or in its configuration."""
    from ..files.checkpoint import open_checkpoint

    try:
        file = open_checkpoint(expand(with_found_ending(path)), adapter=True)
    except MergeError:
        return False
    return any("alpha" in name for name in (*file.stored, *file.metadata, *file.config))


def _take_output(reading: TypedLine) -> None:
    """Take the last file of a line of another program as the output, if it is not there and nothing else is."""
    *before, last = reading.plain or [""]
    has_one = any(setting.words[0] in ("-o", "--output") for setting in reading.settings)
    enough = len([*before, *reading.adapters]) >= reading.required and all(map(_names_file, before))
    if reading.foreign and not has_one and enough and last.endswith(ENDINGS) and not _names_file(last):
        reading.plain = before
        reading.settings.append(Setting(last, ("-o", last)))


def _files(reading: TypedLine) -> tuple[list[str], int]:
    """Return the files in the order of our commands, and how many of the first are no adapters."""
    named = {path for word in reading.adapters for path in (word, _Term.of(word).path)}
    command, base, tuned = reading.command, reading.file(Role.BASE), reading.file(Role.TUNED)
    others = [word for word in reading.plain if word not in named]
    first = 2 if command.inputs == "checkpoints" else int(command.merges)
    if first == 2:
        files = [*base, *tuned, *others] if base else [*others, *tuned]
    elif base or not first:
        files = [*base, *reading.adapters, *others, *tuned]
    else:
        files = [*others[:1], *reading.adapters, *others[1:]]
    most = len(files) if command.several or command.merges else max(first, 1)
    models = (word for word in filter(_names_file, files[1:]) if not is_adapter(_Term.of(word).path))
    swapped = reading.foreign and first == 1 and any(models)
    if not reading.required <= len(files) <= most or (tuned and command.options and first < 2) or swapped:
        raise NotClear(" ".join(files))
    if command.merges and files[0] in files[1:]:  # a base is not its own adapter
        raise NotClear(files[0])
    return files, first


def _settings(reading: TypedLine, left_out: list[tuple[str, str]], conflicts: list[str]) -> list[Setting]:
    """Return the options of ours, the output first; add what is left out, and what has two values."""
    settings = [setting for setting in reading.settings if setting.words[0].startswith("-")]
    of_role = {setting.words[0]: setting for setting in reading.settings if setting not in settings}
    # Step 1: a precision is that of the computation if the line has another one for the output.
    if setting := of_role.get(Role.PRECISION):
        name = "--compute-dtype" if any(s.words[0] == "--dtype" for s in settings) else "--dtype"
        try:
            settings.append(Setting(setting.typed, reading.words_for(f"{name} {{}}", setting.words[1])))
        except NotClear:
            if name == "--dtype":
                raise
            left_out.append((setting.typed, "sums are computed in fp32 or fp64"))
    # Step 2: a share with its rule is the rank, and a rank next to it is a limit.
    if {Role.RULE, Role.SHARE} & {*of_role}:
        of_resize, share = (of_role[role].words[1] if role in of_role else "" for role in (Role.RULE, Role.SHARE))
        rule = f"{FOREIGN_RULES.get(of_resize)}:{share}"
        if "rank" not in reading.command.options or not right_value(reading.command.options["rank"], rule):
            raise NotClear(rule)
        settings = [Setting(s.typed, ("--max-rank", s.words[1])) if s.words[0] == "--rank" else s for s in settings]
        settings = [Setting("--dynamic-param", ("--rank", rule)), *settings]
    # Step 3: two spellings of one option have one value.
    by_place = dict[Any, Setting]()
    for setting in (*(s for s in reading.settings if s.words[0] in (Role.BASE, Role.TUNED)), *settings):
        name, *value = setting.words
        parameter = reading.known.get(name)
        several = parameter is not None and parameter.multiple
        place = (parameter.name if parameter else name, several and (value[0].rpartition("=")[0] or value[0]))
        before = by_place.get(place, setting)
        foreign = [s for s in (before, setting) if hyphened(s.typed.split()[0]) not in reading.known]
        if before.words[1:] != setting.words[1:] and foreign:
            of_several = len(reading.adapters) + len(reading.plain) - (not reading.file(Role.BASE)) > 1
            if name == "--strength-for" and of_several:  # each may be for another adapter
                raise NotClear(setting.typed)
            conflicts.append(f"{before.typed} and {setting.typed} contradict each other")
        by_place[place] = setting
    of_ours = [setting for setting in by_place.values() if setting.words[0].startswith("-")]
    return sorted(of_ours, key=lambda s: s.words[0] not in ("-o", "--output"))


@dataclass
class _Term:
    """An adapter with its strength, as a line has it."""

    path: str
    strength: str = ""
    parts: str = ""

    @classmethod
    def of(cls, word: str) -> _Term:
        """Return the adapter of a word such as "lora:0.8,te=0"."""
        if exists(word):
            return cls(word)
        tail = address[1] if (address := split(word)) else ""
        text, comma, parts = word.partition(",") if not address or tail else (word, "", "")
        path, strength = split_strength(text) if not address or tail else (word, None)
        return cls(path, "" if strength is None else f"{strength:g}", comma + parts)

    @property
    def word(self) -> str:
        """The word of our command line."""
        return f"{self.path}{self.strength and ':'}{self.strength}{self.parts}"


def _values(numbers: Sequence[str], terms: Sequence[_Term]) -> list[str]:
    """Return strengths as they are written here. "0,5" is one number if that gives a strength for each adapter."""
    whole, apart = [right_form(text) for text in numbers], [n for text in numbers for n in _numbers_in(text)]
    counts = (len(terms), sum(not term.strength for term in terms))
    values = whole if all(whole) and len(whole) in counts else apart
    if numbers and not (values and terms):
        raise NotClear(numbers[0])
    return values


def right_value(row: Option, text: str) -> str:
    """Return a value that an option takes: the text, or what it was probably meant as; "" if that is not clear."""
    try:
        if row.kind == "rule" and row.name != "alpha":
            from ..adapters_out.rank_rules import parse

            parse(text)
            return text
        value = checked_value(row, value_of(row, [text]))
    except MergeError as error:
        return next(iter(error.suggestion[1:]), "")
    return value if isinstance(value, str) else text


def _in_our_syntax(word: str) -> Sequence[str]:
    """Return the words for adapters in another syntax: "lora:0.8" for "<lora:lora:0.8>", "lora@0.8" or "lora:80%"."""
    parts = word.partition(",")[2]
    if (_names_file(word) and (not parts or "=" in parts)) or split(word) is not None:
        return [word]
    try:
        for check in (check_tag, check_two, check_parts, check_adapter):
            check(word)
    except UsageError as error:
        return error.suggestion[1:] or [word]
    return [word]


def _names_file(word: str) -> bool:
    """Return whether a word names a file that is there, with or without a strength."""
    return exists(word) or bool(path_of(word))


def _is_format(value: str) -> bool:
    """Return whether a value is the name of a format of adapters."""
    from ..adapters_out.dialects import names

    return value in names()


def _looks_like_path(word: str) -> bool:
    """Return whether a word names a file, or is written as a path or an address is."""
    return _names_file(word) or re.search(r"[/\\]|\.[A-Za-z]{2}", word) is not None


def _may_be_file(word: str) -> bool:
    """Return whether a word without an option is a number or a file, maybe a misspelt one; words of other programs,
    such as INALL, are in capitals."""
    return _looks_like_path(word) or bool(_numbers_in(word)) or word.islower()


def _numbers_in(word: str) -> list[str]:
    """Return the numbers of "0.7", "0.7,0.3", "0.7:0.3" or "[0.7, 0.3]" in our form; [] for other words."""
    numbers = [right_form(number) for number in re.split(r"[,:;\s]+", word.strip("[](),;"))]
    return numbers if all(numbers) else []


def corrected_line(command: str, args: Sequence[str], commands: Mapping[str, Any]) -> Correction | None:
    """Return the line that the words of a command are meant as; None if that is not certain. `commands`: by name."""
    row = COMMANDS.get(command) or replace(COMMANDS["combine"], name=command, options=MappingProxyType({}))
    if "--" in args:
        return None
    parameters = commands[command].params
    known = {name: p for p in parameters if p.param_type_name == "option" for name in (*p.opts, *p.secondary_opts)}
    required = sum(p.param_type_name == "argument" and p.required for p in parameters) + (command == MERGE)
    reading = TypedLine(row, known, required)
    try:
        reading.take(args)
        of_adapters = len(reading.adapters) > 1 and not (reading.plain or reading.file(Role.BASE))
        if command == MERGE and of_adapters:  # adapters alone: they become one adapter
            return corrected_line("combine", args, commands)
        return corrected(reading)
    except NotClear:
        return None


def check_line(command: str, args: Sequence[str], commands: Mapping[str, Any]) -> None:
    """Raise UsageError, with the line that is meant, for an option that only other programs have, and for strengths
    that are not one for each adapter. `commands`: by name."""
    parameters = commands[command].params
    known = flags(parameters)
    check_dashes(args, known)
    for at, (flag, part, value) in enumerate(zip(args, args[1:], args[2:], strict=False)):
        if flag == "--strength-for" and "=" not in part and right_form(value) and not exists(value):
            whole = [*args[: at + 1], f"{part}={right_form(value)}", *args[at + 3 :]]
            right = line(whole if command == MERGE else [command, *whole])
            raise UsageError("a part and its factor are one word", f"`{flag} {part} {value}`", f"write {right}")
    before = args[: args.index("--")] if "--" in args else args
    pairs = zip(before, [*before[1:], ""], strict=False)
    values = {arg.partition("=")[0]: arg.partition("=")[2] or following for arg, following in pairs}
    names = [name for name in values if name.startswith("-") and not right_form(name)]
    foreign = [name for name in names if _is_foreign(name, known, command, values[name])]
    if foreign:
        foreign = [name for name in names if name in foreign or not ({hyphened(name)} & {*known} or alike(name, known))]
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
    """Raise UsageError, with the line that is meant, for a line of another program: `merge_lora.py --sd_model b …`."""
    named = [*takewhile(lambda word: word.endswith(".py") or not (word.startswith("-") or _names_file(word)), args)]
    command = FOREIGN_COMMANDS.get(re.sub(r".*[\\/]|\.py$", "", named[-1]).replace("-", "_"), "") if named else ""
    options = [arg.partition("=")[0] for arg in args if arg.startswith("-")]
    if command in COMMANDS and any(_is_foreign(name, flags(commands[command].params), command) for name in options):
        correction = corrected_line(command, args[len(named) :], commands)
        if correction is not None:
            raise UsageError("there is neither such a command nor such a file", " ".join(named), _fix(correction, ()))


def _is_foreign(name: str, known: Collection[str], command: str, value: str = "") -> bool:
    """Return whether an option belongs to other programs, as one does with a file after it, or to other commands of
    ours if it is a strength."""
    plain = hyphened(name)
    if plain in known or (command not in COMMANDS and f"{plain}s" in known):
        return False
    ours = plain[2:].replace("-", "_") in OPTIONS or plain in OWN_STRENGTHS
    meaning = meaning_of(name, [*known, plain] if ours else known)
    of_file = _names_file(value) and not ours and not alike(plain, known)
    return meaning is not None or of_file or (command in COMMANDS and plain in OWN_STRENGTHS)


def _fix(correction: Correction, foreign: Sequence[str]) -> str:
    """Return the fix with the line that is meant. `foreign`: the options that are refused."""
    right = f"write {line(correction.words)}"
    if correction.conflicts:
        right = f"keep one of them: {right}"
    elif correction.repeated:
        right = f"give one for each adapter, such as {line(correction.words)}"
    by_reason: dict[str, list[str]] = {}
    for option, reason in correction.left_out:
        by_reason.setdefault(reason, []).append(option)
    if len(by_reason) == 1 and [option.split()[0] for option, _ in correction.left_out] == [*foreign]:
        return f"leave {'it' if len(foreign) == 1 else 'them'} out: {correction.left_out[0][1]}; {right}"
    left_out = " and ".join(f"{', '.join(options)} ({reason})" for reason, options in by_reason.items())
    return f"leave out {left_out}; {right}" if left_out else right


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

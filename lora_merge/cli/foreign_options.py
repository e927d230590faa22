"""Options of other programs, and strengths at the wrong place: each is refused with the user's own line corrected.

A line is read by roles: files, strengths, options of ours. An option has its role by the words of its name, and its
value must agree: a file, a number. An option that no words explain has the role of its value. What has no counterpart
here is left out, and the message names it. There is a line as soon as its files are certain, and advice otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import dropwhile, takewhile
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from ..adapter_arguments import right_form
from ..addresses import split
from ..command import MERGE, Command
from ..errors import MergeError, UsageError
from ..merge_methods import METHODS, SUM
from ..option_texts import value_of
from ..options import BLOCK_WEIGHTS, OPTIONS, SWITCHED, Option, checked_value
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
    part_of,
)  # fmt: skip

HIGHEST_STRENGTH: Final = 2.0
"""The value of `--alpha` up to which it is a strength, as in supermerger; a larger one is the alpha of a training."""

OWN_STRENGTHS: Final = ("-s", "--strength")
OWN_WEIGHTS: Final = "--weights"
NO_STRENGTH: Final = "[0-9]+|-[0-9.]+|[0-9.]+(?:,[0-9.]+)+"
"""Numbers after an option without a value that are meant as its value, and not as a strength."""
FEW: Final = 4
"""Numbers in one word that may be strengths of adapters."""
LAUNCHERS: Final = ("python", "python3", "py", "-m", "accelerate", "launch", "uv", "run")
"""Words before the name of a program that is written in Python."""
OF_PART: Final = re.compile(r"--strength-for (\w+)=\{\}")
"""The form of an option for the strength of a part."""

STRAY: Final = "a number is not an adapter"
OTHER_SYNTAX: Final = "adapters have another syntax"
VALUED: Final = "an option without a value has one"
MISTAKES: Final = (OTHER_SYNTAX, VALUED, STRAY)
"""What is wrong with a line that has options of ours only, the first that counts first."""


class Setting(NamedTuple):
    """An option of ours with its value, or the role of a file with the file."""

    typed: str
    """The option and its value as the user has them."""
    words: tuple[str, ...]


class TypedStrength(NamedTuple):
    """Strengths as one word of a line states them, for adapters or for a part of each."""

    typed: str
    """The option and its value."""
    value: str
    after: str
    """The adapter right before it; "" for another word."""


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
    program: bool = False
    """Whether the line begins with the name of another program."""
    foreign: bool = False
    """Whether it is a line of another program, by its name or by an option that the command lacks."""
    settings: list[Setting] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    """Files, but those of a role of their own, in the order in which they are typed."""
    adapters: list[str] = field(default_factory=list)
    """Those of them with an option for adapters."""
    strengths: dict[str, list[TypedStrength]] = field(default_factory=lambda: {"": []})
    """Part of a model → its strengths; "" for those of the whole adapters."""
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """Option as it is typed → the reason why it has no counterpart here."""
    open: list[tuple[str, str]] = field(default_factory=list)
    """Option as it is typed, whose value is not understood → the advice on it."""
    mistakes: dict[str, list[str]] = field(default_factory=dict)
    """What is wrong with words of a line that has options of ours only → the words."""
    conflicts: list[str] = field(default_factory=list)
    """What has two values."""
    last_file: str = ""
    """The word before the next one, if it names a file."""

    @property
    def weighted(self) -> bool:
        """Whether the command has weights in place of strengths."""
        return "weights" in self.command.options

    def take(self, args: Sequence[str]) -> TypedLine:
        """Return itself with the words of a line; NotClear for an option of ours without its value."""
        for option, values in _by_option(args):
            form, advice = self._form(option) if option else ("", "")
            if values and option:
                form, advice = self._agreed(option, form, advice, values[0])
            if form in ("", *Role.SEVERAL):
                rest = self._take_words(option, form, advice, values)
            elif part := OF_PART.fullmatch(form):
                rest = self._take_part(option, part[1], advice, values)
            elif form.startswith("-") and "{}" not in form:
                rest = self._take_switch(option, form, advice, values)
            elif form in (Role.LEFT_OUT, Role.OTHER_FILE, Role.NOT_CLEAR):
                rest = self._leave_out(option, form, advice, values)
            else:
                rest = self._take_value(option, form, advice, values)
            self._take_words("", "", "", rest)
        return self

    def _form(self, option: str) -> tuple[str, str]:
        """Return the form of an option, and the advice on it."""
        name, meaning = hyphened(option), None
        if name not in self.known and (meaning := meaning_of(option, self.known)) is None:
            name = next(iter(alike(name, self.known, SIMILAR)), name)
        if name in OWN_STRENGTHS or (name == OWN_WEIGHTS and name in self.known):
            return Role.STRENGTH, STRENGTH_FORMS
        if name in self.known:
            return (name if self.known[name].is_flag else f"{name} {{}}"), ""
        self.foreign = True
        meaning = meaning or UNKNOWN
        form = next((f for f in meaning.forms if not f.startswith("-") or f.split()[0] in self.known), Role.NOT_CLEAR)
        if form == Role.NOT_CLEAR and meaning.forms:  # an option of ours that the command lacks
            raise NotClear(option)
        return form, meaning.advice.removeprefix("leave it out: ")

    def _agreed(self, option: str, form: str, advice: str, value: str) -> tuple[str, str]:
        """Return the form of an option with this value, "" for a file as it is without an option, and the advice on
        it; NOT_CLEAR if the value has not the role that the words of the option state."""
        number = right_form(value)
        may_be_format = "to" in self.command.options and form in (Role.MODEL, "-o {}")
        if may_be_format and _is_format(value):  # --src peft --dst kohya
            return (Role.LEFT_OUT, "the format is recognised") if form == Role.MODEL else ("--to {}", advice)
        if number and form in (Role.OTHER_FILE, Role.MODEL) and (part := part_of(option)):  # --te 0.5
            return f"--strength-for {part}={{}}", advice
        if form == Role.ALPHA:
            of_strength = number and abs(float(number)) <= HIGHEST_STRENGTH
            return (Role.STRENGTHS, advice) if of_strength else (LORA_ALPHA.forms[0], advice)
        if form == Role.ONLY:
            known = value in ONLY_PARTS
            return (f"--strength-for {ONLY_PARTS[value]}" if known else Role.NOT_CLEAR), advice
        if form == Role.JOBS:
            return (Role.NOT_CLEAR if self.command.options else ""), advice
        return self._agreed_file(option, form, advice, value)

    def _agreed_file(self, option: str, form: str, advice: str, value: str) -> tuple[str, str]:
        """Return what `_agreed` returns, if the option may be one for a file."""
        names_file = exists(with_found_ending(value))
        plain = not names_file and (bool(_numbers_in(value)) or value.lower() in SWITCHED)
        other = re.search(r"\.[a-z]{2,5}$", value) and not value.endswith(ENDINGS)  # x.log
        of_file = form in (Role.BASE, Role.MODEL, Role.TUNED, Role.ADAPTERS) and not names_file
        of_file = of_file and (not _looks_like_path(value) or bool(other))
        if hyphened(option) not in self.known and (of_file or (plain and form in ("-o {}", Role.ADAPTERS))):
            return Role.LEFT_OUT, NOT_KNOWN
        if form == Role.BASE and self.required < 2:  # of replay, unmerge
            raise NotClear(option)
        if form == Role.MODEL:
            of_merge = Role.ADAPTERS if names_file and is_adapter(value) else Role.BASE
            return (of_merge if self.command.merges else ""), advice
        return form, advice

    def _take_words(self, option: str, form: str, advice: str, words: Sequence[str]) -> Sequence[str]:
        """Take words after an option that may have several, or after none: files and strengths."""
        files = [word for word in words if _names_file(word)]
        if option and not words:
            self.left_out.append((option, NOT_KNOWN))
        for word in words:
            if _numbers_in(word) and not exists(word):
                if form != Role.STRENGTHS:
                    self.mistakes.setdefault(STRAY, []).append(word)
                self.strengths[""].append(TypedStrength(f"{option} {word}".strip(), word, self.last_file))
                continue
            named, our_words = _names_file(word), _in_our_syntax(word)
            if form == Role.STRENGTHS and not named:
                self.open.append((f"{option} {word}", advice))
                continue
            if not named and (word.endswith((".yaml", ".yml", ".py")) or not (form or _may_be_file(word))):
                self.left_out.append((word, NOT_KNOWN))
                continue
            if form and not all(map(_looks_like_path, our_words)):
                self.left_out.append((f"{option} {word}", NOT_KNOWN))
                continue
            if word not in our_words:
                self.mistakes.setdefault(OTHER_SYNTAX, []).append(word)
            by_value = form and all(is_adapter(_Term.of(text).path) for text in our_words)
            self.files += our_words
            self.adapters += our_words if by_value else ()
            self.last_file = our_words[-1]
        if not (option and len(files) == 1) and files:  # strengths of other options are for all of them
            self.last_file = ""
        return ()

    def _take_part(self, option: str, part: str, advice: str, values: Sequence[str]) -> Sequence[str]:
        """Take the strengths of a part of a model; return the other words."""
        by_name = values[:1] if values and "=" in values[0] else ()  # --block-weights IN04=0
        for value in by_name:
            self.settings.append(Setting(f"{option} {value}", ("--strength-for", value)))
        numbers = [*takewhile(lambda word: _numbers_in(word) and not exists(word), values)]
        part = part_of(option) or part
        stated = (TypedStrength(f"{option} {value}", value, self.last_file) for value in numbers)
        self.strengths.setdefault(part, []).extend(stated)
        if not numbers and not by_name:
            return self._leave_out(option, Role.NOT_CLEAR, advice, values)
        return values[len(numbers) + len(by_name) :]

    def _take_switch(self, option: str, form: str, advice: str, values: Sequence[str]) -> Sequence[str]:
        """Take an option that has no value here, and "true", "false" or a number after it; return the other words."""
        value, words = values[0].lower() if values else "", tuple(form.split())
        is_value = value in SWITCHED or re.fullmatch(NO_STRENGTH, value) is not None
        typed = f"{option} {value}" if is_value else option
        if is_value and hyphened(option) in self.known:
            self.mistakes.setdefault(VALUED, []).append(typed)
        if is_value and value.isdecimal() and words == ("--device", "cuda"):  # --gpu 0
            words = ("--device", f"cuda:{value}")
        elif is_value and ("-" in value or "," in value):  # --gpu 0,1
            self.open.append((typed, advice))
            return values[1:]
        elif is_value and not SWITCHED.get(value, True):
            words = (f"--no-{words[0][2:]}",)
        if is_value and words[0] not in self.known:  # --load_in_8bit false
            return values[1:]
        self.settings.append(Setting(typed, words))
        return values[is_value:]

    def _take_value(self, option: str, form: str, advice: str, values: Sequence[str]) -> Sequence[str]:
        """Take the value of an option; return the other words."""
        if not values:
            if hyphened(option) in self.known:
                raise NotClear(option)
            self.left_out.append((option, NOT_KNOWN))
            return ()
        value, *rest = values
        typed = f"{option} {value}"
        if form == Role.STRENGTH:
            self.strengths[""].append(TypedStrength(typed, value, ""))
            return rest
        words = (form.split()[0], value)
        if form.startswith("-") and hyphened(option) not in self.known:
            try:
                words = self.words_for(form, value)
            except NotClear:
                if words[0] == "--to":  # without it nothing is converted
                    raise
                return self._leave_out(option, Role.NOT_CLEAR, advice, values)
        self.settings.append(Setting(typed, words))
        if form.startswith("-") and rest and right_form(value) and right_form(rest[0]) and not exists(rest[0]):
            self.conflicts.append(f"{option} has two values, {value} and {rest[0]}")  # --rank 4 8
            return rest[1:]
        return rest

    def _leave_out(self, option: str, form: str, advice: str, values: Sequence[str]) -> Sequence[str]:
        """Leave out an option with its value, which is for the user to decide on if it is not clear; return the other
        words."""
        if form == Role.LEFT_OUT and values and _names_file(values[0]):
            if advice != NOT_KNOWN:  # otherwise the file has the role of its value
                self.left_out.append((option, advice))
            return values
        words = [*takewhile(lambda word: not _names_file(word), values)] or [*values[:1]]
        words = words[:1] if form == Role.OTHER_FILE else words
        if advice == NOT_KNOWN and words and "strength" in self.command.options:
            advice += _likely_meaning(words[0])
        (self.open if form == Role.NOT_CLEAR else self.left_out).append((" ".join((option, *words)), advice))
        return values[len(words) :]

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
        if not value or not text or (name in ("--to", "--format") and not _is_format(value)):
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
    open: list[tuple[str, str]]
    """Option as it is typed, which the line lacks → the advice on it."""
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
    command, settings = reading.command, _settings(reading)
    if missing := {row.flag for row in command.options.values() if row.required} - {s.words[0] for s in settings}:
        raise NotClear(*missing)
    terms = [_Term.of(word) for word in (expanded(files[first:]) if command.options else files[first:])]
    # Step 1: each strength gets its adapter.
    if command.merges:
        _fit_parts(reading, files[0])
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
    return Correction(words, reading.left_out, reading.open, reading.conflicts, mistake, repeated)


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
    and whether one stands for several adapters."""
    stated = reading.strengths[""]
    if blocks := next((s for s in stated if len(_numbers_in(s.value)) > max(len(terms), FEW)), None):
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


def _fit_parts(reading: TypedLine, base: str) -> None:
    """Make strengths of the denoiser those of the whole adapters if the base has nothing else: a strength of its text
    encoders is left out."""
    from ..files.checkpoint import open_checkpoint
    from ..models.names import names

    of_text = [part for part in reading.strengths if part.startswith("te")]
    if {*reading.strengths} <= {"", BLOCK_WEIGHTS}:
        return
    try:
        labels = [part.label for part in names(open_checkpoint(expand(path_of(base)))).parts]
    except MergeError:  # the merge itself reports it
        return
    if "te" in labels and "te1" in of_text:  # the only one
        reading.strengths.setdefault("te", []).extend(reading.strengths.pop("te1"))
        of_text = ["te2"] if "te2" in of_text else []
    elif any(label.startswith("te") for label in labels):
        return
    elif "unet" in reading.strengths:
        reading.strengths[""] = reading.strengths.pop("unet")
    of_parts = [s for part in of_text for s in reading.strengths.pop(part)]
    number = "second" if "te" in labels else ""
    reading.left_out += [(s.typed, f"the base has no {number} text encoder".replace("  ", " ")) for s in of_parts]


def _take_part_strengths(reading: TypedLine, terms: Sequence[_Term]) -> list[Setting]:
    """Return the strengths of parts as options; those of one adapter, or of one with another strength than 1, become
    factors of the adapter, as other programs have them in place of the whole strength."""
    settings = list[Setting]()
    for part, stated in reading.strengths.items():
        texts = [[s.value.strip("[]()")] if part == BLOCK_WEIGHTS else _numbers_in(s.value) for s in stated]
        values = [value for text in texts for value in text]
        if not part or not values:
            continue
        if reading.weighted or not terms:
            reading.open += [(s.typed, STRENGTH_FORMS) for s in stated]
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
    if not alphas or not all(_states_alpha(term.path) for term in terms):
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
        if words and (what != OTHER_SYNTAX or len(words) > 1):  # one word alone has an error with all of its readings
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
    *before, last = reading.files or [""]
    has_one = any(setting.words[0] in ("-o", "--output") for setting in reading.settings)
    enough = len(before) + len(reading.file(Role.BASE)) >= reading.required and all(map(_names_file, before))
    may_be_one = last.endswith(ENDINGS) or reading.program
    if reading.foreign and not has_one and enough and may_be_one and not _names_file(last):
        reading.files = before
        reading.settings.append(Setting(last, ("-o", last)))


def _files(reading: TypedLine) -> tuple[list[str], int]:
    """Return the files in the order of our commands, and how many of the first are no adapters."""
    command, base, tuned = reading.command, reading.file(Role.BASE), reading.file(Role.TUNED)
    first = 2 if command.inputs == "checkpoints" else int(command.merges)
    stated = {_Term.of(word).path: word for word in reading.adapters}  # named with an option, and maybe without one too
    files = [*dict.fromkeys(stated.get(word, word) for word in reading.files if word not in base)]
    if first == 2:
        files = [*base, *tuned, *files] if base else [*files, *tuned]
    elif first and not base:
        others = [word for word in files if word not in reading.adapters]
        models = [word for word in others if _names_file(word) and not is_adapter(_Term.of(word).path)]
        base = models if len(models) == 1 and reading.foreign else others[:1]
        files = [*base, *(word for word in files if word not in base), *tuned]
    else:
        files = [*base, *files, *tuned]
    most = len(files) if command.several or command.merges else max(first, 1)
    models = [word for word in filter(_names_file, files[1:]) if not is_adapter(_Term.of(word).path)]
    swapped = reading.foreign and first == 1 and models
    if not reading.required <= len(files) <= most or (tuned and command.options and first < 2) or swapped:
        raise NotClear(" ".join(files))
    if command.merges and files[0] in files[1:]:  # a base is not its own adapter
        raise NotClear(files[0])
    return files, first


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
            kind, advice = (reading.open, "use --dtype fp16, bf16 or fp32") if name == "--dtype" else in_fp32
            kind.append((setting.typed, advice))
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
            reading.conflicts.append(f"{before.typed} and {setting.typed} contradict each other")
        by_place[place] = setting
    of_ours = [setting for setting in by_place.values() if setting.words[0].startswith("-")]
    return sorted(of_ours, key=lambda s: s.words[0] not in ("-o", "--output"))


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


def _by_option(args: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each option with the words after it, the words before the first one with ""."""
    option, values = "", list[str]()
    for word in (part for arg in args for part in (arg.split("=", 1) if arg.startswith("--") else [arg])):
        if word.startswith("-") and len(word) > 1 and not right_form(word):
            yield option, values
            option, values = word, []
        else:
            values.append(word)
    yield option, values


def _likely_meaning(value: str) -> str:
    """Return how the value of an unknown option is written here, if it may be a strength or an output."""
    if "." in value and (number := right_form(value)) and abs(float(number)) <= HIGHEST_STRENGTH:
        return f"; a strength is written ADAPTER:{number}"
    return f"; an output is written -o {value}" if value.endswith(ENDINGS) else ""


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
        if reading.left_out and not reading.foreign:  # a word that is neither a file nor a number
            return None
        only_adapters = len(reading.adapters) == len(reading.files) > 1 and not reading.file(Role.BASE)
        if command == MERGE and only_adapters:  # they become one adapter
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
    for at, (flag, part, value) in enumerate(zip(args, args[1:], args[2:], strict=False)):
        if flag == "--strength-for" and "=" not in part and right_form(value) and not exists(value):
            whole = [*args[: at + 1], f"{part}={right_form(value)}", *args[at + 3 :]]
            right = line(whole if command == MERGE else [command, *whole])
            raise UsageError("a part and its factor are one word", f"`{flag} {part} {value}`", f"write {right}")
    before = args[: args.index("--")] if "--" in args else args
    pairs = zip(before, [*before[1:], ""], strict=False)
    values = {arg.partition("=")[0]: arg.partition("=")[2] or following for arg, following in pairs}
    names = [name for name in values if name.startswith("-") and not right_form(name)]
    foreign = [name for name in names if _is_foreign(name, known, command)]
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
    plain = [*dropwhile(lambda word: word in LAUNCHERS, args)]
    named = [*takewhile(lambda word: word.endswith(".py") or not (word.startswith("-") or _names_file(word)), plain)]
    command = next(filter(None, map(_command_of, named)), "")
    options, known = [arg.partition("=")[0] for arg in args if arg.startswith("-")], flags(commands[MERGE].params)
    if named and (command or any(_is_foreign(name, known, MERGE) for name in options)):
        correction = corrected_line(command or MERGE, plain[len(named) :], commands, program=True)
        if correction is not None:
            raise UsageError("there is neither such a command nor such a file", " ".join(named), _fix(correction, ()))


def _command_of(word: str) -> str:
    """Return the command of ours that does what a program with this name does, by the verb in the name; "" for
    others."""
    name = re.sub(r".*[\\/]|\.py$", "", word).replace("-", "_")
    verbs = (FOREIGN_COMMANDS.get(verb, verb) for verb in (name, *re.split("[_.]", name)))
    return next((verb for verb in verbs if verb in COMMANDS), "")


def _is_foreign(name: str, known: Collection[str], command: str) -> bool:
    """Return whether an option belongs to other programs, or to other commands of ours if it is a strength."""
    plain = hyphened(name)
    if plain in (*known, "--help") or (command not in COMMANDS and f"{plain}s" in known):
        return False
    if plain in OWN_STRENGTHS:
        return command in COMMANDS
    ours = plain[2:].replace("-", "_") in OPTIONS
    unknown = name.startswith("--") and not ours and not alike(plain, [*known, "--help"])
    return unknown or meaning_of(name, [*known, plain] if ours else known) is not None


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
    names = [option.split()[0] for option, _ in correction.left_out]
    if not correction.open and len(by_reason) == 1 and names == [*foreign]:
        return f"leave {'it' if len(foreign) == 1 else 'them'} out: {correction.left_out[0][1]}; {right}"
    left_out = ", ".join(f"{', '.join(options)} ({reason})" for reason, options in by_reason.items())
    not_clear = [f"for {option}, {advice.partition(';')[0].replace('`', '')}" for option, advice in correction.open]
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

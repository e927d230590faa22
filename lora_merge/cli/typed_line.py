"""A command line by roles: files, strengths, options of ours.

An option has its role by the words of its name, and its value must agree: a file, a number. An option that no words
explain has the role of its value. What has no counterpart here is left out by name.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from ..adapter_arguments import OF_STEPS, of_steps, of_tags, right_form
from ..addresses import split
from ..command import MERGE
from ..errors import MergeError, UsageError
from ..option_texts import value_of
from ..options import BLOCK_WEIGHTS, SWITCHED, Option, checked_value
from ..paths import ENDINGS, JOBS_ENDINGS, exists, expand, with_found_ending
from ..recipes.commands import COMMANDS
from .argument_values import check_adapter, check_parts, check_tag, check_two
from .corrected_line import opened, options_of
from .foreign_names import (
    LORA_ALPHA,
    NOT_KNOWN,
    NOT_NEEDED,
    ONLY_PARTS,
    OTHER_VALUES,
    STRENGTH_FORMS,
    UNKNOWN,
    Role,
    advice_on,
    alike,
    hyphened,
    meaning_of,
    part_of,
)  # fmt: skip
from .typed_file import TypedFile, looks_like_path, names_file, numbers_in

HIGHEST_STRENGTH: Final = 2.0
"""The value of `--alpha` up to which it is a strength, as in supermerger; a larger one is the alpha of a training."""
OUR_OPTIONS: Final = frozenset(row.flag for command in COMMANDS.values() for row in command.options.values())
"""The options of all commands that write."""
OF_MODELS: Final = (Role.BASE, Role.TUNED)
OWN_STRENGTHS: Final = ("-s", "--strength")
OWN_WEIGHTS: Final = "--weights"
NO_STRENGTH: Final = "[0-9]+|-[0-9.]+|[0-9.]+(?:,[0-9.]+)+"
"""Numbers after an option without a value that are meant as its value, and not as a strength."""
OF_PART: Final = re.compile(r"--strength-for (\w+)=\{\}")
"""The form of an option for the strength of a part."""
ONE_BY_ONE: Final = "name its files one by one"
STRAY: Final = "a number is not an adapter"
OTHER_SYNTAX: Final = "adapters have another syntax"
VALUED: Final = "an option without a value has one"
BY_POSITION: Final = "an output has an option"
NO_OPTION: Final = "an option is missing before"
MISTAKES: Final = (NO_OPTION, OTHER_SYNTAX, VALUED, STRAY, BY_POSITION)
"""What is wrong with a line that has options of ours only, the first that counts first."""


class Setting(NamedTuple):
    """An option of ours with its value, or a role with a value whose option depends on other ones."""

    typed: str
    """The option and its value as the user has them."""
    words: tuple[str, ...]


class TypedStrength(NamedTuple):
    """Strengths as one word of a line states them, for adapters or for a part of each."""

    typed: str
    """The option and its value."""
    value: str
    after: str = ""
    """The adapter right before it; "" for another word."""


class NotClear(Exception):
    """A line has a word whose role is not certain, so that no line is put in its place."""


RemarkKind: TypeAlias = Literal["left out", "unclear", "conflict", "mistake"]
"""An option that is left out; one for the user to decide on; one thing with two values; a word that no command of ours
has like this."""


class Remark(NamedTuple):
    """What the line that is meant has in another way than the line that is typed."""

    kind: RemarkKind
    typed: str
    """The option with its value, or the word."""
    reason: str = ""
    """Why it is left out; the advice on it; what is wrong."""


class Syntax(NamedTuple):
    """What a command of ours takes."""

    name: str
    options: Mapping[str, Option]
    """Those of a command that writes."""
    known: Mapping[str, Any]
    """Option as it is typed → its parameter."""
    required: int
    """The files that it needs."""
    models: int
    """The files before the adapters: a base, or two checkpoints."""
    several: bool
    """Whether it takes several files after them."""

    @classmethod
    def of(cls, name: str, commands: Mapping[str, Any]) -> Syntax:
        """Return the syntax of a command. `commands`: by name."""
        row, known = COMMANDS.get(name), options_of(commands[name])
        arguments = [p for p in commands[name].params if p.param_type_name == "argument" and p.required]
        required = len(arguments) + (name == MERGE)
        if row is None:
            return cls(name, {}, known, required, 0, several=True)
        models = 2 if row.inputs == "checkpoints" else int(row.merges)
        return cls(name, row.options, known, required, models, several=row.several or row.merges)

    def is_foreign(self, option: str) -> bool:
        """Return whether an option belongs to other programs, or to other commands of ours if it is a strength."""
        name, writes = hyphened(option), bool(self.options)
        if name in (*self.known, "-h", "--help") or (not writes and f"{name}s" in self.known):
            return False
        if name in OWN_STRENGTHS:
            return writes
        if name in OUR_OPTIONS and not writes:  # a field of the jobs file of `batch`
            return self.name != "batch"
        ours = name[2:].replace("-", "_") in COMMANDS[MERGE].options
        is_option = re.match("--|-[A-Za-z]$", option) is not None
        if is_option and not ours and not alike(name, [*self.known, "--help"]):
            return True
        return meaning_of(option, [*self.known, name] if ours else self.known) is not None

    @property
    def merges(self) -> bool:
        """Whether it merges adapters into a base."""
        return self.models == 1

    @property
    def weighted(self) -> bool:
        """Whether it has weights in place of strengths."""
        return "weights" in self.options


@dataclass
class TypedLine:
    """A command line by roles: files, options, strengths, and what is to be said about its other words."""

    syntax: Syntax
    foreign: bool
    """Whether it is a line of another program, by its name or by an option that the command lacks."""
    files: list[TypedFile] = field(default_factory=list)
    settings: list[Setting] = field(default_factory=list)
    strengths: dict[str, list[TypedStrength]] = field(default_factory=lambda: defaultdict(list))
    """Part of a model → its strengths; "" for those of the whole adapters."""
    remarks: list[Remark] = field(default_factory=list)
    last_file: str = ""
    """The word before the next one, if it names a file."""

    def take(self, args: Sequence[str]) -> None:
        """Take the words of a line; NotClear for an option of ours without its value."""
        for option, values in by_option(args):
            form, advice = self._form(option) if option else ("", "")
            if option and values:
                form, advice = self._agreed(option, form, advice, values[0])
            rest: Sequence[str] = ()
            if form in ("", *Role.SEVERAL):
                self._take_words(option, form, advice, values)
            elif form in OF_MODELS and values:
                self.files.append(TypedFile.of(values[0], option, form))
                rest = values[1:]
            elif part := OF_PART.fullmatch(form):
                rest = self._take_part(option, part[1], advice, values)
            elif form.startswith(("-", Role.UNLESS)) and "{}" not in form:
                rest = self._take_switch(option, form, advice, values)
            elif form in (Role.LEFT_OUT, Role.OTHER_FILE, Role.NOT_CLEAR):
                rest = self._leave_out(option, form, advice, values)
            else:
                rest = self._take_value(option, form, advice, values)
            self._take_words("", "", "", rest)

    def _form(self, option: str) -> tuple[str, str]:
        """Return the form of an option, and the advice on it."""
        name, meaning = hyphened(option), None
        if name not in self.syntax.known and (meaning := meaning_of(option, self.syntax.known)) is None:
            name = next(iter(alike(name, self.syntax.known)), name)
        if name in OWN_STRENGTHS or (name == OWN_WEIGHTS and name in self.syntax.known):
            return Role.STRENGTH, STRENGTH_FORMS
        if name in self.syntax.known:
            return (name if self.syntax.known[name].is_flag else f"{name} {{}}"), ""
        self.foreign = True
        if self.syntax.name == "batch" and name in OUR_OPTIONS:
            return Role.LEFT_OUT, "a field of the jobs file"
        meaning = meaning or UNKNOWN
        forms = ((form, form.removeprefix(Role.UNLESS).split()[0]) for form in meaning.forms)
        form = next((f for f, flag in forms if not flag.startswith("-") or flag in self.syntax.known), Role.NOT_CLEAR)
        advice = advice_on(meaning, self.syntax.known) or (f"use `{form.split()[0]}`" if form.startswith("-") else "")
        advice = meaning.advice if Role.LEFT_OUT in meaning.forms else advice
        if form == Role.NOT_CLEAR and not (advice and self.syntax.options):  # a jobs file has it
            return Role.LEFT_OUT, NOT_KNOWN
        return form, advice.removeprefix("leave it out: ")

    def _agreed(self, option: str, form: str, advice: str, value: str) -> tuple[str, str]:
        """Return the form of an option with this value, "" for a file as it is without an option, and the advice on
        it; NOT_CLEAR if the value has not the role that the words of the option state."""
        number, letter = right_form(value), re.fullmatch("-[a-z]", option) is not None
        of_strength = bool(number) and abs(float(number)) <= HIGHEST_STRENGTH
        free = letter and option not in self.syntax.known
        if free and of_strength and "." in number and "strength" in self.syntax.options:  # -m 0.8
            return Role.STRENGTHS, STRENGTH_FORMS
        may_be_format = form in (Role.MODEL, "-o {}", "--to {}", Role.NOT_CLEAR) and not exists(value)
        if may_be_format and _is_format(OTHER_VALUES["--to"].get(value.lower(), value)):  # --src peft --dst kohya
            of_output = "to" in self.syntax.options and form != Role.MODEL
            reason = "the format is recognised" if form == Role.MODEL else "a merged model has the names of its base"
            return ("--to {}", advice) if of_output else (Role.LEFT_OUT, reason)
        if letter and form.startswith(("--", Role.NOT_CLEAR)) and names_file(value):  # cp -r FILE
            return Role.LEFT_OUT, NOT_NEEDED
        if number and form in (Role.OTHER_FILE, Role.MODEL) and (part := part_of(option)):  # --te 0.5
            return f"--strength-for {part}={{}}", advice
        if form == Role.ALPHA:
            form = Role.STRENGTHS if of_strength else LORA_ALPHA.forms[0]
        elif form == Role.ONLY:
            form = f"--strength-for {ONLY_PARTS[value]}" if value in ONLY_PARTS else Role.NOT_CLEAR
        else:
            return self._agreed_file(option, form, advice, value)
        return form, advice

    def _agreed_file(self, option: str, form: str, advice: str, value: str) -> tuple[str, str]:
        """Return what `_agreed` returns, if the option may be one for a file."""
        of_batch = not self.syntax.options and value.endswith((*JOBS_ENDINGS, ".json", ".jsonl"))
        if form == Role.JOBS or of_batch:
            return (Role.NOT_CLEAR if self.syntax.options else ""), advice
        is_file = exists(with_found_ending(value))
        plain = not is_file and (bool(numbers_in(value)) or value.lower() in SWITCHED)
        if form == Role.ADAPTERS and is_file and expand(value).is_dir() and opened(value) is None:  # with several files
            return Role.LEFT_OUT, ONE_BY_ONE
        other = re.search(r"\.[a-z]{2,5}$", value) and not value.endswith(ENDINGS)  # x.log
        of_file = form in (*OF_MODELS, Role.MODEL, Role.ADAPTERS) and not is_file
        of_file = of_file and (not self._may_name(option, [value]) or bool(other))
        if hyphened(option) not in self.syntax.known and (of_file or (plain and form in ("-o {}", Role.ADAPTERS))):
            return Role.LEFT_OUT, NOT_KNOWN
        if form in OF_MODELS and self.syntax.name in ("inspect", "compare", "parts", "unmerge"):
            return "", advice
        if form == Role.BASE and self.syntax.required < 2:  # of replay, unmerge
            raise NotClear(option)
        if form == Role.MODEL:
            of_merge = Role.ADAPTERS if TypedFile.of(value).of_adapter else Role.BASE
            by_name = "--base {}" if self.syntax.name == "verify" else ""
            form = of_merge if self.syntax.merges else by_name
        return form, advice

    def _may_name(self, option: str, words: Sequence[str]) -> bool:
        """Return whether these words of an option name files, maybe missing ones."""
        of_files = re.search("-(?:path|file|dir|folder)$", hyphened(option)) is not None
        return all(looks_like_path(word) or (of_files and not numbers_in(word)) for word in words)

    def _take_words(  # one kind of word after the other
        self, option: str, form: str, advice: str, words: Sequence[str]
    ) -> None:
        """Take words after an option that may have several, or after none: files and strengths."""
        if option and not words:
            self.remark("left out", option, NOT_KNOWN)
        for word in words:
            typed = f"{option} {word}".strip()
            if numbers_in(word) and not exists(word):
                if form != Role.STRENGTHS:
                    self.remark("mistake", word, STRAY)
                self.strengths[""].append(TypedStrength(typed, word, self.last_file))
                continue
            is_there, our_words = names_file(word), _in_our_syntax(word)
            with_strength = form == Role.STRENGTHS and bool(numbers_in(" ".join(words[1:2])))  # --lora-scaled one 0.8
            of_program = word.endswith((".yaml", ".yml", ".py")) and self.syntax.options
            strange = our_words == [word] and not is_there and (of_program or not (form or _may_be_file(word)))
            if form == Role.STRENGTHS and not is_there and not with_strength:
                self.remark("unclear", typed, advice)
            elif strange or (form and not with_strength and not self._may_name(option, our_words)):
                self.remark("left out", word if strange else typed, NOT_KNOWN)
            else:
                if word not in our_words:
                    self.remark("mistake", word, OTHER_SYNTAX)
                    self.remarks += [Remark("left out", item, OF_STEPS) for item in of_steps(word)]
                self.files += [TypedFile.of(text, option, Role.ADAPTERS if form else "") for text in our_words]
                self.last_file = our_words[-1]
        if sum(map(names_file, words)) > bool(option):  # strengths of other options are for all of them
            self.last_file = ""

    def _take_part(self, option: str, part: str, advice: str, values: Sequence[str]) -> Sequence[str]:
        """Take the strengths of a part of a model; return the other words."""
        from ..models.blocks import PRESETS

        by_name = values[:1] if values and "=" in values[0] else ()  # --block-weights IN04=0,OUT03=0.2
        for value in re.split(",(?=[^,=]+=)", values[0]) if by_name else ():
            self.settings.append(Setting(f"{option} {value}", ("--strength-for", value)))
        presets = PRESETS if part == BLOCK_WEIGHTS else ()
        numbers = [*takewhile(lambda word: (numbers_in(word) or word in presets) and not exists(word), values)]
        stated = (TypedStrength(f"{option} {value}", value, self.last_file) for value in numbers)
        self.strengths[part_of(option) or part] += stated
        if not numbers and not by_name:
            return self._leave_out(option, Role.NOT_CLEAR, advice, values)
        return values[len(numbers) + len(by_name) :]

    def _take_switch(self, option: str, form: str, advice: str, values: Sequence[str]) -> Sequence[str]:
        """Take an option that has no value here, and "true", "false" or a number after it; return the other words."""
        value, words = values[0].lower() if values else "", tuple(form.removeprefix(Role.UNLESS).split())
        is_part = value in ONLY_PARTS and words[0] == "--strength-for"  # --only unet
        is_value = is_part or value in SWITCHED or re.fullmatch(NO_STRENGTH, value) is not None
        typed = f"{option} {value}" if is_value else option
        if is_value and hyphened(option) in self.syntax.known:
            self.remark("mistake", typed, VALUED)
        if is_value and value.isdecimal() and words == ("--device", "cuda"):  # --gpu 0
            words = ("--device", f"cuda:{value}")
        elif form.startswith(Role.UNLESS):
            if not is_value or SWITCHED.get(value, True):
                self.remark("left out", typed, advice)
                return values[is_value:]
        elif is_value and ("-" in value or "," in value):  # --gpu 0,1
            self.remark("unclear", typed, advice)
            return values[1:]
        elif is_value and not SWITCHED.get(value, True):
            words = (f"--no-{words[0][2:]}",)
        if is_value and words[0] not in self.syntax.known:  # --load_in_8bit false
            return values[1:]
        self.settings.append(Setting(typed, words))
        return values[is_value:]

    def _take_value(self, option: str, form: str, advice: str, values: Sequence[str]) -> Sequence[str]:
        """Take the value of an option; return the other words."""
        if not values:
            if hyphened(option) in self.syntax.known:
                raise NotClear(option)
            self.remark("left out", option, NOT_KNOWN)
            return ()
        value, *rest = values
        typed = f"{option} {value}"
        if form == Role.STRENGTH:
            self.strengths[""].append(TypedStrength(typed, value))
            return rest
        words = (form.split()[0], value)
        if form.startswith("-") and hyphened(option) not in self.syntax.known:
            try:
                words = self.words_for(form, value)
            except NotClear:
                if words[0] == "--to":  # without it nothing is converted
                    raise
                if names_file(value):  # --jobs jobs.yaml
                    return values
                return self._leave_out(option, Role.NOT_CLEAR, advice, values)
        self.settings.append(Setting(typed, words))
        if form == "--adapter {}":  # of verify: several
            self.settings += [Setting(f"{option} {word}", ("--adapter", word)) for word in rest if names_file(word)]
            rest = [word for word in rest if not names_file(word)]
        if form.startswith("-") and rest and right_form(value) and right_form(rest[0]) and not exists(rest[0]):
            self.remark("conflict", f"{option} has two values, {value} and {rest[0]}")  # --rank 4 8
            return rest[1:]
        return rest

    def _leave_out(self, option: str, form: str, advice: str, values: Sequence[str]) -> Sequence[str]:
        """Leave out an option with its value, which is for the user to decide on if it is not clear; return the other
        words."""
        has_value = re.search("[-_](type|name|map|level|size|length|format|id|skip)$", option) and advice != NOT_KNOWN
        has_value = has_value or advice == ONE_BY_ONE
        if form == Role.LEFT_OUT and values and names_file(values[0]) and not has_value:
            if advice != NOT_KNOWN:  # otherwise the file has the role of its value
                self.remark("left out", option, advice)
            return values
        if any(map(of_tags, values[:1])):  # --prompt "… <lora:style:0.8>"
            return values
        words = [*takewhile(lambda word: not names_file(word), values)] or [*values[:1]]
        words = words[:1] if form == Role.OTHER_FILE else words
        if advice == NOT_KNOWN and words and "strength" in self.syntax.options:
            advice += _likely_meaning(words[0])
        self.remark("unclear" if form == Role.NOT_CLEAR else "left out", " ".join((option, *words)), advice)
        return values[len(words) :]

    def take_output(self, *, program: bool) -> None:
        """Take the last file of a line of another program as the output, if it is not there and nothing else is.
        `program`: whether the line begins with the name of one."""
        *before, last = self.placed or [TypedFile("")]
        has_one = any(setting.words[0] in ("-o", "--output") for setting in self.settings)
        one_too_many = not self.syntax.several  # each of the others has its place
        enough = len(before) + bool(self.named(Role.BASE)) >= self.syntax.required
        enough = enough and (one_too_many or all(file.kind for file in before))
        may_be_one = one_too_many or (self.differs and (last.word.endswith(ENDINGS) or program))
        if "-o" in self.syntax.known and not has_one and enough and may_be_one and last.path and not last.kind:
            self.files.remove(last)
            self.settings.append(Setting(last.word, ("-o", last.word)))
            self.remark("mistake", last.word, BY_POSITION)

    def words_for(self, form: str, value: str) -> tuple[str, str]:
        """Return an option of ours with the value of another program; NotClear for a value that it does not take."""
        name, template = form.split()
        value = OTHER_VALUES.get(name, {}).get(value.lower(), value.lower() if name == "--to" else value)
        if template.endswith("={}") and "=" in value:  # --block-weights IN04=0
            template = "{}"
        elif template.endswith("={}"):
            value = right_form(value)
        elif template == "1-{}" and right_form(value):
            template, value = "{}", f"{1 - float(right_form(value)):g}"
        elif template == "ratio:1/{}" and float(right_form(value) or 0):
            template, value = "ratio:{}", f"{1 / float(right_form(value)):g}"
        row, text = self.syntax.options.get(name[2:].replace("-", "_")), template.format(value)
        text = right_value(row, text) if row and value else text
        of_hub = text.startswith("hf://") and "/" not in value  # no OWNER/NAME
        if not value or not text or of_hub or (name in ("--to", "--format") and not _is_format(value)):
            raise NotClear(name)
        return name, text

    def named(self, role: str) -> list[TypedFile]:
        """Return the file of a role, the last if there are several, in a list; [] if the line has none."""
        return [file for file in self.files if file.role == role][-1:]

    @property
    def placed(self) -> list[TypedFile]:
        """The files whose order counts."""
        return [file for file in self.files if file.role not in OF_MODELS]

    @property
    def differs(self) -> bool:
        """Whether it is a line of another program, or has a word that no command of ours has like this."""
        return self.foreign or any(remark.kind == "mistake" for remark in self.remarks)

    def remark(self, kind: RemarkKind, typed: str, reason: str = "") -> None:
        """Add a remark."""
        self.remarks.append(Remark(kind, typed, reason))


def by_option(args: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each option with the words after it, the words before the first one with ""."""
    option, values = "", list[str]()
    for word in (part for arg in args for part in (arg.split("=", 1) if arg.startswith("--") else [arg])):
        if word.startswith("-") and len(word) > 1 and not right_form(word):
            yield option, values
            option, values = word, []
        else:
            values.append(word)
    yield option, values


def right_value(row: Option, text: str) -> str:
    """Return a value that an option takes: the text, or what it was probably meant as; "" if that is not clear."""
    try:
        if row.kind == "rank":
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
    if (names_file(word) and (not parts or "=" in parts)) or split(word) is not None:
        return [word]
    try:
        for check in (check_tag, check_two, check_parts, check_adapter):
            check(word)
    except UsageError as error:
        right = error.suggestion[1:]
        return [text for part in right for text in _in_our_syntax(part)] or [word]
    return [word]


def _may_be_file(word: str) -> bool:
    """Return whether a word without an option is a number or a file, maybe a misspelt one; words of other programs,
    such as INALL, are in capitals."""
    return looks_like_path(word) or bool(numbers_in(word)) or word.islower()


def _is_format(value: str) -> bool:
    """Return whether a value is the name of a format of adapters."""
    from ..adapters_out.dialects import names

    return value.lower() in names()


def _likely_meaning(value: str) -> str:
    """Return how the value of an unknown option is written here, if it may be a strength or an output."""
    if "." in value and (number := right_form(value)) and abs(float(number)) <= HIGHEST_STRENGTH:
        return f"; a strength is written ADAPTER:{number}"
    return f"; an output is written -o {value}" if value.endswith(ENDINGS) else ""

"""Options of other programs, and strengths at the wrong place: each is refused with the user's own line corrected.

A line is read by roles: files, strengths, options of ours. An option has its role by the words of its name, and its
value must agree: a file, a number. An option that no words explain has the role of its value. What has no counterpart
here is left out, and the message says so; never a number, a file or a path: if their role is not certain, there is
advice in place of a line. The options are those of sd-scripts, musubi-tuner, LyCORIS, supermerger, ComfyUI's nodes,
diffusers, PEFT, LLaMA-Factory, Axolotl, Unsloth, FastChat, mergekit, llama.cpp and cp.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from itertools import takewhile
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from ..adapter_arguments import right_form
from ..addresses import split
from ..command import MERGE, Command
from ..errors import MergeError, UsageError
from ..merge_methods import SUM
from ..option_texts import value_of
from ..options import OPTIONS, SWITCHED, Option, checked_value
from ..paths import ENDINGS, exists, expand, split_strength, with_found_ending
from ..recipes.commands import COMMANDS
from ..text import plural
from .argument_values import ADAPTER_ORDER, check_adapter, check_parts, check_tag, check_two, expanded, strengths
from .compat import FOREIGN_COMMANDS, check_dashes
from .corrected_line import flags, is_adapter, line

BASE, MODEL, TUNED, ADAPTERS = "BASE", "MODEL", "TUNED", "ADAPTERS"
"""Roles of files. MODEL is the base, the tuned model if the line has another base, or an adapter if the file is one."""

STRENGTHS, STRENGTH = "STRENGTHS", "STRENGTH"
"""Roles of numbers: all that follow the option, as in other programs; or one, as here."""

PRECISION, ALPHA, ONLY, RULE, SHARE = "PRECISION", "ALPHA", "ONLY", "RULE", "SHARE"
"""Roles of values that become an option of ours by their value, or by what else is on the line."""

LEFT_OUT: Final = "LEFT_OUT"
"""The role of a value, if there is one, with nothing to do here."""

OTHER_FILE, JOBS = "OTHER_FILE", "JOBS"
"""Roles of files: one of the pipeline that is left out, whatever the value is; a jobs file."""

SWITCH: Final = "SWITCH"
"""The role of "true" or "false" after an option that has no value here."""

SEVERAL: Final = (ADAPTERS, STRENGTHS)
"""Roles with several words after the option."""


class Foreign(NamedTuple):
    """What an option of another program is here."""

    advice: str
    forms: tuple[str, ...]
    """Words of ours with {} for the value, or a role: the first form is meant whose option the command has."""


def _use(form: str) -> Foreign:
    return Foreign(f"use `{form}`", (form,))


def _leave(reason: str) -> Foreign:
    return Foreign(f"leave it out: {reason}", (LEFT_OUT,))


STRENGTH_FORMS: Final = "write the strength after the file name: ADAPTER:0.8; or give `-s 0.8` for each adapter"
THE_BASE: Final = "the base is the first word"
SAME_RANK: Final = "the rank is that of the adapter; another one: `lora-merge resize ADAPTER --rank 16`"
LORA_ALPHA: Final = Foreign("use `--setting lora_alpha=16`, the alpha of the training",
                        ("--setting lora_alpha={}", "--alpha {}"))  # fmt: skip
_BEFORE: Final = "the model before the training comes first: `lora-merge extract BASE TUNED`"
_AFTER: Final = "the model after the training comes second: `lora-merge extract BASE TUNED`"
_PART: Final = "use --strength-for, such as `--strength-for te=0`; `lora-merge parts BASE` lists the parts"
_LBW: Final = "use `--strength-for lbw=1,0,0,…` with a number for each block; `lora-merge parts BASE` lists them"
_DTYPE: Final = "use `--dtype fp16`, bf16 or fp32"
_RANK: Final = "use `--rank N`, or a rule such as `--rank energy:0.9`"

_FACTOR: Final = "strengths?|ratios?|weights?|scales?|scaling|multipliers?|mul|factors?|coefs?|coefficients?|scaled"
_ADAPTER: Final = "loras?|adapters?|peft|network|locon|lycoris"
_OUTPUT: Final = "save|out|output|export|dump|dest|dst|destination|outfile|outdir|merged|result"

MEANINGS: Final[tuple[tuple[str, Foreign], ...]] = (
    # Nothing to do.
    ("-t threads num-threads n-threads num-workers", _leave("all cores are used")),
    ("low-?v?ram low-memory low-cpu-memory low-cpu-mem-usage cpu-offload", _leave("memory is limited in any case")),
    ("(?:max-|out-)?shard-size export-size", _leave("shards are those of the base")),
    ("device-map export-device", _leave("--device names the device")),
    ("cfg cfg-scale guidance-scale steps sampler scheduler prompt negative-prompt width height",
     _leave("a merge makes no picture")),
    ("no-overwrite", _leave("nothing is overwritten without --overwrite")),
    ("v2 is-v2 v-parameterization sdxl is-sdxl flux model-type model-arch arch architecture",
     _leave("the model is recognised")),
    ("from input-format source-format", _leave("the format is recognised")),
    ("push-to-hub hub-model-id export-hub-model-id", _leave("send the output by hf upload OWNER/NAME FOLDER")),
    ("concat shuffle trust-remote-code copy-tokenizer lazy-unpickle allow-crimes safe-serialization merge-and-unload "
     "use-safetensors save-model-as template finetuning-type task-type clip-skip max-seq-length clamp-quantile suffix "
     "safe-merge safe-fusing fuse-unet fuse-text-encoder load-precision adapter-name group-size log-level",
     _leave("not needed here")),
    # Switches, formats, methods, numbers of the output.
    ("fp16 float16 half", _use("--dtype fp16")), ("bf16 bfloat16", _use("--dtype bf16")),
    ("fp32 float32", _use("--dtype fp32")), ("fp8", _use("--dtype fp8_scaled")),
    ("load-in-4bit", _use("--dtype nf4")), ("load-in-8bit", _use("--dtype int8")),
    ("no-te no-text-encoder unet-only", _use("--strength-for te=0")),
    ("force yes exist-ok -f -y", _use("--overwrite")), ("plan simulate -n", _use("--dry-run")),
    ("silent no-progress", _use("-q")), ("skip-verify no-check no-verification", _use("--no-verify")),
    ("cuda gpu use-gpu", _use("--device cuda")), ("cpu", _use("--device cpu")),
    ("parallel jobs -j", Foreign("use `--workers N`", ("--workers {}",))),
    ("config", Foreign("several merges go into a jobs file: `lora-merge batch JOBS.yaml`", (JOBS,))),
    ("bits (?:quant|quantize|quantization|export-quantization|qtype|save-method)(?:-type|-format|-bits?)?",
     Foreign("use --dtype with a quantised format, such as `--dtype nf4`", ("--dtype {}",))),
    ("(?:compute|calc|merge)-precision (?:calc|merge|working)-dtype",
     Foreign("use `--compute-dtype fp32` or fp64", ("--compute-dtype {}",))),
    ("type outtype (?:save|out|output|torch|export|weight)-(?:precision|dtype|type)", Foreign(_DTYPE, ("--dtype {}",))),
    ("precision", Foreign(_DTYPE, (PRECISION,))),
    ("dynamic-method", Foreign("use a rule such as `--rank fro:0.9`", (RULE,))),
    ("dynamic-param", Foreign("use --rank with the share in its rule, such as `--rank fro:0.9`", (SHARE,))),
    ("combination-type merge-method merge-type", Foreign("use --method, such as `--method ties`", ("--method {}",))),
    ("format to target output-format target-format", Foreign("use `--to diffusers`", ("--to {}", "--format {}"))),
    ("majority-sign-method", Foreign("use `--elect sum` or count", ("--elect {}",))),
    ("metadata-title", Foreign("use `--title TEXT`", ("--title {}",))),
    # Strengths.
    ("lbws? block-weights lora-block-weight", Foreign(_LBW, ("--strength-for lbw={}",))),
    ("exclude ignore", Foreign(_PART, ("--strength-for {}=0",))), ("only", Foreign(_PART, (ONLY,))),
    ("conv-alpha", Foreign(LORA_ALPHA.advice, ())), ("(?:lora|network|adapter)-alpha", LORA_ALPHA),
    (f"te|text-encoder|clip+{_FACTOR}", Foreign(_PART, ("--strength-for te={}",))),
    (f"ratios? weights? multipliers? strengths -w {_ADAPTER}+{_FACTOR}", Foreign(STRENGTH_FORMS, (STRENGTHS,))),
    (f"unet|model+{_FACTOR}", Foreign(_PART, ("--strength-for unet={}",))),
    ("alpha alpha+", Foreign(STRENGTH_FORMS, (ALPHA,))),
    ("vae|ae|clip|t|t5xxl|te|text-encoder|llm+", Foreign("leave it out: a merge is into one file", (OTHER_FILE,))),
    # Ranks.
    ("conv-dim conv+dim|rank", Foreign("use `--conv-rank N`", ("--conv-rank {}",))),
    ("rank dim -r rank|dim|r+", Foreign(_RANK, ("--rank {}",))),
    # Files.
    (f"name filename-prefix {_OUTPUT}+ target+path|file|folder|dir", Foreign("use `-o FILE`", ("-o {}",))),
    (f"loras? adapters? models {_ADAPTER}+", Foreign(ADAPTER_ORDER, ("--adapter {}", ADAPTERS))),
    ("tuned|finetuned|fine-tuned|trained+", Foreign(_AFTER, (TUNED,))),
    ("org|orig|original+", Foreign(_BEFORE, (BASE,))),
    ("base base|pretrained|sd-model+", Foreign(THE_BASE, ("--base {}", BASE))),
    ("model -m model|ckpt|checkpoint|unet|dit|transformer|source|src|input|file|path+", Foreign(THE_BASE, (MODEL,))),
)  # fmt: skip
"""Names of options → their meaning; the first that fits. A pattern is a whole name, or words that it has, with a "+"
after each: `conv+dim|rank` is for "conv-rank" and "new-rank-conv"."""

OTHER_VALUES: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType({
    "--dtype": {"fp8": "fp8_scaled", **dict.fromkeys(("4", "4bit", "int4", "q4", "merged_4bit"), "nf4"),
                **dict.fromkeys(("8", "8bit", "q8"), "int8"), "merged_16bit": "keep"},
    "--method": {**dict.fromkeys(("linear", "cat", "svd", "task_arithmetic"), "sum"), "dare_linear": "dare",
                 "magnitude_prune": "prune", "ties_svd": "ties", "dare_ties_svd": "dare_ties"},
    "--elect": {"total": "sum", "frequency": "count"},
})  # fmt: skip
"""Option → value of another program → the value here. PEFT (add_weighted_adapter), mergekit, Unsloth, LLaMA-Factory."""

ONLY_PARTS: Final = {"unet": "te=0", "model": "te=0", "te": "unet=0", "clip": "unet=0", "text_encoder": "unet=0"}
"""Part after `--only` → what `--strength-for` takes, where the other parts are known without the base."""

FOREIGN_RULES: Final = {"sv_ratio": "ratio", "sv_fro": "fro", "sv_cumulative": "sum"}
"""Rule for ranks of sd-scripts' networks/resize_lora.py → the rule here."""

HIGHEST_STRENGTH: Final = 2.0
"""The value of `--alpha` up to which it is a strength, as in supermerger; a larger one is the alpha of a training."""

SIMILAR: Final = 0.9
"""The likeness of two options from which one is a misspelt form of the other."""

OWN_STRENGTHS: Final = ("-s", "--strength")
OWN_WEIGHTS: Final = "--weights"
NOT_KNOWN: Final = "not known here"
"""The reason to leave out an option without a role."""

LINEAR: Final = (SUM, "compose")
"""The methods without a factor for the combined change."""


@cache
def _vocabulary() -> list[str]:
    """Return the longer words of the names, among which a misspelt one is looked for."""
    return sorted({word for pattern, _ in MEANINGS for word in re.findall("[a-z]{5,}", pattern)})


def _spellings(name: str) -> tuple[str, str, str]:
    """Return the name of an option as patterns have it: itself; without numbers, as of --lora2 and --lora-b; and with
    the words that misspelt ones were meant as."""
    plain = _hyphened(name).removeprefix("--")
    alone = re.sub("(?<=[a-z])(?:-?[0-9]+(?![a-z0-9])|-[a-d]$)", "", plain)
    words = ("".join(_most_like(word, _vocabulary(), SIMILAR)) or word for word in alone.split("-"))
    return plain, alone, "-".join(words)


def meaning_of(name: str, known: Collection[str] = ()) -> Foreign | None:
    """Return the meaning of an option of another program; None for another. `known`: the options of the command, of
    which a misspelt one has none."""
    plain, alone, right = _spellings(name)
    for pattern, meaning in MEANINGS:
        if any(re.fullmatch(whole, word) for whole in pattern.split() if "+" not in whole for word in (plain, alone)):
            return meaning
    if _hyphened(name) in known or alike(_hyphened(name), known, SIMILAR):
        return None
    fitting = (meaning for pattern, meaning in MEANINGS if any(_fits(words, right) for words in pattern.split()))
    return next(fitting, None)


def _fits(pattern: str, name: str) -> bool:
    """Return whether a name is that of a pattern, or has its words."""
    if "+" not in pattern:
        return re.fullmatch(pattern, name) is not None
    return all(re.search(rf"(?<![^-])(?:{word})(?![^-])", name) for word in pattern.split("+") if word)


def advice_on(meaning: Foreign, known: Collection[str]) -> str:
    """Return the advice on an option of another program to a command with these options; "" without one that fits."""
    of_rank = {"--rank {}", "--conv-rank {}", RULE, SHARE} & {*meaning.forms}
    advice = SAME_RANK if of_rank and "--rank" not in known and "-s" in known else meaning.advice
    named = re.findall(r"(?<![\w-])--?[a-z][a-z-]*", advice.partition("`lora-merge ")[0])
    return advice if {*named} <= {*known} else ""


def _hyphened(word: str) -> str:
    """Return the name of an option with hyphens, as options here have them."""
    name = word.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name


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
    """Whether an option is none of the command."""
    settings: list[Setting] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)
    """Files without an option."""
    adapters: list[str] = field(default_factory=list)
    numbers: list[str] = field(default_factory=list)
    """Strengths as they are typed."""
    strays: list[str] = field(default_factory=list)
    """The strengths without an option."""
    followed: list[str] = field(default_factory=list)
    """The files with a strength after them."""
    of_rank: dict[str, str] = field(default_factory=dict)
    """RULE and SHARE → value."""
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """Option as it is typed → reason."""
    conflicts: list[str] = field(default_factory=list)
    """What has two values."""

    def take(self, args: Sequence[str]) -> TypedLine:
        """Return itself with the words of a line; NotClear for a word without a role."""
        option, form, value, fresh = "", "", "", False
        for word in (part for arg in args for part in (arg.split("=", 1) if arg.startswith("--") else [arg])):
            before, value = value, ""
            if word.startswith("-") and len(word) > 1 and not right_form(word):
                self._expect_value(option, form, fresh=fresh)
                option, form, fresh = word, self._form(word), True
                continue
            if form == OTHER_FILE or (form == LEFT_OUT and not _names_file(word)):
                self._leave_out(word)
                form = ""
            elif form == SWITCH and word.lower() in SWITCHED:
                self.settings = self.settings if SWITCHED[word.lower()] else self.settings[:-1]
                form = ""
            elif right_form(before) and right_form(word) and not exists(word):  # --rank 4 8
                self.conflicts.append(f"{option} has two values, {before} and {word}")
            elif form in ("", LEFT_OUT, SWITCH) or (form in SEVERAL and not fresh):
                self._take_word(word, form)
                form = "" if form in (LEFT_OUT, SWITCH) else form
            else:
                value = "" if form in (STRENGTH, ALPHA, *SEVERAL) else word
                form = self._take_value(option, form, word)
            fresh = False
        self._expect_value(option, form, fresh=fresh)
        return self

    def _expect_value(self, option: str, form: str, *, fresh: bool) -> None:
        if fresh and form not in ("", LEFT_OUT, SWITCH):
            raise NotClear(option)

    def _leave_out(self, value: str) -> None:
        """Leave out a value with its option; NotClear for one of an unknown option that may be of use."""
        typed, reason = self.left_out.pop()
        if reason == NOT_KNOWN and (_numbers_in(value) or _looks_like_path(value)):
            raise NotClear(value)
        self.left_out.append((f"{typed} {value}", reason))

    def _form(self, option: str) -> str:
        """Return the form of an option with a value after it; SWITCH for one without, which is taken at once."""
        name = _hyphened(option)
        meaning = meaning_of(option, self.known)
        name = name if meaning else next(iter(alike(name, self.known, SIMILAR)), name)
        if name in OWN_STRENGTHS or (name == OWN_WEIGHTS and name in self.known):
            return STRENGTH
        if name in self.known:
            forms: tuple[str, ...] = (name if self.known[name].is_flag else f"{name} {{}}",)
        else:
            meaning = meaning or _leave(NOT_KNOWN)
            forms = meaning.forms
            self.foreign = True
            if {LEFT_OUT, OTHER_FILE} & {*forms}:
                self.left_out.append((option, meaning.advice.removeprefix("leave it out: ")))
        form = next((form for form in forms if not form.startswith("-") or form.split()[0] in self.known), None)
        if form is None:
            raise NotClear(option)
        if "{}" in form or not form.startswith("-"):
            return form
        self.settings.append(Setting(option, tuple(form.split())))
        return SWITCH

    def _take_word(self, word: str, form: str) -> None:
        """Take a word after an option that may have several, or after none."""
        if _numbers_in(word) and not exists(word):
            files = [*self.plain[-1:], *self.adapters[-1:]] if form != STRENGTHS else []
            self.numbers.append(word)
            self.strays += [word] * (form != STRENGTHS)
            self.followed += files[-1:]
        elif (form == STRENGTHS and not _names_file(word)) or word.endswith((".yaml", ".yml")):
            raise NotClear(word)
        else:
            words = _in_our_syntax(word)
            if form and not all(map(_looks_like_path, words)):
                raise NotClear(word)
            by_value = form and all(is_adapter(_Term.of(word).path) for word in words)
            (self.adapters if by_value else self.plain).extend(words)

    def _take_value(self, option: str, form: str, value: str) -> str:
        """Take the value of an option; return the role of the next word."""
        typed, form = f"{option} {value}", self._agreed(form, value)
        if form in SEVERAL:
            self._take_word(value, form)
            return form
        if form == STRENGTH:
            self.numbers.append(value)
        elif form == "":
            self.plain.append(value)
        elif form == LEFT_OUT:
            self.left_out.append((typed, "the format is recognised"))
        elif form in (RULE, SHARE):
            self.of_rank[form] = value
        elif form.startswith("-") and _hyphened(option) not in self.known:
            self.settings.append(Setting(typed, self.words_for(form, value)))
        else:
            self.settings.append(Setting(typed, (form.split()[0], value)))
        return ""

    def _agreed(self, form: str, value: str) -> str:
        """Return the form of an option with this value, "" for a file as it is without an option; NotClear for a value
        that is none of the role that the words of the option have."""
        number, known = right_form(value), exists(with_found_ending(value))
        plain = not known and (bool(_numbers_in(value)) or value.lower() in SWITCHED)
        of_file = form in (BASE, MODEL, TUNED) and not _looks_like_path(value)
        if "to" in self.command.options and form in (MODEL, "-o {}") and _is_format(value):  # --src peft --dst kohya
            return LEFT_OUT if form == MODEL else "--to {}"
        if form == ALPHA:
            return STRENGTHS if number and abs(float(number)) <= HIGHEST_STRENGTH else LORA_ALPHA.forms[0]
        if form == ONLY and value in ONLY_PARTS:
            return f"--strength-for {ONLY_PARTS[value]}"
        if (
            of_file
            or form == ONLY
            or (plain and form in ("-o {}", ADAPTERS))
            or (form == JOBS and self.command.options)
        ):
            raise NotClear(value)
        if form == MODEL and self.command.merges:
            return ADAPTERS if known and is_adapter(value) else BASE
        return "" if form in (MODEL, JOBS) else form

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
    # Step 1: each strength gets its adapter: in order, or those without a strength in order.
    weighted, has_options = "weights" in reading.command.options, bool(reading.command.options)
    terms = [_Term.of(word) for word in (expanded(files[first:]) if has_options else files[first:])]
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
    scale = right_form(by_name["--scale"].words[1]) if "--scale" in by_name else ""
    if not scale or float(scale) == 1 or method not in LINEAR:
        return ""
    settings.remove(by_name["--scale"])
    for term in terms:
        term.strength = f"{float(term.strength or 1) * float(scale):g}"
    return f"{method} has no scale"


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
    if reading.conflicts:
        return reading.conflicts[0]
    if reading.strays:
        return f"a number is not an adapter: {' '.join(reading.strays)}"
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
    """Return the files in the order of our commands, and the number of those that are no adapters."""
    named = {path for word in reading.adapters for path in (word, _Term.of(word).path)}
    command, base, tuned = reading.command, reading.file(BASE), reading.file(TUNED)
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
    settings, rule = [s for s in reading.settings if s.words[0] not in (PRECISION, BASE, TUNED)], ""
    # Step 1: a precision is that of the computation if the line has another one for the output.
    for setting in (s for s in reading.settings if s.words[0] == PRECISION):
        name = "--compute-dtype" if any(s.words[0] == "--dtype" for s in settings) else "--dtype"
        try:
            settings.append(Setting(setting.typed, reading.words_for(f"{name} {{}}", setting.words[1])))
        except NotClear:
            if name == "--dtype":
                raise
            left_out.append((setting.typed, "sums are computed in fp32 or fp64"))
    # Step 2: a share with its rule is the rank, and a rank next to it is a limit.
    if reading.of_rank:
        rule = f"{FOREIGN_RULES.get(reading.of_rank.get(RULE, ''))}:{reading.of_rank.get(SHARE)}"
        if "rank" not in reading.command.options or not right_value(reading.command.options["rank"], rule):
            raise NotClear(rule)
        settings = [Setting(s.typed, ("--max-rank", s.words[1])) if s.words[0] == "--rank" else s for s in settings]
        settings = [Setting("--dynamic-param", ("--rank", rule)), *settings]
    # Step 3: two spellings of one option have one value.
    by_place = dict[Any, Setting]()
    for setting in (*(s for s in reading.settings if s.words[0] in (BASE, TUNED)), *settings):
        name, *value = setting.words
        parameter = reading.known.get(name)
        several = parameter is not None and parameter.multiple
        place = (parameter.name if parameter else name, several and (value[0].rpartition("=")[0] or value[0]))
        before = by_place.get(place, setting)
        foreign = [s for s in (before, setting) if _hyphened(s.typed.split()[0]) not in reading.known]
        if before.words[1:] != setting.words[1:] and foreign:
            conflicts.append(f"{before.typed} and {setting.typed} contradict each other")
        by_place[place] = setting
    kept = [s for s in by_place.values() if s.words[0] not in (BASE, TUNED)]
    return sorted(kept, key=lambda s: s.words[0] not in ("-o", "--output"))


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
    return exists(word) or exists(with_found_ending(split_strength(word.partition(",")[0])[0]))


def _is_format(value: str) -> bool:
    """Return whether a value is the name of a format of adapters."""
    from ..adapters_out.dialects import names

    return value in names()


def _looks_like_path(word: str) -> bool:
    """Return whether a word names a file, or is written as a path or an address is."""
    return _names_file(word) or re.search(r"[/\\]|\.[A-Za-z]{2}", word) is not None


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
        of_adapters = len(reading.adapters) > 1 and not (reading.plain or reading.file(BASE))
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
    correction = corrected_line(command, args, commands)
    if foreign:
        what = f"there is no option {' nor '.join(foreign)} here"
    elif correction and command in COMMANDS and {*map(_hyphened, names)} <= known.keys():
        what = correction.mistake
    else:
        return
    if correction and correction.conflicts:
        what = "; ".join(correction.conflicts)
    fix = _fix(correction, foreign) if correction else _advices(foreign, command, parameters)
    if what:
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
    plain = _hyphened(name)
    if plain in known or (command not in COMMANDS and f"{plain}s" in known):
        return False
    ours = plain[2:].replace("-", "_") in OPTIONS or plain in OWN_STRENGTHS
    meaning = meaning_of(name, [*known, plain] if ours else known)
    of_file = _names_file(value) and not ours and not alike(plain, known)
    return meaning is not None or of_file or (command in COMMANDS and plain in OWN_STRENGTHS)


def alike(name: str, known: Iterable[str], cutoff: float = 0.7) -> list[str]:
    """Return the option that is spelled most like a name, if there is one; never the opposite of what was meant."""
    negated = name.startswith("--no-")
    long = (option for option in known if option.startswith("--") and option.startswith("--no-") == negated)
    words = {option[2:]: option for option in long}
    if not name.startswith("--"):
        return []
    return [words[word] for word in _most_like(name[2:], words, cutoff)]


def _most_like(word: str, words: Collection[str], cutoff: float) -> list[str]:
    """Return the word that has the same letters, or else is spelled most like another one, if there is one."""
    swapped = [other for other in words if sorted(other) == sorted(word)]
    return swapped[:1] or get_close_matches(word, words, 1, cutoff)


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


def _advices(foreign: Sequence[str], command: str, parameters: Sequence[Any]) -> str:
    """Return what to write for each option, if no line is certain."""
    known = flags(parameters)
    files = [p.metavar or p.name.upper() for p in parameters if p.param_type_name == "argument"]
    usage = f"files go after the command: `lora-merge {' '.join((command, *files))}`"
    usage = f"{THE_BASE}; {ADAPTER_ORDER}" if command == MERGE else usage
    meanings = [meaning_of(name, known) or Foreign(STRENGTH_FORMS, (STRENGTHS,)) for name in foreign]
    advices = [usage if {BASE, MODEL, TUNED, ADAPTERS} & {*m.forms} else advice_on(m, known) for m in meanings]
    return "; ".join(filter(None, dict.fromkeys(advices))) or f"see `lora-merge help {command}`"

"""Options of other programs, and strengths at the wrong place: each is refused with the user's own line corrected.

A line is read by roles: files, strengths, options of ours. What has no counterpart here is left out, and the message
says so. The options are those of sd-scripts, LyCORIS, supermerger, ComfyUI's nodes, diffusers, PEFT, LLaMA-Factory,
Axolotl, Unsloth, FastChat, mergekit, llama.cpp and cp.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
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
from ..paths import exists, expand, split_strength, with_found_ending
from ..recipes.commands import COMMANDS
from ..text import plural
from .argument_values import ADAPTER_ORDER, check_adapter, check_parts, check_tag, check_two, expanded
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

SWITCH: Final = "SWITCH"
"""The role of "true" or "false" after an option that has no value here."""

SEVERAL: Final = (ADAPTERS, STRENGTHS)
"""Roles with several words after the option."""


class Foreign(NamedTuple):
    """What an option of another program is here."""

    advice: str
    forms: tuple[str, ...]
    """Words of ours with {} for the value, or a role: the first form is meant whose option the command has."""


def _names(words: str, endings: str = "") -> list[str]:
    """Return the names of options: each word alone, and with each ending."""
    return [f"--{word}{ending}" for word in words.split() for ending in ("", *endings.split())]


def _joined(words: str, endings: str) -> list[str]:
    """Return the names of options: each word with each ending."""
    return [f"--{word}-{ending}" for word in words.split() for ending in endings.split()]


def _use(form: str) -> Foreign:
    return Foreign(f"use `{form}`", (form,))


def _leave(reason: str) -> Foreign:
    return Foreign(f"leave it out: {reason}", (LEFT_OUT,))


_FILE: Final = "-path -name -name-or-path -model-name-or-path -dir -file"
_FACTOR: Final = "strength ratio weight scale multiplier mul"

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

_MEANINGS: Final[tuple[tuple[list[str], Foreign], ...]] = (
    # Files.
    (["--adapter-name"], _leave("not needed here")),  # a label in PEFT
    (_names("base base-model sd-model pretrained pretrained-model", _FILE), Foreign(THE_BASE, ("--base {}", BASE))),
    ([*_names("model ckpt checkpoint unet-name input source", _FILE), "-m"], Foreign(THE_BASE, (MODEL,))),
    (_names("model-org original-model"), Foreign(_BEFORE, (BASE,))),
    (_names("model-tuned tuned tuned-model finetuned-model fine-tuned-model trained-model"), Foreign(_AFTER, (TUNED,))),
    ([*_names("lora loras lora-model lora-adapter adapter adapters adapter-model peft peft-model", _FILE),
      *_names("models lora-paths lora-names network-weights")], Foreign(ADAPTER_ORDER, ("--adapter {}", ADAPTERS))),
    ([*_joined("save output out export dump", "to as path dir file name folder directory model model-path"),
      *_names("out outfile outdir export dest dst destination name target-model-path merged-model-path"),
      "--filename-prefix"], Foreign("use `-o FILE`", ("-o {}",))),
    # Strengths.
    ([*_names("ratio ratios weight weights multiplier multipliers strengths"), "-w", "--lora-scaled",
      *_joined("lora adapter network", f"{_FACTOR} strengths ratios weights scales multipliers")],
     Foreign(STRENGTH_FORMS, (STRENGTHS,))),
    (["--alpha"], Foreign(STRENGTH_FORMS, (ALPHA,))),
    ([*_joined("te text-encoder clip", _FACTOR), "--strength-clip"],
     Foreign(_PART, ("--strength-for te={}",))),
    ([*_joined("unet model", _FACTOR), "--strength-model"],
     Foreign(_PART, ("--strength-for unet={}",))),
    (_names("exclude ignore"), Foreign(_PART, ("--strength-for {}=0",))),
    (["--only"], Foreign(_PART, (ONLY,))),
    (_names("no-te no-text-encoder unet-only"), _use("--strength-for te=0")),
    (_names("lbw lbws block-weights lora-block-weight"), Foreign(_LBW, ("--strength-for lbw={}",))),
    # Numbers of the output, ranks, methods.
    ([*_joined("save out output torch export weight", "precision dtype type"), "--type", "--outtype"],
     Foreign(_DTYPE, ("--dtype {}",))),
    (["--precision"], Foreign(_DTYPE, (PRECISION,))),
    (_names("quant quantize quantization export-quantization qtype save-method", "-type -format -bit -bits"),
     Foreign("use --dtype with a quantised format, such as `--dtype nf4`", ("--dtype {}",))),
    (_names("compute-precision calc-precision calc-dtype merge-precision merge-dtype working-dtype"),
     Foreign("use `--compute-dtype fp32` or fp64", ("--compute-dtype {}",))),
    (_names("fp16 float16 half"), _use("--dtype fp16")),
    (_names("bf16 bfloat16"), _use("--dtype bf16")),
    (_names("fp32 float32"), _use("--dtype fp32")),
    (["--fp8"], _use("--dtype fp8_scaled")),
    (["--load-in-4bit"], _use("--dtype nf4")),
    (["--load-in-8bit"], _use("--dtype int8")),
    ([*_names("rank new-rank dim lora-rank lora-r lora-dim network-dim network-rank target-rank svd-rank linear-dim"),
      "-r"], Foreign(_RANK, ("--rank {}",))),
    (_names("conv-dim new-conv-rank"), Foreign("use `--conv-rank N`", ("--conv-rank {}",))),
    (["--dynamic-method"], Foreign("use a rule such as `--rank fro:0.9`", (RULE,))),
    (["--dynamic-param"], Foreign("use --rank with the share in its rule, such as `--rank fro:0.9`", (SHARE,))),
    (_names("lora-alpha network-alpha"), LORA_ALPHA),
    (_names("combination-type merge-method merge-type"),
     Foreign("use --method, such as `--method ties`", ("--method {}",))),
    (_names("format to output-format target-format"),
     Foreign("use `--to diffusers`", ("--to {}", "--format {}"))),
    (["--majority-sign-method"], Foreign("use `--elect sum` or count", ("--elect {}",))),
    # Others.
    (["--metadata-title"], Foreign("use `--title TEXT`", ("--title {}",))),
    ([*_names("force yes exist-ok"), "-f", "-y"], _use("--overwrite")),
    ([*_names("plan simulate"), "-n"], _use("--dry-run")),
    (_names("silent no-progress"), _use("-q")),
    (_names("skip-verify no-check no-verification"), _use("--no-verify")),
    (_names("cuda gpu use-gpu"), _use("--device cuda")),
    (["--cpu"], _use("--device cpu")),
    ([*_names("parallel jobs"), "-j"], Foreign("use `--workers N`", ("--workers {}",))),
    (["--config"], Foreign("several merges go into a jobs file: `lora-merge batch JOBS.yaml`", ())),
    # Nothing to do.
    (_names("threads num-threads n-threads num-workers"), _leave("all cores are used")),
    (_names("low-vram lowvram low-memory low-cpu-memory low-cpu-mem-usage cpu-offload"),
     _leave("memory is limited in any case")),
    (_names("max-shard-size out-shard-size export-size"), _leave("shards are those of the base")),
    (_names("device-map export-device"), _leave("--device names the device")),
    (["--no-overwrite"], _leave("nothing is overwritten without --overwrite")),
    (_names("v2 is-v2 v-parameterization sdxl is-sdxl flux model-type model-arch arch architecture"),
     _leave("the model is recognised")),
    (_names("from input-format source-format"), _leave("the format is recognised")),
    (_names("push-to-hub hub-model-id export-hub-model-id"),
     _leave("send the output by hf upload OWNER/NAME FOLDER")),
    (_names("concat shuffle trust-remote-code copy-tokenizer lazy-unpickle allow-crimes safe-serialization "
            "merge-and-unload use-safetensors template finetuning-type task-type clip-skip max-seq-length "
            "safe-merge safe-fusing fuse-unet fuse-text-encoder "
            "load-precision"), _leave("not needed here")),
)  # fmt: skip

FOREIGN_OPTIONS: Final[Mapping[str, Foreign]] = MappingProxyType(
    {name: meaning for names, meaning in reversed(_MEANINGS) for name in names}
)
"""Option of another program → its meaning."""

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
LINEAR: Final = (SUM, "compose")
"""The methods without a factor for the combined change."""


def meaning_of(name: str, *, near: bool = False) -> Foreign | None:
    """Return the meaning of an option of another program. `near`: also of one in a slightly other spelling."""
    plain = _hyphened(name)
    plain = (
        plain if plain in FOREIGN_OPTIONS else re.sub("(?<=[a-z])(-?[0-9]+|-[a-d])$", "", plain)
    )  # --lora2, --lora-b
    return FOREIGN_OPTIONS.get(next(iter(alike(plain, FOREIGN_OPTIONS, SIMILAR) if near else ()), plain))


def advice_on(meaning: Foreign, known: Collection[str]) -> str:
    """Return the advice on an option of another program to a command with these options; "" without one that fits."""
    of_rank = {"--rank {}", RULE, SHARE} & {*meaning.forms}
    advice = SAME_RANK if of_rank and "--rank" not in known else meaning.advice
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

    def take(self, args: Sequence[str]) -> TypedLine:
        """Return itself with the words of a line; NotClear for a word without a role."""
        option, form = "", ""
        for word in (part for arg in args for part in (arg.split("=", 1) if arg.startswith("--") else [arg])):
            if word.startswith("-") and len(word) > 1 and not right_form(word):
                self._expect_value(option, form)
                option, form = word, self._form(word)
            elif form == LEFT_OUT and not _names_file(word):
                typed, reason = self.left_out.pop()
                self.left_out.append((f"{typed} {word}", reason))
                form = ""
            elif form == SWITCH and word.lower() in SWITCHED:
                self.settings = self.settings if SWITCHED[word.lower()] else self.settings[:-1]
                form = ""
            elif form in ("", LEFT_OUT, SWITCH, *SEVERAL):
                self._take_word(word, form)
                form = "" if form in (LEFT_OUT, SWITCH) else form
            else:
                form = self._take_value(option, form, word)
        self._expect_value(option, form)
        return self

    def _expect_value(self, option: str, form: str) -> None:
        if form not in ("", LEFT_OUT, SWITCH, *SEVERAL):
            raise NotClear(option)

    def _form(self, option: str) -> str:
        """Return the form of an option with a value after it; SWITCH for one without, which is taken at once."""
        name = _hyphened(option)
        name = name if name in FOREIGN_OPTIONS else next(iter(alike(name, self.known, SIMILAR)), name)
        if name in OWN_STRENGTHS or (name == OWN_WEIGHTS and name in self.known):
            return STRENGTH
        if name in self.known:
            forms: tuple[str, ...] = (name if self.known[name].is_flag else f"{name} {{}}",)
        else:
            meaning = meaning_of(option, near=True) or _leave("not known here")
            forms = meaning.forms
            if LEFT_OUT in forms:
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
            (self.adapters if form == ADAPTERS else self.plain).extend(_in_our_syntax(word))

    def _take_value(self, option: str, form: str, value: str) -> str:
        """Take the value of an option; return the role of the next word."""
        typed = f"{option} {value}"
        if form == ALPHA:
            number = right_form(value)
            form = STRENGTHS if number and abs(float(number)) <= HIGHEST_STRENGTH else LORA_ALPHA.forms[0]
        if form in (STRENGTH, STRENGTHS):
            self.numbers.append(value)
            return STRENGTHS if form == STRENGTHS else ""
        if form in (RULE, SHARE):
            self.of_rank[form] = value
        elif form == ONLY and value not in ONLY_PARTS:
            raise NotClear(value)
        elif form == ONLY:
            self.settings.append(Setting(typed, ("--strength-for", ONLY_PARTS[value])))
        elif form.startswith("-") and _hyphened(option) not in self.known:
            self.settings.append(Setting(typed, self.words_for(form, value)))
        elif form != MODEL or not self.command.merges:
            self.settings.append(Setting(typed, (form.split()[0], value)))
        elif _names_file(value) and is_adapter(value):
            self.adapters.append(value)
        else:
            self.settings.append(Setting(typed, (BASE, value)))
        return ""

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
        if not value or not text:
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
    files, first = _files(reading)
    left_out, conflicts, numbers = [*reading.left_out], list[str](), reading.numbers
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
    if reading.strays:
        return f"a number is not an adapter: {' '.join(reading.strays)}"
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


def _files(reading: TypedLine) -> tuple[list[str], int]:
    """Return the files in the order of our commands, and the number of those that are no adapters."""
    named = {path for word in reading.adapters for path in (word, _Term.of(word).path)}
    command, base, tuned, model = reading.command, *(reading.file(role) for role in (BASE, TUNED, MODEL))
    others = [*model, *(word for word in reading.plain if word not in named)]
    first = 2 if command.inputs == "checkpoints" else int(command.merges)
    if first == 2:
        files = [*base, *tuned, *others] if base else [*others, *tuned]
    elif base or not first:
        files = [*base, *reading.adapters, *others, *tuned]
    else:
        files = [*others[:1], *reading.adapters, *others[1:]]
    most = len(files) if command.several or command.merges else max(first, 1)
    swapped = first == 1 and base and not all(map(is_adapter, filter(_names_file, files[1:])))
    if not reading.required <= len(files) <= most or (tuned and command.options and first < 2) or swapped:
        raise NotClear(" ".join(files))
    if command.merges and files[0] in files[1:]:  # a base is not its own adapter
        raise NotClear(files[0])
    return files, first


def _settings(reading: TypedLine, left_out: list[tuple[str, str]], conflicts: list[str]) -> list[Setting]:
    """Return the options of ours, the output first; add what is left out, and what has two values."""
    settings, rule = [s for s in reading.settings if s.words[0] not in (PRECISION, BASE, TUNED, MODEL)], ""
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
    for setting in (*(s for s in reading.settings if s.words[0] in (BASE, TUNED, MODEL)), *settings):
        name, *value = setting.words
        parameter = reading.known.get(name)
        several = parameter is not None and parameter.multiple
        place = (parameter.name if parameter else name, several and (value[0].rpartition("=")[0] or value[0]))
        before = by_place.get(place, setting)
        foreign = [s for s in (before, setting) if _hyphened(s.typed.split()[0]) not in reading.known]
        if before.words[1:] != setting.words[1:] and foreign:
            conflicts.append(f"{before.typed} and {setting.typed} contradict each other")
        by_place[place] = setting
    kept = [s for s in by_place.values() if s.words[0] not in (BASE, TUNED, MODEL)]
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
        of_adapters = len(reading.adapters) > 1 and not (reading.plain or reading.file(BASE) or reading.file(MODEL))
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
    names = [arg.partition("=")[0] for arg in before if arg.startswith("-") and not right_form(arg)]
    foreign = [name for name in dict.fromkeys(names) if _is_foreign(name, known, command)]
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


def _is_foreign(name: str, known: Collection[str], command: str) -> bool:
    """Return whether an option belongs to other programs, or to other commands of ours if it is a strength."""
    plain = _hyphened(name)
    if plain in known or (command not in COMMANDS and f"{plain}s" in known):
        return False
    if plain in FOREIGN_OPTIONS or plain[2:].replace("-", "_") in OPTIONS or plain in OWN_STRENGTHS:
        return plain in FOREIGN_OPTIONS or (command in COMMANDS and plain in OWN_STRENGTHS)
    return not alike(plain, known, SIMILAR) and meaning_of(name, near=True) is not None


def alike(name: str, known: Iterable[str], cutoff: float = 0.7) -> list[str]:
    """Return the option that is spelled most like a name, if there is one; never the opposite of what was meant."""
    negated = name.startswith("--no-")
    long = (option for option in known if option.startswith("--") and option.startswith("--no-") == negated)
    words = {option[2:]: option for option in long}
    if not name.startswith("--"):
        return []
    swapped = [word for word in words if sorted(word) == sorted(name[2:])]
    return [words[word] for word in swapped[:1] or get_close_matches(name[2:], words, 1, cutoff)]


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
    meanings = [meaning_of(name) or Foreign(STRENGTH_FORMS, (STRENGTHS,)) for name in foreign]
    advices = [usage if {BASE, MODEL, TUNED, ADAPTERS} & {*m.forms} else advice_on(m, known) for m in meanings]
    return "; ".join(filter(None, dict.fromkeys(advices))) or f"see `lora-merge help {command}`"

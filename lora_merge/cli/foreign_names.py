"""Names of options of other programs, and what each is here: a role, an option of ours, or nothing.

A name has its meaning by its words, so that options of programs that are not listed are understood, too. The
names are those of sd-scripts, musubi-tuner, LyCORIS, supermerger, ComfyUI's nodes, diffusers, PEFT, LLaMA-Factory,
Axolotl, Unsloth, FastChat, mergekit, llama.cpp and cp.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from types import MappingProxyType
from typing import Final, NamedTuple

from .argument_values import ADAPTER_ORDER


class Role:
    """What the value of an option is."""

    BASE, TUNED, ADAPTERS = "BASE", "TUNED", "ADAPTERS"
    MODEL = "MODEL"  # the base, the tuned model if the line has another base, or an adapter if the file is one
    OTHER_FILE = "OTHER_FILE"  # one of the pipeline, which is left out whatever it is
    JOBS = "JOBS"  # a jobs file
    STRENGTHS, STRENGTH = "STRENGTHS", "STRENGTH"  # all numbers that follow, as in other programs; or one, as here
    NOT_CLEAR = "NOT_CLEAR"  # a value that has no counterpart, for the user to decide on
    # An option of ours by its value.
    PRECISION, ALPHA, ONLY, RULE, SHARE = "PRECISION", "ALPHA", "ONLY", "RULE", "SHARE"
    LEFT_OUT = "LEFT_OUT"  # a value, if there is one, with nothing to do here
    SEVERAL = (ADAPTERS, STRENGTHS)  # the roles with several words after the option
    UNLESS = "UNLESS "  # before the words for a switch that is off


class Foreign(NamedTuple):
    """What an option of another program is here."""

    advice: str
    forms: tuple[str, ...]
    """Words of ours with {} for the value, or 1-{} for what is left of 1, or a role: the first form is meant whose
    option the command has. Words after UNLESS are meant if a switch is off."""


def _use(form: str) -> Foreign:
    return Foreign(f"use `{form}`", (form,))


def _leave(reason: str, *forms: str) -> Foreign:
    return Foreign(f"leave it out: {reason}", (*forms, Role.LEFT_OUT))


STRENGTH_FORMS: Final = "write the strength after the file name: ADAPTER:0.8; or give `-s 0.8` for each adapter"
THE_BASE: Final = "the base is the first word"
SAME_RANK: Final = "use `lora-merge resize ADAPTER --rank 16` first, as a merge keeps the rank"
_ALL_CORES: Final = _leave("all cores are used", "--workers {}")
NOT_NEEDED: Final = "not needed here"
LORA_ALPHA: Final = Foreign("use `--setting lora_alpha=16`, the alpha of the training",
                        ("--setting lora_alpha={}", "--alpha {}"))  # fmt: skip
_BEFORE: Final = "the model before the training comes first: `lora-merge extract BASE TUNED`"
_AFTER: Final = "the model after the training comes second: `lora-merge extract BASE TUNED`"
_PART: Final = "use --strength-for, such as `--strength-for te=0`; `lora-merge parts BASE` lists the parts"
_LBW: Final = "use `--strength-for lbw=1,0,0,…` with a number for each block; `lora-merge parts BASE` lists them"
_DTYPE: Final = "use `--dtype fp16`, bf16 or fp32"
_RANK: Final = "use `--rank N`, or a rule such as `--rank energy:0.9`"

_FACTOR: Final = (
    "strengths?|ratios?|weights?|scales?|scaling|multipliers?|mul|factors?|coeffs?|coefs?|coefficients?|mult|scaled"
)
_ADAPTER: Final = "loras?|adapters?|peft|network|locon|lycoris"
_OUTPUT: Final = "save|out|output|export|dump|dest|dst|destination|outfile|outdir|merged|result"

MEANINGS: Final[tuple[tuple[str, Foreign], ...]] = (
    # Nothing to do.
    ("-t -j (?:max-|num-|n-)?(?:threads|workers|jobs) parallel", _ALL_CORES),
    ("low-?v?ram low-memory low-cpu-memory low-cpu-mem-usage cpu-offload", _leave("memory is limited in any case")),
    ("(?:max-|out-)?shard-size export-size", _leave("shards are those of the base")),
    ("device-map loading-device", _leave("--device names the device")),
    ("(?:working|export|compute|merge)-device", Foreign("use `--device cpu` or cuda", ("--device {}",))),
    ("cfg cfg-scale guidance-scale steps sampler scheduler prompt negative-prompt width height",
     _leave("a merge makes no picture")),
    ("no-overwrite", _leave("nothing is overwritten without --overwrite")),
    ("v2 is-v2 v-parameterization sdxl is-sdxl flux model-type model-arch arch architecture",
     _leave("the model is recognised")),
    ("from input-format source-format", _leave("the format is recognised")),
    ("push-to-hub", _leave("an output may be an address: -o hf://OWNER/NAME")),
    ("(?:export-)?hub-model-id (?:upload-)?repo(?:-id)?", Foreign("use `-o hf://OWNER/NAME`", ("-o hf://{}",))),
    ("(?:export-)?gguf(?:-path)?", _leave("a model folder becomes GGUF by convert_hf_to_gguf.py of llama.cpp")),
    ("concat shuffle trust-remote-code copy-tokenizer lazy-unpickle allow-crimes safe-serialization merge-and-unload "
     "use-safetensors save-model-as template finetuning-type task-type clip-skip max-seq-length clamp-quantile suffix "
     "safe-merge safe-fusing load-precision adapter-name group-size log-level no-half-vae "
     "(?:adapter|lora|peft|network)-type merge-lora "
     "to-safetensors skip-existing continue-on-error show-metadata "
     "no-sort mode mem-eff-load-save mem-eff-safe-open safetensors diffusers dropout+",
     _leave(NOT_NEEDED)),
    ("fuse-unet", _leave(NOT_NEEDED, f"{Role.UNLESS}--strength-for unet=0")),
    ("fuse-text-encoder", _leave(NOT_NEEDED, f"{Role.UNLESS}--strength-for te=0")),
    # Switches, formats, methods, numbers of the output.
    ("fp16 float16 half", _use("--dtype fp16")), ("bf16 bfloat16 de-?quanti[sz]e", _use("--dtype bf16")),
    ("fp32 float32", _use("--dtype fp32")), ("fp8|float8+", _use("--dtype fp8_scaled")),
    ("load-in-[48]bit", _leave("a merge is computed in full precision")),
    ("no-te no-text-encoder (?:network-)?(?:train-)?unet-only", _use("--strength-for te=0")),
    ("no-unet (?:network-)?(?:train-)?(?:te|text-encoder)-only", _use("--strength-for unet=0")),
    ("no-cuda no-gpu", _use("--device cpu")),
    ("force yes exist-ok -f -y", _use("--overwrite")), ("plan simulate -n", _use("--dry-run")),
    ("silent no-progress", _use("-q")), ("skip-verify no-check no-verification", _use("--no-verify")),
    ("cuda gpu gpu-id use-gpu", _use("--device cuda")), ("cpu", _use("--device cpu")),
    ("config", Foreign("several merges go into a jobs file: `lora-merge batch JOBS.yaml`", (Role.JOBS,))),
    ("bits (?:quant|quantize|quantization|export-quantization|qtype|save-method)(?:-type|-format|-bits?)?",
     Foreign("use --dtype with a quantised format, such as `--dtype nf4`", ("--dtype {}",))),
    ("(?:compute|calc|merge)-precision (?:calc|merge|working)-dtype",
     Foreign("use `--compute-dtype fp32` or fp64", ("--compute-dtype {}",))),
    ("type outtype (?:save|out|output|torch|export|weight|infer)-(?:precision|dtype|type)",
     Foreign(_DTYPE, ("--dtype {}",))),
    ("(?:mixed-)?precision", Foreign(_DTYPE, (Role.PRECISION,))),
    ("beta2", _use("--ema-to {}")), ("beta ema-decay", _use("--ema {}")),
    *((f"{layers}-{name}", _use(f"{flag} {rule}")) for layers, flag in (("linear", "--rank"), ("conv", "--conv-rank"))
      for name, rule in (("quantile", "sum:{}"), ("ratio", "ratio:1/{}"),
                         ("threshold", "above:{}"))),  # tools/extract_locon.py of LyCORIS
    ("drop-rate drop-p dropout-rate", Foreign("use `--density`, the share that is kept", ("--density 1-{}",))),
    *((f"to-{name}", _use(f"--to {name}")) for name in ("diffusers", "kohya", "peft", "comfy")),
    ("dynamic-method", Foreign("use a rule such as `--rank fro:0.9`", (Role.RULE,))),
    ("dynamic-param", Foreign("use --rank with the share in its rule, such as `--rank fro:0.9`", (Role.SHARE,))),
    ("combination-type merge-method merge-type", Foreign("use --method, such as `--method ties`", ("--method {}",))),
    ("format (?:output-)?model-format (?:to|target|output)(?:-format)?",
     Foreign("use `--to diffusers`", ("--to {}", "--format {}"))),
    ("majority-sign-method", Foreign("use `--elect sum` or count", ("--elect {}",))),
    ("metadata-title", Foreign("use `--title TEXT`", ("--title {}",))),
    # Strengths.
    ("lbws? block-weights? lora-block-weights?", Foreign(_LBW, ("--strength-for lbw={}",))),
    ("exclude ignore", Foreign(_PART, ("--strength-for {}=0",))), ("only", Foreign(_PART, (Role.ONLY,))),
    ("include|exclude|patterns?|filter|modules|layers|blocks|skip+", Foreign(_PART, ())),
    ("conv-alpha", Foreign(LORA_ALPHA.advice, ())), ("(?:lora|network|adapter|new)-alpha", LORA_ALPHA),
    (f"te|text-encoder|clip+{_FACTOR}", Foreign(_PART, ("--strength-for te={}",))),
    (f"unet+{_FACTOR}", Foreign(_PART, ("--strength-for unet={}",))),
    (f"base-weights-multiplier ratios? weights? multipliers? strengths scaling mult factor blend -w merge+{_FACTOR} "
     f"{_ADAPTER}+{_FACTOR}", Foreign(STRENGTH_FORMS, (Role.STRENGTHS,))),
    (f"model+{_FACTOR}", Foreign(_PART, ("--strength-for unet={}",))),
    ("alpha+", Foreign(STRENGTH_FORMS, (Role.ALPHA,))),
    ("vae|ae|clip|t|t5xxl|te|text-encoder|llm+", Foreign("leave it out: it is not merged into", (Role.OTHER_FILE,))),
    # Ranks.
    ("conv+dim|rank", Foreign("use `--conv-rank N`", ("--conv-rank {}",))),
    ("-r rank|dim|r+", Foreign(_RANK, ("--rank {}",))),
    # Files.
    (f"o name filename filename-prefix {_OUTPUT}+ target+path|file|folder|dir", Foreign("use `-o FILE`", ("-o {}",))),
    (f"models base-weights {_ADAPTER}+", Foreign(ADAPTER_ORDER, ("--adapter {}", Role.ADAPTERS))),
    ("tuned|finetuned|fine-tuned|trained|diff+", Foreign(_AFTER, (Role.TUNED,))),
    ("org|orig|original+", Foreign(_BEFORE, (Role.BASE,))),
    ("base|pretrained|sd-model+", Foreign(THE_BASE, ("--base {}", Role.BASE))),
    ("-m model|ckpt|checkpoint|unet|dit|transformer|source|src|input|file|path+", Foreign(THE_BASE, (Role.MODEL,))),
)  # fmt: skip
"""Names of options → their meaning; the first that fits. A pattern is a whole name, or, with a "+", words that a name
has in any place: `conv+dim|rank` is for "new-conv-rank" and "rank-of-conv"."""

NOT_KNOWN: Final = "not known here"
UNKNOWN: Final = _leave(NOT_KNOWN)
"""The meaning of a name without one."""

OTHER_VALUES: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType({
    "--dtype": {"fp8": "fp8_e4m3fn", "float_16": "fp16", "bfloat_16": "bf16", "float_32": "fp32",
                **dict.fromkeys(("4", "4bit", "int4", "q4", "merged_4bit"), "nf4"),
                "merged_4bit_forced": "nf4", **dict.fromkeys(("8", "8bit", "q8"), "int8"), "merged_16bit": "bf16"},
    "--method": {**dict.fromkeys(("linear", "cat", "svd", "task_arithmetic"), "sum"), "dare_linear": "dare",
                 "magnitude_prune": "prune", "ties_svd": "ties", "dare_ties_svd": "dare_ties"},
    "--to": {"other": "comfy", "default": "kohya",  # convert_lora.py of musubi-tuner
             "safetensors": "onetrainer", "legacy_safetensors": "kohya", "comfy_lora": "comfy"},  # OneTrainer
    "--elect": {"total": "sum", "frequency": "count"},
})  # fmt: skip
"""Option → value of another program → the value here. PEFT (add_weighted_adapter), mergekit, Unsloth, LLaMA-Factory."""

ONLY_PARTS: Final = {"unet": "te=0", "model": "te=0", "te": "unet=0", "clip": "unet=0", "text_encoder": "unet=0"}
"""Part after `--only` → what `--strength-for` takes, where the other parts are known without the base."""

FOREIGN_RULES: Final = {"sv_ratio": "ratio", "sv_fro": "fro", "sv_cumulative": "sum"}
"""Rule for ranks of sd-scripts' networks/resize_lora.py → the rule here."""

SIMILAR: Final = 0.9
"""The likeness of two options from which one is a misspelt form of the other."""


@cache
def _vocabulary() -> list[str]:
    """Return the longer words of the names, among which a misspelt one is looked for."""
    return sorted({word for pattern, _ in MEANINGS for word in re.findall("[a-z]{5,}", pattern)})


def _spellings(name: str) -> tuple[str, str, str]:
    """Return the name of an option as patterns have it: itself; without numbers, as of --lora2 and --lora-b; and with
    the words that misspelt ones were meant as."""
    plain = hyphened(name).removeprefix("--")
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
    if hyphened(name) in known or alike(hyphened(name), known, SIMILAR):
        return None
    fitting = (
        meaning
        for pattern, meaning in MEANINGS
        for words in pattern.split()
        if _fits(words, right) or _fits(words, plain)
    )
    return next(fitting, None)


def _fits(pattern: str, name: str) -> bool:
    """Return whether a name is that of a pattern, or has its words."""
    if "+" not in pattern:
        return re.fullmatch(pattern, name) is not None
    return all(re.search(rf"(?<![^-])(?:{word})(?![^-])", name) for word in pattern.split("+") if word)


def part_of(option: str) -> str:
    """Return the part of a model whose strength an option may be: `--te1`, `--unet_weight`; "" for others."""
    words = hyphened(option)[2:].replace("text-encoder", "te").split("-")
    encoder = next((word for word in words if re.fullmatch("te[12]?|clip", word)), "")
    return encoder.replace("clip", "te") or ("unet" if "unet" in words else "")


def advice_on(meaning: Foreign, known: Collection[str]) -> str:
    """Return the advice on an option of another program to a command with these options; "" without one that fits."""
    of_rank = {"--rank {}", "--conv-rank {}", Role.RULE, Role.SHARE} & {*meaning.forms}
    advice = SAME_RANK if of_rank and "--rank" not in known and "-s" in known else meaning.advice
    named = re.findall(r"(?<![\w-])--?[a-z][a-z-]*", advice.partition("`lora-merge ")[0])
    return advice if {*named} <= {*known} else ""


def hyphened(word: str) -> str:
    """Return the name of an option with hyphens, as options here have them."""
    name = word.partition("=")[0]
    if not name.startswith("--"):
        return name
    return re.sub("(?<=[a-z0-9])(?=[A-Z])", "-", name).replace("_", "-").lower()  # --lora_weight, --loraWeight


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

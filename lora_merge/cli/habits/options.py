"""Options of other programs, each answered with what is typed here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from ...errors import UsageError
from ...paths import typed
from ...spellings import right_form
from .words import check_dashes

_BASE: Final = "the base is the first word"
ADAPTERS: Final = "adapters follow the base: lora-merge BASE ADAPTER:0.8 ADAPTER2:0.5"
_STRENGTH: Final = "a strength stands behind its file: ADAPTER:0.8; or give -s 0.8 for each adapter"
_OUTPUT: Final = "use -o FILE"
_DTYPE: Final = "use --dtype fp16, bf16 or fp32"
_PART: Final = "use --strength-for, such as --strength-for te=0; lora-merge parts BASE lists the parts"
_NEEDLESS: Final = "leave it out: it is not needed here"
_IDLE: Final = "leave it out: sums are exact, shards are those of the base, --device names the device"
_RANK: Final = "use --rank N, or a rule such as --rank fro:0.9"
_MODELS: Final = "both models come first: lora-merge extract BASE TUNED"
_QUIET: Final = "use -q"
_OWN_RANK: Final = "the rank is that of the adapter; another one: lora-merge resize ADAPTER --rank N"
_LBW: Final = "use --strength-for lbw=1,0,0,… with a number for each block; lora-merge parts BASE lists them"

FACTORS: Final = {
    **dict.fromkeys(("--te-strength", "--text-encoder-strength", "--strength-clip"), "te={}"),
    **dict.fromkeys(("--unet-strength", "--strength-model"), "unet={}"),
    **dict.fromkeys(("--exclude", "--ignore"), "{}=0"),
    "--only": "",  # see ONLY
    **dict.fromkeys(("--lbw", "--block-weights"), "lbw={}"),
}
"""Option of another program → what `--strength-for` takes in its place."""

ONLY: Final = {"unet": "te=0", "model": "te=0", "te": "unet=0", "clip": "unet=0", "text_encoder": "unet=0"}
"""Part after `--only` → what `--strength-for` takes, where the parts besides it are known without the base."""

NEEDLESS: Final = (
    "--concat", "--shuffle", "--trust-remote-code", "--copy-tokenizer", "--lazy-unpickle", "--allow-crimes", "--v2",
    "--safe-serialization", "--merge-and-unload", "--low-cpu-memory", "--is-v2", "--v-parameterization", "--sdxl",
    "--is-sdxl", "--flux",
)  # fmt: skip
"""Options of other programs that have no value and nothing to do here."""

FOREIGN: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "--model",
                "--base",
                "--base-model",
                "--sd-model",
                "--checkpoint",
                "--ckpt",
                "--ckpt-name",
                "--model-path",
                "--base-path",
                "--base-model-path",
                "--base-model-name-or-path",
                "--pretrained-model-name-or-path",
            ),
            _BASE,
        ),
        **dict.fromkeys(
            (
                "--models",
                "--lora",
                "--loras",
                "--lora-path",
                "--lora-name",
                "--adapter",
                "--adapters",
                "--adapter-path",
                "--adapter-name-or-path",
                "--peft",
                "--peft-model",
                "--peft-model-path",
                "--lora-model",
            ),
            ADAPTERS,
        ),
        **dict.fromkeys(("--ratio", "--ratios", "--weight", "--weights", "-w", "--alpha"), _STRENGTH),
        **dict.fromkeys(("--multiplier", "--strengths", "--lora-scale", "--lora-scaled"), _STRENGTH),
        **dict.fromkeys(
            (
                "--save-to",
                "--out",
                "--out-path",
                "--out-file",
                "--outfile",
                "--output-path",
                "--output-dir",
                "--output-file",
                "--output-name",
                "--save-as",
                "--save-path",
                "--name",
            ),
            _OUTPUT,
        ),
        **dict.fromkeys(("--precision", "--save-precision", "--type"), _DTYPE),
        **dict.fromkeys(("--rank", "--new-rank", "--dim", "-r", "--dynamic-method", "--dynamic-param"), _RANK),
        **dict.fromkeys(("--lora-rank", "--lora-r", "--lora-dim", "--network-dim", "--network-rank"), _RANK),
        **dict.fromkeys(("--model-org", "--model-tuned"), _MODELS),
        **dict.fromkeys(("--fp16", "--float16", "--half"), "use --dtype fp16"),
        "--fp8": "use --dtype fp8_scaled",
        **dict.fromkeys(("--bf16", "--bfloat16"), "use --dtype bf16"),
        **dict.fromkeys(("--fp32", "--float32"), "use --dtype fp32"),
        **{"--load-in-4bit": "use --dtype nf4", "--load-in-8bit": "use --dtype int8"},
        "--push-to-hub": "leave it out, and then: hf upload OWNER/NAME FOLDER",
        **dict.fromkeys(("--max-shard-size", "--out-shard-size", "--device-map"), _IDLE),
        **dict.fromkeys(NEEDLESS, _NEEDLESS),
        **dict.fromkeys(("--silent", "--no-progress"), _QUIET),
        **dict.fromkeys(("--skip-verify", "--no-check", "--no-verification"), "use --no-verify"),
        **dict.fromkeys(("--threads", "--num-threads"), "leave it out: all cores are used"),
        "--no-overwrite": "leave it out: nothing is overwritten without --overwrite",
        "--no-te": "use --strength-for te=0",
        "--combination-type": "use --method, such as --method ties",
        "--config": "several merges stand in a file of jobs: lora-merge batch JOBS.yaml",
        **dict.fromkeys(("--parallel", "--jobs", "-j"), "use --workers N"),
        **{"--cuda": "use --device cuda", "--gpu": "use --device cuda", "--cpu": "use --device cpu"},
        **dict.fromkeys(("--force", "-f", "-y", "--yes"), "use --overwrite"),
        **dict.fromkeys(("-n", "--plan", "--simulate"), "use --dry-run"),
        **{name: _LBW if text.startswith("lbw") else _PART for name, text in FACTORS.items()},
    }
)
"""Option of another program → what to write instead. sd-scripts, mergekit, diffusers' scripts, cp."""

_OTHERWISE: Final = {_RANK: _OWN_RANK}
"""Advice → the advice for commands without the options in it."""

_FLAG: Final = r"(?<![\w-])--?[a-z][a-z-]*"

_ROLES: Final = {_BASE: "base", ADAPTERS: "adapters", _STRENGTH: "strengths", _OUTPUT: "output", _DTYPE: "dtype"}
"""Advice on an option with values → what its values are."""


def check_options(command: str, args: Sequence[str], parameters: Iterable[Any]) -> None:
    """Raise UsageError for an option that only other programs have. `parameters`: those of the command."""
    parameters = [*parameters]
    options = [parameter for parameter in parameters if parameter.param_type_name == "option"]
    known = {name: option.is_flag for option in options for name in (*option.opts, *option.secondary_opts)}
    check_dashes(args, known)
    given, args = args, [_hyphened(arg) for arg in args]
    names = {arg.partition("=")[0]: own.partition("=")[0] for arg, own in zip(args, given, strict=True)}
    found = [name for name in names if name in FOREIGN and not {name, f"{name}s"} & known.keys()]
    if found:
        right = translated(args, known) if command == "merge" else ""
        advice = {name: text for name in found if (text := advice_on(name, known))}
        told = [_usage(command, parameters) if text in (_BASE, ADAPTERS) else text for text in advice.values()]
        fix = f"write {right}" if right else "; ".join(dict.fromkeys(told)) or f"see lora-merge help {command}"
        words = " nor ".join(names[name] for name in found)
        raise UsageError(f"there is no option {words} here", " ".join(given)[:200], fix)


def advice_on(name: str, known: Iterable[str]) -> str:
    """Return the advice on an option of another program to a command with these options; "" without one that fits."""
    usual = FOREIGN[name]
    return next((text for text in (usual, _OTHERWISE.get(usual, "")) if text and advice_fits(text, known)), "")


def advice_fits(advice: str, known: Iterable[str]) -> bool:
    """Return whether a command has the options that an advice names, but for those of a whole command in it."""
    return {*known} >= {*re.findall(_FLAG, advice.partition("lora-merge ")[0])}


def _usage(command: str, parameters: Iterable[Any]) -> str:
    """Return the advice where the files of a command stand."""
    if command == "merge":
        return f"{_BASE}; {ADAPTERS}"
    files = [p.metavar or p.name.upper() for p in parameters if p.param_type_name == "argument"]
    return f"files stand behind the command: lora-merge {' '.join((command, *files))}"


def _hyphened(arg: str) -> str:
    """Return an argument with hyphens in the name of its option, as options here have them."""
    name = arg.partition("=")[0]
    return arg.replace(name, name.replace("_", "-"), 1) if name.startswith("--") else arg


def translated(args: Sequence[str], known: Mapping[str, bool]) -> str:
    """Return a merge in the words of another program as it is typed here; "" where that is not certain.

    `known`: option of `merge` → whether it stands without a value.
    """
    given: dict[str, list[str]] = {role: [] for role in ("plain", *_ROLES.values())}
    rest, role = list[str](), "plain"
    for word in (part for arg in args for part in ((arg.split("=", 1)) if arg.startswith("--") else (arg,))):
        before, role, own = role, *_read(word, role, known)
        if not role:
            return ""
        rest += own
        if not own and before == role and not word.startswith("-"):
            given[role].append(word)
            role = role if role in ("adapters", "strengths") else "plain"
    base, *plain = [*given["base"], *given["plain"]] or [""]
    adapters, strengths = [*given["adapters"], *plain], [right_form(text) for text in given["strengths"]]
    if not base or not adapters or (strengths and len(strengths) != len(adapters)) or not all(strengths):
        return ""
    if strengths:
        adapters = [f"{path}:{value}" for path, value in zip(adapters, strengths, strict=True)]
    for flag, values in (("-o", given["output"]), ("--dtype", given["dtype"])):
        rest += [flag, values[-1]] if values else []
    return typed(["lora-merge", base, *adapters, *rest])


def _read(word: str, role: str, known: Mapping[str, bool]) -> tuple[str, list[str]]:
    """Return the role of the word after this one, and the words of our command line in its place.

    The role is "" if `word` is an option of no known program.
    """
    meant = FOREIGN.get(word, "")
    if word in known:
        return "plain" if known[word] else "value", [word]
    if meant in _ROLES or word in FACTORS:
        return _ROLES.get(meant, word), []
    if word in NEEDLESS or (meant.startswith("use -") and "," not in meant and advice_fits(meant, known)):
        return "plain", [] if word in NEEDLESS else meant.split()[1:]
    if word.startswith("-"):
        return "", []
    if role in FACTORS:
        told = FACTORS[role].format(word) or ONLY.get(word, "")
        return ("plain", ["--strength-for", told]) if told else ("", [])
    return ("plain", [word]) if role == "value" else (role, [])

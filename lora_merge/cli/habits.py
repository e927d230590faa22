"""Words that people type from habit: options and spellings of other programs, each answered with the right form."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from ..errors import UsageError
from ..paths import WINDOWS, exists, typed

ASKED: Final = MappingProxyType(
    {"-h": "--help", "-V": "--version", "version": "--version", "/?": "--help", "/help": "--help"}
)
"""Words by which people ask the program about itself → the option."""

_BASE: Final = "the base is the first word"
ADAPTERS: Final = "adapters follow the base: lora-merge BASE ADAPTER:0.8 ADAPTER2:0.5"
_STRENGTH: Final = "a strength stands behind its file: ADAPTER:0.8; or give -s 0.8 for each adapter"
_OUTPUT: Final = "use -o FILE"
_DTYPE: Final = "use --dtype fp16, bf16 or fp32"
_PART: Final = "use --strength-for, such as --strength-for te=0; lora-merge parts BASE lists the parts"
_IDLE: Final = "leave it out: sums are exact, shards are those of the base, --device names the device"
_RANK: Final = "use --rank N, or a rule such as --rank fro:0.9"
_MODELS: Final = "both models come first: lora-merge extract BASE TUNED"
_LBW: Final = "use --strength-for lbw=1,0,0,… with a number for each block; lora-merge parts BASE lists them"

FACTORS: Final = {
    **dict.fromkeys(("--te-strength", "--text-encoder-strength", "--strength-clip"), "te={}"),
    **dict.fromkeys(("--unet-strength", "--strength-model"), "unet={}"),
    "--exclude": "{}=0",
    "--only": "",  # see ONLY
    **dict.fromkeys(("--lbw", "--block-weights"), "lbw={}"),
}
"""Option of another program → what `--strength-for` takes in its place."""

ONLY: Final = {"unet": "te=0", "model": "te=0", "te": "unet=0", "clip": "unet=0", "text_encoder": "unet=0"}
"""Part after `--only` → what `--strength-for` takes, where the parts besides it are known without the base."""

COMMANDS: Final = {
    **dict.fromkeys(("info", "show", "view", "check", "ls", "list", "metadata", "show_metadata"), "inspect"),
    **dict.fromkeys(("diff", "difference", "cmp"), "compare"),
    **dict.fromkeys(("run", "apply", "bake", "fuse", "add", "join", "merge_lora", "merge_and_unload"), "merge"),
    **dict.fromkeys(("svd", "subtract", "extract_lora_from_models"), "extract"),
    **dict.fromkeys(("shrink", "rank", "prune", "resize_lora"), "resize"),
    "svd_merge_lora": "combine",
    **dict.fromkeys(("blocks", "layers", "components"), "parts"),
    **dict.fromkeys(("validate", "prove", "test"), "verify"),
}
"""Command of another program → the one that does this here."""

FOREIGN: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("--model", "--base", "--base-model", "--sd-model", "--checkpoint", "--ckpt"), _BASE),
        **dict.fromkeys(
            ("--models", "--lora", "--loras", "--lora-path", "--adapter", "--adapters", "--peft"), ADAPTERS
        ),
        **dict.fromkeys(("--ratio", "--ratios", "--weight", "--weights", "-w", "--alpha"), _STRENGTH),
        **dict.fromkeys(("--multiplier", "--strengths", "--lora-scale"), _STRENGTH),
        **dict.fromkeys(("--save-to", "--out", "--out-path", "--output-path", "--output-dir"), _OUTPUT),
        **dict.fromkeys(("--precision", "--save-precision", "--type"), _DTYPE),
        **dict.fromkeys(("--new-rank", "--dim", "-r", "--dynamic-method", "--dynamic-param"), _RANK),
        **dict.fromkeys(("--model-org", "--model-tuned"), _MODELS),
        **dict.fromkeys(("--fp16", "--float16", "--half"), "use --dtype fp16"),
        **dict.fromkeys(("--bf16", "--bfloat16"), "use --dtype bf16"),
        **dict.fromkeys(("--fp32", "--float32"), "use --dtype fp32"),
        **{"--load-in-4bit": "use --dtype nf4", "--load-in-8bit": "use --dtype int8"},
        "--push-to-hub": "leave it out, and then: hf upload OWNER/NAME FOLDER",
        **dict.fromkeys(("--max-shard-size", "--device-map", "--trust-remote-code", "--concat", "--shuffle"), _IDLE),
        **dict.fromkeys(("--parallel", "--jobs", "-j"), "use --workers N"),
        **{"--cuda": "use --device cuda", "--gpu": "use --device cuda", "--cpu": "use --device cpu"},
        **dict.fromkeys(("--force", "-f", "-y", "--yes"), "use --overwrite"),
        **dict.fromkeys(("-n", "--plan", "--simulate"), "use --dry-run"),
        **{name: _LBW if text.startswith("lbw") else _PART for name, text in FACTORS.items()},
    }
)
"""Option of another program → what to write instead. sd-scripts, mergekit, diffusers' scripts, cp."""

_NUMBER: Final = re.compile(r"=?(?P<value>-?[0-9]*[.,]?[0-9]+)(?:(?P<percent>%)|/(?P<below>[0-9]+))?")
"""A number as people write it: 0,8 or 80% or 4/5, also with the = of -s=0.8."""

_WINDOWS: Final = re.compile(r"(?P<drive>[A-Za-z]):(?P<rest>[\\/].*)")
_HUB: Final = re.compile(r"[\w-][\w.-]{0,95}/(?!.*\.(?:safetensors|ckpt|pt|pth|bin|gguf|json)$)[\w.-]{1,96}")
ADDRESS: Final = re.compile(r"(?:(?:https?|hf|s3|civitai):.*|civitai)", re.IGNORECASE)

_FLAG: Final = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")

_ROLES: Final = {_BASE: "base", ADAPTERS: "adapters", _STRENGTH: "strengths", _OUTPUT: "output", _DTYPE: "dtype"}
"""Advice on an option with values → what its values are."""


def check_options(command: str, args: Sequence[str], parameters: Iterable[Any]) -> None:
    """Raise UsageError for an option that only other programs have. `parameters`: those of the command."""
    parameters = [*parameters]
    known = {name: getattr(parameter, "is_flag", False) for parameter in parameters for name in parameter.opts
             if name.startswith("-")}  # not the names of its arguments, which files may have  # fmt: skip
    check_dashes(args, known)
    given, args = args, [_hyphened(arg) for arg in args]
    names = {arg.partition("=")[0]: own.partition("=")[0] for arg, own in zip(args, given, strict=True)}
    found = [name for name in names if name in FOREIGN and not {name, f"{name}s"} & known.keys()]
    if found:
        right = translated(args, known) if command == "merge" else ""
        advice = {name: FOREIGN[name] for name in found if known.keys() >= {*_FLAG.findall(FOREIGN[name])}}
        told = [_usage(command, parameters) if text in (_BASE, ADAPTERS) else text for text in advice.values()]
        fix = f"write {right}" if right else "; ".join(dict.fromkeys(told)) or f"see lora-merge help {command}"
        words = " nor ".join(names[name] for name in found)
        raise UsageError(f"there is no option {words} here", " ".join(given)[:200], fix)


def _usage(command: str, parameters: Iterable[Any]) -> str:
    """Return the advice where the files of a command stand."""
    if command == "merge":
        return f"{_BASE}; {ADAPTERS}"
    files = [p.metavar or p.name.upper() for p in parameters if p.param_type_name == "argument"]
    return f"files stand behind the command: lora-merge {' '.join((command, *files))}"


def check_dashes(args: Sequence[str], known: Collection[str]) -> None:
    """Raise UsageError for an option with a long dash, as texts and web pages have it, or with too few hyphens."""
    for word in args:
        name = re.sub("^[–—−]+(?=[A-Za-z])", "-", word).partition("=")[0]
        right = name if name in known else f"-{name}"
        if name[0:1] == "-" and right in known and right != word.partition("=")[0] and not exists(word):
            raise UsageError("an option begins with hyphens", word, f"write {right}")


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
    """Return the role of the next word, "" for an option that nobody has, and what is typed here for this one."""
    meant = FOREIGN.get(word, "")
    if word in known:
        return "plain" if known[word] else "value", [word]
    if meant in _ROLES or word in FACTORS:
        return _ROLES.get(meant, word), []
    if meant.startswith("use -") and "," not in meant:
        return "plain", meant.split()[1:]
    if word.startswith("-"):
        return "", []
    if role in FACTORS:
        told = FACTORS[role].format(word) or ONLY.get(word, "")
        return ("plain", ["--strength-for", told]) if told else ("", [])
    return ("plain", [word]) if role == "value" else (role, [])


def check_once(args: Sequence[str], parameters: Iterable[Any]) -> None:
    """Raise UsageError for an option that is given twice with a value, as one of the two would not count."""
    before = args[: args.index("--")] if "--" in args else args
    for parameter in parameters:
        if parameter.param_type_name != "option" or parameter.multiple or parameter.is_flag:
            continue
        given = [arg for arg in before if arg.startswith("-") and arg.partition("=")[0] in parameter.opts]
        if len(given) > 1:
            raise UsageError(f"{max(parameter.opts, key=len)} is given {len(given)} times", " ".join(args)[:200],
                             "give it once")  # fmt: skip


def check_command(word: str, commands: Collection[str]) -> None:
    """Raise UsageError for a first word that is neither a command nor a file."""
    if exists(word) or not (word in COMMANDS or re.fullmatch(r"[A-Za-z][A-Za-z-]*", word)):
        return
    if completed(word) != word:
        return
    near = get_close_matches(word, commands, 1, 0.7) or [COMMANDS[w] for w in (word,) if w in COMMANDS]
    stems = {path.stem: path.name for path in Path().glob("*") if path.is_dir() or path.suffix in ENDINGS}
    files = [stems[stem] for stem in get_close_matches(word, stems, 1, 0.7)]
    fix = f"name a base, or one of the commands: {', '.join(commands)}"
    if near or files:
        fix = "did you mean " + " or ".join([*(f"lora-merge {one} …" for one in near), *files]) + "?"
    raise UsageError("there is neither such a command nor such a file", word, fix)


def is_address(text: str) -> bool:
    """Return whether a text is an address of another machine, and not the path of a file here."""
    return ADDRESS.match(text) is not None and not exists(text)


_SITES: Final = (
    (r"https?://civitai\.com/models/.*[?&]modelVersionId=([0-9]+).*", "curl -L -O -J {}/{}"),
    (r"https?://civitai\.com/models/.*", "open the page in a browser"),
    (r"civitai:/*(?:models/)?([0-9]+).*", "curl -L -O -J {}/{}"),
    (r"(s3://.+)", "aws s3 cp {} ."),
    (
        r"https?://(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)/(?:resolve|blob|raw)/[^/]+/([^?#\s]+).*",
        "hf download {} {}",
    ),
    (r"https?://(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+).*", "hf download {}"),
    (r"hf:/+(?:models/)?([\w.-]+/[\w.-]+)/([^@\s]+)", "hf download {} {}"),
    (r"hf:/+(?:models/)?([\w.-]+/[\w.-]+).*", "hf download {}"),
)
"""Pattern of an address → the command that downloads it."""


def _download(address: str) -> str:
    """Return how to download a file from its address."""
    for pattern, command in _SITES:
        if found := re.fullmatch(pattern, address, re.IGNORECASE):
            groups = [typed([group]) for group in found.groups()]
            return command.format(
                *(("https://civitai.com/api/download/models", *groups) if "curl" in command else groups)
            )
    if address.lower().startswith("http"):
        return f"curl -L -O -J {typed([address[:200]])}"
    return "in a browser; from the Hub: hf download OWNER/NAME"


ENDINGS: Final = (".safetensors", ".gguf", ".ckpt", ".pt", ".pth", ".bin")
"""Endings that are tried where a name has none."""


def completed(path: str) -> str:
    """Return the path, with the ending of the file that is there if it lacks one; UsageError for an address."""
    if is_address(path):
        raise UsageError("an address, and not a file", path[:200], f"download it first: {_download(path)}")
    if _HUB.fullmatch(path) and not exists(path) and not exists(path.partition("/")[0]):
        fix = f"if it is a name on the Hub, download it first: hf download {path}; else check the path"
        raise UsageError("neither a file nor a folder", path[:200], fix)
    _check_drive(path)
    there = [] if exists(path) else [f"{path}{ending}" for ending in ENDINGS if exists(f"{path}{ending}")]
    return there[0] if there else path


def _check_drive(path: str) -> None:
    """Raise UsageError for a path of Windows on another system, where it would be one odd name."""
    if not WINDOWS and (drive := _WINDOWS.fullmatch(path)) and not exists(path):
        here = f"/mnt/{drive['drive'].lower()}{drive['rest']}".replace("\\", "/")
        raise UsageError("a path of Windows, on another system", path[:200], f"under WSL it is {here[:200]}")


def with_ending(output: str | None, *, file: bool, like: str = "") -> str | None:
    """Return the output's name; where a `file` is written, with the ending that programs look for.

    `like`: the base; where it is a GGUF file, its ending is the output's too. UsageError for "-", the output of other
    programs: a file is written under a name.
    """
    from ..disk.destination import with_ending as ended

    if output == "-":
        raise UsageError("the output is a file, not a stream", "-o -", "name it: -o merged.safetensors")
    _check_drive(output or "")
    ending = ".gguf" if like.lower().endswith(".gguf") else ".safetensors"
    return output if output is None or not file else ended(output, ending)


def right_form(text: str) -> str:
    """Return "0.8" for "0.8", "0,8", "80%", "4/5" and "=0.8"; "" for what is no number."""
    match = _NUMBER.fullmatch(text)
    return value_of(match.groupdict()) if match else ""


def value_of(found: Mapping[str, str | None]) -> str:
    """Return a number as it is written here: a point for a comma, a part of 1 for percents and fractions."""
    try:
        number = float(str(found["value"]).replace(",", "."))
        if found.get("percent"):
            number /= 100
        if found.get("below"):
            number /= float(str(found["below"]))
    except (ValueError, ZeroDivisionError):
        return "0.8"
    return f"{number:g}"

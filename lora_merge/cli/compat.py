"""Options, numbers, paths and commands as other programs spell them, each refused with the right form."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from ..adapter_arguments import right_form
from ..addresses import parse
from ..command import MERGE, Command
from ..errors import UsageError
from ..paths import WINDOWS, exists, expand, split_strength, typed, with_found_ending
from ..recipes.commands import COMMANDS
from .corrected_line import flags, line

PROGRAM_OPTIONS: Final = MappingProxyType(
    {"-h": "--help", "-V": "--version", "version": "--version", "/?": "--help", "/help": "--help"}
)
"""Words for the options of the program itself → the option."""

FOREIGN_COMMANDS: Final = {
    **dict.fromkeys(("info", "show", "view", "check", "ls", "list", "metadata", "show_metadata"), "inspect"),
    **dict.fromkeys(("difference", "cmp"), "compare"),
    **dict.fromkeys(("run", "apply", "bake", "fuse", "add", "join", "merge_lora", "merge_and_unload"), "merge"),
    **dict.fromkeys(("svd", "subtract", "extract_lora_from_models"), "extract"),
    **dict.fromkeys(("shrink", "rank", "prune", "resize_lora"), "resize"),
    "svd_merge_lora": "combine",
    **dict.fromkeys(("blocks", "layers", "components"), "parts"),
    **dict.fromkeys(("validate", "prove", "test"), "verify"),
}
"""Command of another program → the one that does this here."""

SHORT_COMMANDS: Final = MappingProxyType({"diff": "extract --algorithm full"})
"""Word → the words that it is short for."""

_WINDOWS: Final = r"(?P<drive>[A-Za-z]):(?P<rest>[\\/].*)"


def check_dashes(args: Sequence[str], known: Collection[str]) -> None:
    """Raise UsageError for an option with a long dash, as texts and web pages have it, or with too few hyphens."""
    for word in args:
        name = re.sub("^[–—−]+(?=[A-Za-z])", "-", word).partition("=")[0]
        right = name if name in known else f"-{name}"
        if name[0:1] == "-" and right in known and right != word.partition("=")[0] and not exists(word):
            raise UsageError("an option begins with hyphens", word, f"write {right}")
        if re.match("-[A-Za-z]=.", word) and word[:2] in known and not exists(word):
            raise UsageError(
                "a short option needs a space before its value",
                word,
                f"write {word[:2]} {right_form(word[3:]) or word[3:]}",
            )


def check_spaces(args: Sequence[str]) -> None:
    """Raise UsageError for words that together are the name of one file, which belongs in quotes."""
    for at, word in enumerate(args):
        if word.startswith("-") or exists(with_found_ending(word)):
            continue
        before = args[at - 1] if at and word.startswith(":") else ""
        if split_strength(before + word)[1] is not None and exists(with_found_ending(before)):
            raise UsageError("a space before a strength", f"{before} {word}"[:200], f"write {typed([before + word])}")
        for end in range(at + 2, min(at + 8, len(args)) + 1):
            whole = " ".join(args[at:end])
            if exists(with_found_ending(split_strength(whole)[0])):
                raise UsageError("a name with spaces needs quotes", whole[:200], f"write {typed([whole])}")


def check_once(args: Sequence[str], parameters: Iterable[Any]) -> None:
    """Raise UsageError for an option that is given twice with a value, as one of the two would not count."""
    before = args[: args.index("--")] if "--" in args else args
    for parameter in parameters:
        if parameter.param_type_name != "option" or parameter.multiple or parameter.is_flag:
            continue
        typed = [arg for arg in before if arg.startswith("-") and arg.partition("=")[0] in parameter.opts]
        if len(typed) > 1:
            raise UsageError(f"{max(parameter.opts, key=len)} is given {len(typed)} times", " ".join(args)[:200],
                             "give it once")  # fmt: skip


def check_command(word: str, commands: Mapping[str, str]) -> None:
    """Raise UsageError for a first word that is neither a command nor a file. `commands`: name → what it does."""
    if word.endswith((".yaml", ".yml", ".csv")) and exists(word):
        raise UsageError("this is a jobs file, not a base", word[:200], f"write {typed(['lora-merge', 'batch', word])}")
    if exists(word) or not (word in FOREIGN_COMMANDS or re.fullmatch(r"[A-Za-z][A-Za-z-]*", word)):
        return
    if completed(word) != word:
        return
    near = get_close_matches(word, commands, 1, 0.7) or [FOREIGN_COMMANDS[w] for w in (word,) if w in FOREIGN_COMMANDS]
    near = near or [name for name in commands if len(word) > 2 and name.startswith(word)]
    from ..planning.fitting_files import missing_input

    files = [Path(path).name for path in missing_input(expand(word), adapter=False).suggestion[1:]]
    fix = f"name a base, or one of the commands: {', '.join(commands)}"
    if near or files:
        suggestions = [f"lora-merge {command} … ({_first_letter_small(commands[command])})" for command in near]
        fix = "did you mean " + " or ".join([*suggestions, *files]) + "?"
    error = UsageError("there is neither such a command nor such a file", word, fix)
    raise error if near else error.instead(word, *files)


def _first_letter_small(text: str) -> str:
    return f"{text[:1].lower()}{text[1:]}".rstrip(".")


def completed(path: str) -> str:
    """Return the path, with the ending of the file that is there if it lacks one; for an address the path of what it
    leads to."""
    if parse(path) is not None:
        from ..sources.inputs import locate

        return str(locate(path))
    _check_drive(path)
    return with_found_ending(path)


def _check_drive(path: str) -> None:
    """Raise UsageError for a path of Windows on another system, where it would be one odd name."""
    if not WINDOWS and (drive := re.fullmatch(_WINDOWS, path)) and not exists(path):
        here = f"/mnt/{drive['drive'].lower()}{drive['rest']}".replace("\\", "/")
        raise UsageError("a Windows path on another system", path[:200], f"under WSL it is {here[:200]}")


def checked_output(output: str | None) -> str | None:
    """Return the output; UsageError for "-", the output of other programs."""
    if output == "-":
        raise UsageError("the output is a file, not a stream", "-o -", "name it: `-o merged.safetensors`")
    _check_drive(output or "")
    return output


_BASE: Final = "the base is the first word"
ADAPTER_ORDER: Final = "adapters follow the base: `lora-merge BASE ADAPTER:0.8 ADAPTER2:0.5`"
_STRENGTH: Final = "write the strength after the file name: ADAPTER:0.8; or give `-s 0.8` for each adapter"
_OUTPUT: Final = "use `-o FILE`"
_DTYPE: Final = "use `--dtype fp16`, bf16 or fp32"
_PART: Final = "use --strength-for, such as `--strength-for te=0`; `lora-merge parts BASE` lists the parts"
_NEEDLESS: Final = "leave it out: it is not needed here"
_IDLE: Final = "leave it out: sums are exact, shards are those of the base, --device names the device"
_RANK: Final = "use `--rank N`, or a rule such as `--rank energy:0.9`"
_RULE: Final = "use a rule such as `--rank fro:0.9`"
_SHARE: Final = "use --rank with the share in its rule, such as `--rank fro:0.9`"
_BEFORE: Final = "the model before the training comes first: `lora-merge extract BASE TUNED`"
_AFTER: Final = "the model after the training comes second: `lora-merge extract BASE TUNED`"
_QUIET: Final = "use `-q`"
_SAME_RANK: Final = "the rank is that of the adapter; another one: `lora-merge resize ADAPTER --rank 16`"
_LBW: Final = "use `--strength-for lbw=1,0,0,…` with a number for each block; `lora-merge parts BASE` lists them"

FOREIGN_FACTORS: Final = {
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
    "--is-sdxl", "--flux", "--use-safetensors",
)  # fmt: skip
"""Options of other programs that have no value and nothing to do here."""

FOREIGN_OPTIONS: Final[Mapping[str, str]] = MappingProxyType(
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
            ADAPTER_ORDER,
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
        **dict.fromkeys(("--lora-weight", "--lora-weights", "--lora-strength"), _STRENGTH),
        **dict.fromkeys(("--precision", "--save-precision", "--save-dtype", "--type"), _DTYPE),
        **dict.fromkeys(("--out-dtype", "--outtype", "--out-type", "--output-dtype", "--torch-dtype"), _DTYPE),
        **dict.fromkeys(("--rank", "--new-rank", "--dim", "-r"), _RANK),
        **dict.fromkeys(("--lora-rank", "--lora-r", "--lora-dim", "--network-dim", "--network-rank"), _RANK),
        **dict.fromkeys(
            ("--lora-alpha", "--network-alpha"), "use `--setting lora_alpha=16`, the alpha of the training"
        ),
        "--dynamic-method": _RULE,
        "--dynamic-param": _SHARE,
        "--model-org": _BEFORE,
        "--model-tuned": _AFTER,
        **dict.fromkeys(("--fp16", "--float16", "--half"), "use `--dtype fp16`"),
        "--fp8": "use `--dtype fp8_scaled`",
        **dict.fromkeys(("--bf16", "--bfloat16"), "use `--dtype bf16`"),
        **dict.fromkeys(("--fp32", "--float32"), "use `--dtype fp32`"),
        **{"--load-in-4bit": "use `--dtype nf4`", "--load-in-8bit": "use `--dtype int8`"},
        "--push-to-hub": "leave it out, and then: hf upload OWNER/NAME FOLDER",
        **dict.fromkeys(("--max-shard-size", "--out-shard-size", "--device-map"), _IDLE),
        **dict.fromkeys(NEEDLESS, _NEEDLESS),
        **dict.fromkeys(("--silent", "--no-progress"), _QUIET),
        **dict.fromkeys(("--skip-verify", "--no-check", "--no-verification"), "use `--no-verify`"),
        **dict.fromkeys(("--threads", "--num-threads"), "leave it out: all cores are used"),
        "--no-overwrite": "leave it out: nothing is overwritten without --overwrite",
        "--no-te": "use `--strength-for te=0`",
        "--combination-type": "use --method, such as `--method ties`",
        "--config": "several merges go into a jobs file: `lora-merge batch JOBS.yaml`",
        **dict.fromkeys(("--parallel", "--jobs", "-j"), "use `--workers N`"),
        **{"--cuda": "use `--device cuda`", "--gpu": "use `--device cuda`", "--cpu": "use `--device cpu`"},
        **dict.fromkeys(("--force", "-f", "-y", "--yes"), "use `--overwrite`"),
        **dict.fromkeys(("-n", "--plan", "--simulate"), "use `--dry-run`"),
        **{name: _LBW if text.startswith("lbw") else _PART for name, text in FOREIGN_FACTORS.items()},
    }
)
"""Option of another program → what to write instead. sd-scripts, mergekit, diffusers' scripts, cp."""

_OTHERWISE: Final = dict.fromkeys((_RANK, _RULE, _SHARE), _SAME_RANK)
"""Advice → the advice for commands without the options in it."""

_FLAG: Final = r"(?<![\w-])--?[a-z][a-z-]*"

_ROLES: Final = {
    _BASE: "base", _BEFORE: "base", _AFTER: "tuned", ADAPTER_ORDER: "adapters", _STRENGTH: "strengths",
    _OUTPUT: "output", _DTYPE: "dtype", _RANK: "rank", _RULE: "rule", _SHARE: "share",
}  # fmt: skip
"""Advice on an option with values → what its values are."""

MERGE_ONLY: Final = ("-s", "--strength")
"""Options of ours that `average` and `extract` lack."""

_SEVERAL: Final = ("adapters", "strengths")
"""Roles of options that have several words behind them."""

FOREIGN_RULES: Final = {"sv_ratio": "ratio", "sv_fro": "fro", "sv_cumulative": "sum"}
"""Rule for ranks of sd-scripts' networks/resize_lora.py → the rule here."""


def check_options(command: str, args: Sequence[str], parameters: Iterable[Any]) -> None:
    """Raise UsageError for an option that only other programs have. `parameters`: those of the command."""
    parameters = [*parameters]
    known = flags(parameters)
    check_dashes(args, known)
    for flag, part, value in zip(args, args[1:], args[2:], strict=False):
        if flag == "--strength-for" and "=" not in part and right_form(value) and not exists(value):
            raise UsageError("a part and its factor are one word", f"`{flag} {part} {value}`",
                             f"write `{flag} {part}={right_form(value)}`")  # fmt: skip
    typed, args = args, [_hyphened(arg) for arg in args]
    names = {arg.partition("=")[0]: word.partition("=")[0] for arg, word in zip(args, typed, strict=True)}
    row = COMMANDS.get(command)
    foreign = {*FOREIGN_OPTIONS, *(MERGE_ONLY if row else ())}
    unknown = [name for name in names if name in foreign and not {name, f"{name}s"} & known.keys()]
    if unknown:
        right = translated(args, row, parameters) if row else ""
        advice = {name: text for name in unknown if (text := advice_on(name, known))}
        usage = _usage(command, parameters)
        advices = [usage if text in (_BASE, ADAPTER_ORDER, _BEFORE, _AFTER) else text for text in advice.values()]
        fix = f"write {right}" if right else "; ".join(dict.fromkeys(advices)) or f"see `lora-merge help {command}`"
        words = " nor ".join(names[name] for name in unknown)
        raise UsageError(f"there is no option {words} here", " ".join(typed)[:200], fix)


def advice_on(name: str, known: Iterable[str]) -> str:
    """Return the advice on an option of another program to a command with these options; "" without one that fits."""
    usual = FOREIGN_OPTIONS.get(name, _STRENGTH)
    return next((text for text in (usual, _OTHERWISE.get(usual, "")) if text and advice_fits(text, known)), "")


def advice_fits(advice: str, known: Iterable[str]) -> bool:
    """Return whether a command has the options that an advice names, but for those of a whole command in it."""
    return {*known} >= {*re.findall(_FLAG, advice.partition("`lora-merge ")[0])}


def _usage(command: str, parameters: Iterable[Any]) -> str:
    """Return the advice where the files of a command belong."""
    if command == MERGE:
        return f"{_BASE}; {ADAPTER_ORDER}"
    files = [p.metavar or p.name.upper() for p in parameters if p.param_type_name == "argument"]
    return f"files go after the command: `lora-merge {' '.join((command, *files))}`"


def _hyphened(arg: str) -> str:
    """Return an argument with hyphens in the name of its option, as options here have them."""
    name = arg.partition("=")[0]
    return arg.replace(name, name.replace("_", "-"), 1) if name.startswith("--") else arg


def translated(args: Sequence[str], command: Command, parameters: Sequence[Any]) -> str:
    """Return a command in the words of another program as it is typed here; "" where that is not certain."""
    known = flags(parameters)
    by_role, rest = _by_role(args, known)
    files, strengths = _files(by_role), [right_form(text) for text in by_role["strengths"]]
    required = sum(p.param_type_name == "argument" and p.required for p in parameters)
    if len(files) < required + command.merges or not all(files) or not all(strengths):
        return ""
    if command.inputs == "checkpoints" and by_role["adapters"]:  # it takes two models
        return ""
    if command.merges and len({*files}) < len(files):  # a base is not its own adapter
        return ""
    options, weighted = _options(by_role), "weights" in command.options
    first = int("base" in command.needs) if "strength" in command.options else 0 if weighted else len(files)
    if strengths and len(strengths) != len(files) - first:
        return ""
    if strengths and weighted:
        options["--weights"] = ",".join(strengths)
    elif strengths:
        files[first:] = [f"{path}:{value}" for path, value in zip(files[first:], strengths, strict=True)]
    if "?" in options.get("--rank", "") or not options.keys() <= known.keys():
        return ""
    rest += [word for option in options.items() for word in option]
    return line([*filter(None, [command.typed]), *files, *rest])


def _by_role(args: Sequence[str], known: Mapping[str, bool]) -> tuple[dict[str, list[str]], list[str]]:
    """Return role → the values of that role, and the options that stay; no value at all if a word has no role.

    `known`: option of the command → whether it has no value.
    """
    by_role: dict[str, list[str]] = {role: [] for role in ("plain", *_ROLES.values())}
    rest, role = list[str](), "plain"
    for word in (part for arg in args for part in ((arg.split("=", 1)) if arg.startswith("--") else (arg,))):
        before, role, replacement = role, *_read(word, role, known)
        if not role:
            return {role: [] for role in by_role}, []
        rest += replacement
        if not replacement and before == role and not word.startswith("-"):
            role = "plain" if role == "strengths" and exists(with_found_ending(word)) else role
            by_role[role].append(word)
            role = role if role in _SEVERAL else "plain"
    return by_role, rest


def _files(by_role: Mapping[str, list[str]]) -> list[str]:
    """Return the files in the order of our commands: the base, or the model before the training, is the first."""
    first, *plain = [*by_role["base"], *by_role["plain"]] or [""]
    return [*filter(None, [first]), *by_role["tuned"], *by_role["adapters"], *plain]


def _options(by_role: Mapping[str, list[str]]) -> dict[str, str]:
    """Return option → value, for the values that are options here. A rule for ranks without its name has none."""
    named = {"-o": "output", "--dtype": "dtype", "--rank": "rank"}
    options = {flag: by_role[role][-1] for flag, role in named.items() if by_role[role]}
    if by_role["rule"] or by_role["share"]:
        rule, share = FOREIGN_RULES.get("".join(by_role["rule"]), "?"), "".join(by_role["share"])
        options |= {"--rank": f"{rule}:{share}", **({"--max-rank": options["--rank"]} if "--rank" in options else {})}
    return options


def _read(word: str, role: str, known: Mapping[str, bool]) -> tuple[str, list[str]]:
    """Return the role of the word after this one, and the words of our command line in its place.

    The role is "" if `word` is an option of no known program.
    """
    meant = _STRENGTH if word in MERGE_ONLY else FOREIGN_OPTIONS.get(word, "")
    if word in known:
        return "plain" if known[word] else "value", [word]
    if meant in _ROLES or word in FOREIGN_FACTORS:
        return _ROLES.get(meant, word), []
    alone = re.fullmatch("use `(.*)`", meant)
    if word in NEEDLESS or (alone and advice_fits(meant, known)):
        return "plain", alone[1].split() if alone else []
    if word.startswith("-"):
        return "", []
    if role in FOREIGN_FACTORS:
        option = FOREIGN_FACTORS[role].format(word) or ONLY.get(word, "")
        return ("plain", ["--strength-for", option]) if option else ("", [])
    return ("plain", [word]) if role == "value" else (role, [])

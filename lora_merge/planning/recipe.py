"""The recipe in an output's metadata. `recipes/read_recipe.py` and `recipes/find_inputs.py` read it again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ..adapters.network_settings import side_file
from ..disk.files import open_regular, sha256
from ..files.checkpoint import Index, configuration
from ..files.safetensors import LEGACY_HASH, SEAL, ZERO_HASH
from ..files.side_files import output_name
from ..job import Job
from ..options import OPTIONS, TOKENIZERS, OptionKind
from ..paths import input_name
from ..sources.inputs import origin
from ..text import by_component, from_json

if TYPE_CHECKING:
    from ..matching.patch import Match

KEY: Final = "lora_merge.recipe"
FORMAT: Final = 2
"""The format of recipes. From 2 on, the header also holds a digest of itself (files/safetensors.py)."""

MODELS: Final = "sd_merge_models"
OURS: Final = (KEY, SEAL, "modelspec.merged_from", "sd_merge_recipe", MODELS)
"""Metadata entries that a merge writes."""

CHECKSUMS: Final = "lora_merge.crc32"
"""The entry with the sums of changed codes and scales (header_entries.py)."""

LEGACY_DIGITS: Final = 8  # of the hash that older web UIs show

STALE: Final = ("sshs_model_hash", "sshs_legacy_hash", "modelspec.hash_sha256", CHECKSUMS)
"""Metadata entries of the base that are dropped: a hash of the file itself would be wrong in the output."""

RECIPE_VALUES: Final[Mapping[OptionKind, Callable[[Any], Any]]] = MappingProxyType(
    {
        "settings": dict,
        "entries": dict,
        "texts": list,
        "folder": lambda folder: folder if folder in TOKENIZERS else Path(folder).name,
        "path": lambda path: {"name": path.name, "text": path.read_text(encoding="utf-8")},
    }
)
"""Kind of an option → its value in a recipe. The text of a file that a merge reads becomes part of the recipe."""

STRENGTH_ENTRY: Final = "strengths"
"""What a recipe says of an adapter for people: component → strength → modules, as the report does."""

Applied: TypeAlias = Sequence[Mapping[str, Mapping[float, int]]]
"""For each adapter component → strength → modules."""

MOST_CHARACTERS: Final = 2**22  # most characters of a recipe


def blanks(base: Index, adapters: Sequence[Index]) -> list[str]:
    """Return a placeholder for the digest of every input file; the header is planned with these.

    The placeholders are as long as digests and all different. None is a key of the base's own list of merged models,
    where a digest would replace that entry. So the header with the digests is never longer than the planned one.
    """
    taken = (parsed(base.metadata.get(MODELS, "")) or {}).keys()
    free = (text for number in count() if (text := f"{number:064x}") not in taken)
    return list(islice(free, sum(len(index.files) for index in (base, *adapters))))


def entries(
    job: Job, base: Index, matches: Sequence[Match], digests: Sequence[str], *, blank: bool = False
) -> Iterator[dict[str, str]]:
    """Yield our own metadata entries of every output file, in the order of the base's files; none for --no-metadata.

    `digests`: SHA-256 of the base's files and each adapter's. `blank`: whether they are placeholders; nothing is hashed
    then.
    """
    if job.no_metadata:
        yield from ({} for _ in base.files)
        return
    names = _utf8(", ".join(input_name(p) for p in (job.base, *(a.path for a in job.adapters))))
    single = not base.path.is_dir() and base.gguf is None and job.output.suffix.lower() != ".gguf"
    adapters = [match.adapter.index for match in matches]
    others = _web_ui(job, base, adapters, digests, blank=blank) if single else {}
    for of_file in recipes(job, base, adapters, digests, [match.strengths for match in matches]):
        yield {KEY: _json(of_file), SEAL: ZERO_HASH, "modelspec.merged_from": names, **others}


def recipes(
    job: Job, base: Index, adapters: Sequence[Index], digests: Sequence[str], strengths: Applied = ()
) -> Iterator[dict[str, Any]]:
    """Yield the recipe of every output file: the first has all of it, every other shard the part about itself.

    If every shard named all files of the base, the text would grow with the square of their number: 150 MB in 1000
    shards.
    """
    whole = recipe(job, base, adapters, digests, strengths)
    yield whole
    common = {key: value for key, value in whole.items() if key != "map"}
    of_base = {key: value for key, value in whole["base"].items() if key != "recipe"}
    whole_in = output_name(base.files[0], base) if base.path.is_dir() else ""
    for file in whole["base"]["files"][1:]:
        yield {**common, "base": {**of_base, "files": [file]}, "whole_in": whole_in}


def recipe(
    job: Job, base: Index, adapters: Sequence[Index], digests: Sequence[str], strengths: Applied = ()
) -> dict[str, Any]:
    """Return the whole recipe: names, sizes, hashes, strengths, and every option that changes a byte."""
    from ..version import __version__

    # The inputs: names, sizes and digests, in the order of the digests.
    left = iter(digests)
    entries_of_recipe: dict[str, Any] = {
        "version": __version__,
        "format": FORMAT,
        "base": {**_input(job.base, base, left), **configurations(job.base, None)},
        "adapters": [
            {
                **_input(ref.path, index, left),
                **configurations(ref.path, index),
                "strength": ref.strength,
                "parts": [list(p) for p in ref.parts],
            }
            for ref, index in zip(job.adapters, adapters, strict=True)
        ],
    }
    for adapter, applied in zip(entries_of_recipe["adapters"], strengths, strict=False):
        adapter[STRENGTH_ENTRY] = by_component(applied)
    # The recipe of the base, if it is itself a merge.
    earlier = parsed(base.metadata.get(KEY, ""))
    if earlier is not None:
        entries_of_recipe["base"]["recipe"] = earlier
    # Options that change a byte.
    for option in OPTIONS.values():
        value = getattr(job, option.name, option.default)
        if option.recorded == "always" or (option.recorded == "given" and value != option.default):
            entries_of_recipe[option.name] = RECIPE_VALUES.get(option.kind, lambda value: value)(value)
    return entries_of_recipe


def _input(path: Path, index: Index, digests: Iterator[str]) -> dict[str, Any]:
    folder = index.path.is_dir()
    entry: dict[str, Any] = {"name": input_name(path), "files": [
        {"name": f.relative_to(index.path).as_posix() if folder else f.name, "size": index.headers[f].state.size,
         "sha256": next(digests)}
        for f in index.files
    ]}  # fmt: skip
    if folder:
        entry["folder"] = True
    if (address := origin(path)) is not None:
        entry["source"] = str(address)
    return entry


def configurations(path: Path, adapter: Index | None) -> dict[str, str]:
    """Return the entries of an input with the SHA-256 of its configuration, and of the file that states an adapter's
    scale."""
    digests = {"config": config_hash(path), "stated": sha256(file) if adapter and (file := side_file(adapter)) else ""}
    return {name: digest for name, digest in digests.items() if digest}


def config_hash(path: Path) -> str:
    """Return the SHA-256 of the configuration that belongs to an input; "" without a configuration."""
    file = configuration(path)
    return sha256(file) if file else ""


def _web_ui(job: Job, base: Index, adapters: Sequence[Index], digests: Sequence[str], *, blank: bool) -> dict[str, str]:
    """Return the entries that AUTOMATIC1111's web UI and its relatives write for a merged checkpoint and show in it."""
    files = [(base.files[0], job.base.name, digests[0])]
    number = len(base.files)
    for ref, index in zip(job.adapters, adapters, strict=True):
        files.append((index.files[0], ref.path.name, digests[number]))
        number += len(index.files)
    shown = {
        "type": "lora-merge", "primary_model_hash": digests[0], "secondary_model_hash": None,
        "tertiary_model_hash": None, "interp_method": "LoRA", "multiplier": job.adapters[0].strength,
        "save_as_half": job.dtype == "fp16", "custom_name": None, "config_source": None, "bake_in_vae": None,
        "discard_weights": "", "is_inpainting": False, "is_instruct_pix2pix": False,
        "loras": [
            {"name": name, "hash": digest, "strength": ref.strength}
            for ref, (_, name, digest) in zip(job.adapters, files[1:], strict=True)
        ],
    }  # fmt: skip
    models = parsed(base.metadata.get(MODELS, "")) or {}
    earlier = parsed(base.metadata.get("sd_merge_recipe", ""))
    for n, (file, name, digest) in enumerate(files):
        legacy = digest[:LEGACY_DIGITS] if blank else _legacy(file)
        models[digest] = {"name": name, "legacy_hash": legacy, "sd_merge_recipe": None if n else earlier}
    return {"sd_merge_recipe": _json(shown), MODELS: _json(models)}


def _legacy(file: Path) -> str:
    import hashlib

    with open_regular(file) as f:
        f.seek(LEGACY_HASH[0])
        return hashlib.sha256(f.read(LEGACY_HASH[1])).hexdigest()[:LEGACY_DIGITS]


def _json(value: Any) -> str:
    return _utf8(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def _utf8(text: str) -> str:
    """Return the text with ? for unpaired surrogates, which file names may hold. Inputs are found by content."""
    return text.encode("utf-8", "replace").decode()


def parsed(text: str) -> dict[str, Any] | None:
    """Return the JSON object in a metadata entry; None for anything else."""
    if not text.startswith("{") or len(text) > MOST_CHARACTERS:
        return None
    try:
        value = from_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None

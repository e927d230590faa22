"""The training of an adapter by its metadata. Anybody may have written it, so nothing in it is trusted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from ..files.checkpoint import Index
from ..limits import from_json
from ..options import is_finite

FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "title": ("modelspec.title", "ss_output_name", "name"),
    "author": ("modelspec.author",),
    "license": ("modelspec.license",),
    "description": ("modelspec.description",),
    "usage_hint": ("modelspec.usage_hint",),
    "date": ("modelspec.date", "ss_training_finished_at", "ss_training_started_at"),
    "base_model": ("modelspec.base_model", "ss_sd_model_name", "ss_base_model_version", "modelspec.architecture"),
    "base_version": ("ss_base_model_version",),
    "architecture": ("modelspec.architecture",),
    "network_module": ("ss_network_module",),
    "network_args": ("ss_network_args",),
    "resolution": ("ss_resolution", "modelspec.resolution"),
    "steps": ("ss_steps", "ss_max_train_steps"),
    "epochs": ("ss_epoch", "ss_num_epochs"),
    "images": ("ss_num_train_images",),
    "batch_size": ("ss_total_batch_size", "ss_batch_size_per_device"),
    "learning_rate": ("ss_learning_rate",),
    "unet_lr": ("ss_unet_lr",),
    "text_encoder_lr": ("ss_text_encoder_lr",),
    "scheduler": ("ss_lr_scheduler",),
    "optimizer": ("ss_optimizer",),
    "clip_skip": ("ss_clip_skip",),
    "noise_offset": ("ss_noise_offset",),
    "seed": ("ss_seed",),
    "prediction_type": ("modelspec.prediction_type",),
    "comment": ("ss_training_comment",),
}
"""Fact → metadata entries that may hold it; the first of them that exists counts. sd-scripts and musubi-tuner write
`ss_*` (library/train_util.py), and all newer trainers https://github.com/Stability-AI/ModelSpec."""

NOTHING: Final = ("", "None", "null", "{}", "[]")

THUMBNAIL: Final = "modelspec.thumbnail"
PICTURES: Final = (".preview.png", ".preview.jpg", ".preview.jpeg", ".preview.webp", ".png", ".jpg", ".jpeg", ".webp")


def training(index: Index) -> dict[str, Any]:
    """Return what the metadata tells of the training; only what is there."""
    found: dict[str, Any] = {}
    for name, entries in FIELDS.items():
        text = next((index.metadata[e] for e in entries if index.metadata.get(e, "") not in NOTHING), None)
        if text is not None:
            found[name] = text
    if named := index.config.get("base_model_name_or_path"):
        found["base_model"] = str(named)
    triggers = [*_triggers(index)]
    tags, folders = tag_counts(index), [*_folders(index)]
    return (
        found
        | ({"trigger_words": triggers} if triggers else {})
        | ({"tags": dict(tags.most_common())} if tags else {})
        | ({"datasets": folders} if folders else {})
        | ({"preview": picture} if (picture := preview(index)) else {})
    )


def entry(index: Index, key: str) -> Any:
    """Return the value of an entry that holds JSON; None without such an entry, or for text that is not JSON."""
    try:
        return from_json(index.metadata.get(key, "null"))
    except ValueError:
        return None


def tag_counts(index: Index) -> Counter[str]:
    """Return how often each tag stands in the captions, over all folders of the data set."""
    counts: Counter[str] = Counter()
    tables = entry(index, "ss_tag_frequency")
    for table in tables.values() if isinstance(tables, Mapping) else ():
        for tag, count in table.items() if isinstance(table, Mapping) else ():
            if is_finite(count) and abs(count) < 2**53:
                counts[str(tag).strip()] += int(count)
    return counts


def _triggers(index: Index) -> Iterator[str]:
    """Yield the trigger words that the metadata states: of the specification, ai-toolkit and others."""
    seen = set()
    for key in ("modelspec.trigger_phrase", "ss_trigger_words", "trigger_word", "trigger_words", "trigger_phrase"):
        text = index.metadata.get(key, "")
        if text not in NOTHING and text not in seen:
            seen.add(text)
            yield text


def _folders(index: Index) -> Iterator[dict[str, Any]]:
    """Yield the folders of the data set with their repeats and numbers of images."""
    tables = entry(index, "ss_dataset_dirs")
    for name, row in tables.items() if isinstance(tables, Mapping) else ():
        if isinstance(row, Mapping):
            yield {"name": str(name), "repeats": row.get("n_repeats"), "images": row.get("img_count")}
    sets = entry(index, "ss_datasets")
    for one in sets if isinstance(sets, list) else ():
        subsets = one.get("subsets") if isinstance(one, Mapping) else None
        for row in subsets if isinstance(subsets, list) else ():
            if isinstance(row, Mapping):
                yield {"name": str(row.get("image_dir", "")), "repeats": row.get("num_repeats"),
                       "images": row.get("img_count")}  # fmt: skip


def preview(index: Index) -> dict[str, Any]:
    """Return where a picture of the adapter is: in the metadata, or in a file beside it; empty without one."""
    text = index.metadata.get(THUMBNAIL, "")
    if text.startswith("data:"):
        return {"in": THUMBNAIL, "type": text[5:].partition(";")[0][:40], "characters": len(text)}
    path = index.files[0] if len(index.files) == 1 else index.path
    names: list[Path] = [path.with_name(path.stem + ending) for ending in PICTURES]
    return next(({"in": str(p)} for p in names if p.is_file()), {})

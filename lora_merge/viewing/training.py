"""The training of an adapter by its metadata. Anybody may have written it, so nothing in it is trusted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

from ..adapters.training_metadata import NO_VALUES, entry, tag_counts, trigger_words
from ..files.checkpoint import Index
from ..text import is_finite, plural

FACT_ENTRIES: Final[Mapping[str, tuple[str, ...]]] = {
    "title": ("modelspec.title", "ss_output_name", "name"),
    "author": ("modelspec.author",),
    "license": ("modelspec.license",),
    "description": ("modelspec.description",),
    "usage_hint": ("modelspec.usage_hint",),
    "keywords": ("modelspec.tags",),
    "date": ("modelspec.date", "ss_training_finished_at", "ss_training_started_at"),
    "base_model": (
        "modelspec.base_model",
        "ss_sd_model_name",
        "ss_base_model",
        "ot_config:base_model_name",
        "ss_base_model_version",
    ),
    "base_version": ("ss_base_model_version",),
    "base_hash": ("ss_new_sd_model_hash", "ss_sd_model_hash"),
    "architecture": ("modelspec.architecture", "ot_config:model_type"),
    "merged_from": ("modelspec.merged_from",),
    "network_module": ("ss_network_module", "ot_config:peft_type"),
    "network_args": ("ss_network_args",),
    "network_dropout": ("ss_network_dropout", "ot_config:dropout_probability"),
    "layers": ("ot_config:layer_filter",),
    "steps": ("ss_steps", "training_info:step", "ss_max_train_steps"),
    "epochs": ("ss_epoch", "training_info:epoch", "ss_num_epochs", "ot_config:epochs"),
    "images_with_repeats": ("ss_num_train_images", "ss_num_train_items"),
    "batch_size": ("ss_total_batch_size", "ss_batch_size_per_device", "ot_config:batch_size"),
    "accumulation_steps": ("ss_gradient_accumulation_steps", "ot_config:gradient_accumulation_steps"),
    "learning_rate": ("ss_learning_rate", "ot_config:learning_rate"),
    "unet_lr": ("ss_unet_lr", "ot_config:unet.learning_rate"),
    "transformer_lr": ("ot_config:transformer.learning_rate",),
    "prior_lr": ("ot_config:prior.learning_rate",),
    "text_encoder_lr": ("ss_text_encoder_lr", "ot_config:text_encoder.learning_rate"),
    "text_encoder2_lr": ("ot_config:text_encoder_2.learning_rate",),
    "scheduler": ("ss_lr_scheduler", "ot_config:learning_rate_scheduler"),
    "warmup_steps": ("ss_lr_warmup_steps", "ot_config:learning_rate_warmup_steps"),
    "optimizer": ("ss_optimizer", "ot_config:optimizer.optimizer"),
    "mixed_precision": ("ss_mixed_precision", "ot_config:train_dtype"),
    "clip_skip": ("ss_clip_skip",),
    "noise_offset": ("ss_noise_offset", "ot_config:offset_noise_weight"),
    "min_snr_gamma": ("ss_min_snr_gamma",),
    "timestep_sampling": ("ss_timestep_sampling", "ot_config:timestep_distribution"),
    "timestep_range": ("modelspec.timestep_range",),
    "flow_shift": ("ss_discrete_flow_shift",),
    "guidance_scale": ("ss_guidance_scale",),
    "seed": ("ss_seed",),
    "prediction_type": ("modelspec.prediction_type",),
    "comment": ("ss_training_comment",),
}
"""Fact → metadata entries that may hold it; the first of them that exists counts. `a:b.c` is b.c in the JSON of
entry a.

sd-scripts (train_network.py) and musubi-tuner (training/trainer_base.py) write `ss_*`; OneTrainer `ot_config`
(modules/util/config/TrainConfig.py); ai-toolkit `training_info` (jobs/process/BaseSDTrainProcess.py); and all newer
trainers https://github.com/Stability-AI/ModelSpec."""

DATA_SET_ENTRIES: Final = ("image_dir", "metadata_file", "image_directory", "video_directory", "image_jsonl_file",
                           "video_jsonl_file", "name", "path")  # fmt: skip
"""Entries that name a data set: of sd-scripts, of musubi-tuner (dataset/image_video_dataset.py), of OneTrainer."""

THUMBNAIL: Final = "modelspec.thumbnail"
PICTURES: Final = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}
"""Ending of a picture next to a file → its type. `x.preview.png` comes before `x.png`."""


def training(index: Index) -> dict[str, Any]:
    """Return the facts of the training in the metadata."""
    facts: dict[str, Any] = {}
    tables = {name: entry(index, name) for name in ("ot_config", "training_info")}
    for name, entries in FACT_ENTRIES.items():
        texts = (_text(index, tables, e) for e in entries)
        text = next((t for t in texts if t not in NO_VALUES), None)
        if text is not None:
            facts[name] = _date(text) if name == "date" else text
    if named := index.config.get("base_model_name_or_path"):
        facts["base_model"] = str(named)
    folders = [*_folders(index)]
    counts = [f["images"] for f in folders]
    batches = dict.fromkeys(
        str(dataset["batch_size_per_device"]) for dataset in _sets(index) if "batch_size_per_device" in dataset
    )
    facts |= {"batch_size": ", ".join(batches)} if batches and "batch_size" not in facts else {}
    lists = {
        "resolution": ", ".join(_resolutions(index, tables, folders)), "buckets": dict(_buckets(index)),
        "trigger_words": [*trigger_words(index)], "tags": dict(tag_counts(index).most_common()), "datasets": folders,
        "preview": preview(index),
        "images": sum(counts) if all(isinstance(n, int) for n in counts) else 0,
    }  # fmt: skip
    return facts | {name: value for name, value in lists.items() if value}


def _text(index: Index, tables: Mapping[str, Any], name: str) -> str:
    """Return an entry as text, also one inside an entry's JSON; "" where it is missing."""
    outer, colon, path = name.partition(":")
    if not colon:
        return index.metadata.get(name, "")
    value = tables[outer]
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return "" if value is None or isinstance(value, (Mapping, list)) else str(value)


def _date(text: str) -> str:
    """Return a date as it is; seconds since 1970, as sd-scripts writes them, become a date and a time in UTC."""
    try:
        return datetime.fromtimestamp(float(text), timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return text


def _sets(index: Index) -> list[Mapping[str, Any]]:
    """Return the data sets of a configuration file, as sd-scripts and musubi-tuner note them."""
    datasets = entry(index, "ss_datasets")
    return [dataset for dataset in datasets if isinstance(dataset, Mapping)] if isinstance(datasets, list) else []


def _resolutions(index: Index, tables: Mapping[str, Any], folders: Sequence[Mapping[str, Any]]) -> Sequence[str]:
    """Return the resolutions of the training; else the one that the model is for."""
    trained = [*dict.fromkeys(f["resolution"] for f in folders if "resolution" in f)]
    texts = (_text(index, tables, name) for name in ("ss_resolution", "ot_config:resolution"))
    text = next((t for t in texts if t not in NO_VALUES), "") or (
        not trained and _text(index, {}, "modelspec.resolution")
    )
    return [_by(text.strip("() ").split(",")) if text.startswith("(") else text] if text else trained


def _by(sides: Any) -> str:
    """Return `832x1216`."""
    return "x".join(str(side).strip() for side in sides) if isinstance(sides, list) else str(sides)


def _buckets(index: Index) -> Iterator[tuple[str, int]]:
    """Yield the resolutions of the buckets, with the number of images in each; of all data sets together."""
    counts: Counter[str] = Counter()
    for table in (entry(index, "ss_bucket_info"), *(dataset.get("bucket_info") for dataset in _sets(index))):
        rows = table.get("buckets") if isinstance(table, Mapping) else None
        for row in rows.values() if isinstance(rows, Mapping) else ():
            if isinstance(row, Mapping) and isinstance(row.get("count"), int) and row["count"] > 0:
                counts[_by(row.get("resolution"))] += row["count"]
    yield from counts.most_common()


def _folders(index: Index) -> Iterator[dict[str, Any]]:
    """Yield the folders of the data sets with their repeats and numbers of images.

    sd-scripts notes the folders of a configuration file twice; the longer list, `ss_datasets`, is read.
    """
    rows = [row for item in _sets(index) for row in _of_set(item)]
    tables = [(entry(index, key), key) for key in ("ss_dataset_dirs", "ss_reg_dataset_dirs")] if not rows else []
    yield from rows
    for table, key in tables:
        for name, row in table.items() if isinstance(table, Mapping) else ():
            if isinstance(row, Mapping):
                more = {"regularisation": True} if "reg" in key else {}
                yield {"name": str(name), "repeats": row.get("n_repeats"), "images": _images(row), **more}
    config = entry(index, "ot_config")
    concepts = config.get("concepts") if isinstance(config, Mapping) else None
    for item in concepts if isinstance(concepts, list) else ():
        if isinstance(item, Mapping) and item.get("enabled", True):
            repeats = item.get("balancing") if item.get("balancing_strategy", "REPEATS") == "REPEATS" else None
            yield {"name": _name(item), "repeats": repeats, "images": None}


def _of_set(dataset: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the folders of one data set: its subsets, or itself."""
    subsets = dataset.get("subsets")
    of_set = {"resolution": _by(dataset["resolution"])} if dataset.get("resolution") else {}
    for row in subsets if isinstance(subsets, list) else (dataset,):
        if isinstance(row, Mapping):
            facts = {"name": _name(row), "repeats": row.get("num_repeats"), "images": _images(row), **of_set}
            words = {key: row[key] for key in ("class_tokens", "target_frames") if row.get(key)}
            yield facts | words | ({"regularisation": True} if row.get("is_reg") else {})


def _images(row: Mapping[str, Any]) -> Any:
    """Return how many images a folder has; None for a number below zero, which counts nothing."""
    count: Any = row.get("img_count")
    return None if is_finite(count) and count < 0 else count


def _name(row: Mapping[str, Any]) -> str:
    return next((str(row[key]) for key in DATA_SET_ENTRIES if row.get(key)), "")


def dataset_line(row: Mapping[str, Any]) -> str:
    """Return what is known of a folder, in words: `40 images × 5, 512x512`."""
    images = "" if row.get("images") is None else plural(row["images"], "image")
    repeats = "" if row.get("repeats") is None else f"× {row['repeats']:g}" if is_finite(row["repeats"]) else ""
    words = [f"{images} {repeats}".strip(), row.get("resolution", "")]
    words += [f"{key.replace('_', ' ')} {row[key]}" for key in ("class_tokens", "target_frames") if key in row]
    return ", ".join([word for word in words if word] + ["regularisation"] * ("regularisation" in row))


def preview(index: Index) -> dict[str, Any]:
    """Return where a picture of the adapter is, in the metadata or in a file next to it, its type and its bytes; empty
    without one."""
    text = index.metadata.get(THUMBNAIL, "")
    if text.startswith("data:image/"):
        kind, _, data = text[5:].partition(",")
        count = 3 * len(data) // 4 - data[-2:].count("=") if kind.endswith(";base64") else len(data)
        return {"in": THUMBNAIL, "type": kind.partition(";")[0][:40], "bytes": count}
    path = index.files[0] if len(index.files) == 1 else index.path
    stems = f"{path.stem}.preview", path.stem
    names: list[Path] = [path.with_name(stem + ending) for stem in stems for ending in PICTURES]
    file = next((p for p in names if p.is_file()), None)
    return {"in": str(file), "type": PICTURES[file.suffix], "bytes": file.stat().st_size} if file else {}

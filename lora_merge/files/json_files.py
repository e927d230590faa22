"""Side files of JSON: configurations, and indexes of shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from ..disk.files import FileState, open_regular
from ..errors import InputError
from ..text import from_json

JSON_LIMIT: Final = 64 << 20  # bytes; the index of a model of a million tensors is shorter


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a side file; InputError as `json_value`, or if it is not an object."""
    value = json_value(path)
    if not isinstance(value, dict):
        raise InputError("not a JSON object", str(path), "download or write it again")
    return value


def json_value(path: Path) -> Any:
    """Return the JSON value in a side file; InputError if it is invalid, or too long or too deep."""
    with open_regular(path) as f:
        if FileState.of(f.fileno()).size > JSON_LIMIT:
            raise InputError("JSON file of absurd length", str(path), "download it again")
        raw = f.read()
    try:
        return from_json(raw)
    except ValueError as e:
        raise InputError("not a valid JSON file", f"{path}: {e}", "download or write it again") from e


def read_index(path: Path) -> dict[str, Any]:
    """Return an index of shards, whose `weight_map` and `metadata` are objects; InputError if they are not."""
    content = read_json(path)
    if not isinstance(content.get("weight_map"), dict):
        raise bad_index(path, "it has no weight_map of names to files")
    content["metadata"] = content.get("metadata") or {}
    if not isinstance(content["metadata"], dict):
        raise bad_index(path, "its metadata is not a JSON object")
    return content


def bad_index(path: Path, why: str) -> InputError:
    """Return the error for an index that no shards can be found by."""
    return InputError("the shard index is wrong", f"{path}: {why}", "download the folder again, all files of it")

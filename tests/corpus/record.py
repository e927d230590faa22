"""A pytest plugin that keeps the calls of `merge` and `merge_state_dict` that tests make."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import lora_merge
from tests.corpus.calls import Keeper, NotKept, digest, refusal, tensors_digest

FOLDER = Path(os.environ["LORA_MERGE_CORPUS"])


def kept(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with its inputs and its result kept; a call like one before is kept once."""

    @wraps(call)
    def recorded(*args: Any, **options: Any) -> Any:
        place = Path(mkdtemp(dir=FOLDER))
        try:
            output = options.get("output", args[2] if len(args) > 2 and name == "merge" else None)
            if (name == "merge" and output is None) or (output is not None and Path(output).exists()):
                raise NotKept("an output that was there, or has no name")
            inputs = [a for i, a in enumerate(args) if not (name == "merge" and i == 2)]
            options_kept = {k: v for k, v in options.items() if k != "output"}
            told = {"call": name, "args": Keeper(place / "in").plain(inputs), "options": {}, "output": None}
            keeper = Keeper(place / "options")
            told["options"] = {k: keeper.plain(v) for k, v in options_kept.items()}
            told["output"] = None if output is None else Path(output).name
        except (NotKept, OSError, ValueError, TypeError):
            shutil.rmtree(place, ignore_errors=True)
            return call(*args, **options)
        key = _name(place, told)
        try:
            result = call(*args, **options)
        except lora_merge.MergeError as error:
            told["result"] = refusal(error)
            _keep(place, key, told)
            raise
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise
        told["result"] = tensors_digest(result) if output is None else digest(Path(output))
        _keep(place, key, told)
        return result

    return recorded


def _name(place: Path, told: dict[str, Any]) -> str:
    whole = hashlib.sha256(json.dumps({**told, "output": None}, sort_keys=True).encode())
    for path in sorted(p for p in place.rglob("*") if p.is_file()):
        whole.update(path.relative_to(place).as_posix().encode())
        whole.update(path.read_bytes())
    return whole.hexdigest()[:20]


def _keep(place: Path, key: str, told: dict[str, Any]) -> None:
    told["test"] = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
    (place / "call.json").write_text(json.dumps(told, indent=1), encoding="utf-8")
    try:
        place.rename(FOLDER / key)
    except OSError:  # it is there already
        shutil.rmtree(place, ignore_errors=True)


for _function in ("merge", "merge_state_dict"):
    setattr(lora_merge, _function, kept(_function, getattr(lora_merge, _function)))

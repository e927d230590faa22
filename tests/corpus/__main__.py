"""`python -m tests.corpus record|replay FOLDER [pytest arguments]`; see __init__.py."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lora_merge
from tests.corpus.calls import digest, refusal, restored, tensors_digest


def record(folder: Path, arguments: list[str]) -> int:
    """Run the suite with every merge kept in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "LORA_MERGE_CORPUS": str(folder.absolute()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.corpus.record", *(arguments or ["tests"])]
    code = subprocess.run(command, env=environment, check=False).returncode
    # Tests that replace parts of the program give results that no version gives again.
    subprocess.run([sys.executable, "-m", "tests.corpus", "prune", str(folder)], env=environment, check=True)
    print(f"{sum(1 for _ in folder.glob('*/call.json'))} merges in {folder}")
    return code


def made(place: Path, told: dict[str, Any]) -> dict[str, str]:
    """The call made again by this version."""
    with TemporaryDirectory() as folder:
        output = None if told["output"] is None else Path(folder) / told["output"]
        try:
            args = restored(told["args"], place / "in")
            options = {k: restored(v, place / "options") for k, v in told["options"].items()}
            if output is None:
                return tensors_digest(lora_merge.merge_state_dict(*args, **options))
            lora_merge.merge(*args[:2], output, *args[2:], **options)
        except lora_merge.MergeError as error:
            return refusal(error)
        except Exception as error:  # noqa: BLE001  # it is compared
            return {"failed": type(error).__name__}
        return digest(output)


def replay(folder: Path, *, prune: bool = False) -> int:
    """Compare every merge of the folder with what this version makes of it; 1 if any differs, which `prune` removes."""
    found: Counter[str] = Counter()
    for place in sorted(p.parent for p in folder.glob("*/call.json")):
        told = json.loads((place / "call.json").read_text(encoding="utf-8"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            now = made(place, told)
        same = now == told["result"]
        found["refused" if "refused" in now and same else "same" if same else "different"] += 1
        if not same and prune:
            shutil.rmtree(place)
        elif not same:
            print(f"{place.name}  {told['test']}\n  was {told['result']}\n  is  {now}")
    print(
        f"{found['same']} outputs with the same bytes, {found['refused']} refused as before, {found['different']} different"
    )
    return int(found["different"] > 0 and not prune)


if __name__ == "__main__":
    command, folder, *rest = sys.argv[1:]
    if command == "record":
        raise SystemExit(record(Path(folder), rest))
    raise SystemExit(replay(Path(folder), prune=command == "prune"))

"""A base from an object store on the loopback interface, and the same from disk, in turn."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.bench import inputs

if TYPE_CHECKING:
    from tests.bench.__main__ import Bench

MOST: Final = 1.3
"""How many times as long as from disk a merge may take from a store that is as near as the disk."""


def suite(b: Bench) -> None:
    """SD 1.5, 2.1 GB, whose hash is not known in either case; with the proof and without."""
    base = inputs.base(b.file("sd15.safetensors"), "sd1")
    lora = inputs.adapter(b.file("sd15-lora.safetensors"), "sd1")
    from_disk, from_store = b.ours(base, lora), b.ours(base, lora)
    from_store[from_store.index(str(base))] = f"s3://models/{base.name}"
    commands = {
        "first from disk": from_disk, "from S3": from_store,
        "first from disk --no-verify": [*from_disk, "--no-verify"], "from S3 --no-verify": [*from_store, "--no-verify"],
    }  # fmt: skip
    with served(b.data):
        table = b.compare("remote", commands, dict.fromkeys(commands, (base, lora)), "warm")
    for ending in ("", " --no-verify"):
        ratio = table[f"from S3{ending}"]["seconds"] / table[f"first from disk{ending}"]["seconds"]
        print(f"  from S3{ending}: {ratio:.2f} times as long as from disk; at most {MOST}: "
              f"{'met' if ratio <= MOST else 'not met'}")  # fmt: skip
        b.results.append({"suite": "remote", "name": f"ratio{ending}", "ratio": ratio, "most": MOST})
    b.drop(base.name, lora.name)


@contextmanager
def served(folder: Path) -> Iterator[None]:
    """Run the store in a process of its own, with the variables that name it."""
    command = [sys.executable, "-m", "tests.bench.object_store", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as store:
        assert store.stdout is not None, "a pipe was asked for"
        names = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{store.stdout.readline().strip()}", "AWS_ALLOW_HTTP": "true",
                 "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "none", "AWS_REGION": "us-east-1"}  # fmt: skip
        before = {name: os.environ.get(name) for name in names}
        os.environ.update(names)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
            store.terminate()

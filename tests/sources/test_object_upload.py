"""Outputs that are uploaded to S3, served by moto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lora_merge.planning.recipe import KEY
from tests.kit.files import metadata
from tests.sources.test_objects import Command, bucket, run, server
from tests.sources.test_hub import llama_folder, peft_folder

obstore = pytest.importorskip("obstore")

__all__ = ["bucket", "run", "server"]


def objects(bucket: Any) -> dict[str, int]:
    return {row["path"]: row["size"] for rows in obstore.list(bucket) for row in rows}


def test_merge_to_an_object_is_the_file_of_the_merge(bucket: Any, run: Command, tmp_path: Path) -> None:
    words = ("base.safetensors", "style.safetensors:0.5")
    assert run(*words, "-o", "a.safetensors")[0] == 0
    code, out, err = run(*words, "-o", "s3://models/out/a", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["output"] == "s3://models/out/a.safetensors"
    print(report["notes"])
    assert bytes(obstore.get(bucket, "out/a.safetensors").bytes()) == Path("a.safetensors").read_bytes()
    assert not list(tmp_path.rglob("lora-merge-uploads"))

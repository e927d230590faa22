"""Objects of S3, served by moto."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_merge.planning.recipe import KEY
from tests.kit.command_line import Command
from tests.kit.files import load_all, metadata, save
from tests.kit.folders import llama_folder, peft_folder
from tests.kit.models import sd1_sample
from tests.sources.server import sha256

obstore = pytest.importorskip("obstore")
moto = pytest.importorskip("moto.server")
boto3 = pytest.importorskip("boto3")


def test_merge_of_objects_names_their_versions(bucket: Any, run: Command) -> None:
    code, out, err = run(
        "s3://models/sd/base.safetensors", "s3://models/sd/style.safetensors:0.5", "-o", "a.safetensors", "--json"
    )
    assert code == 0, err
    source = json.loads(metadata(Path("a.safetensors"))[KEY])["base"]["source"]
    assert source.startswith("s3://models/sd/base.safetensors?versionId=")
    assert "secret" not in out + err + source
    obstore.put(bucket, "sd/base.safetensors", b"another file")
    before = Path("a.safetensors").read_bytes()
    for name in ("base.safetensors", "style.safetensors"):
        Path(name).unlink()
    code, _, err = run("replay", "a.safetensors", "-o", "b.safetensors")
    assert code == 0 and Path("b.safetensors").read_bytes() == before, err


def test_object_is_read_straight_into_the_merge_if_nothing_is_kept(
    bucket: Any, run: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = llama_folder(tmp_path / "tiny") | {
        f"peft/{name}": content for name, content in peft_folder(tmp_path / "peft").items()
    }
    for name, content in files.items():
        obstore.put(bucket, name if "/" in name else f"tiny/{name}", content)
    monkeypatch.delenv("LORA_MERGE_CACHE")
    code, _, err = run("s3://models/tiny", "s3://models/peft:0.5", "-o", "a")
    assert code == 0 and "nothing is kept" in err, err
    assert run("tiny", "peft:0.5", "-o", "b")[0] == 0
    assert {p.name for p in Path("a").iterdir()} == {p.name for p in Path("b").iterdir()}
    one, other = load_all(Path("a")), load_all(Path("b"))
    assert one.keys() == other.keys() and all((one[name] == other[name]).all() for name in other)
    assert Path("a/config.json").read_bytes() == Path("b/config.json").read_bytes()
    assert not [p for p in tmp_path.rglob("source.json")]


def test_headers_of_an_object_and_of_a_folder_are_read_by_ranges(bucket: Any, run: Command, tmp_path: Path) -> None:
    content = Path(tmp_path / "style.safetensors").read_bytes()
    code, out, err = run("inspect", "s3://models/sd/style.safetensors", "--json")
    assert code == 0 and json.loads(out)["algorithms"] == {"lora": 5}, err
    obstore.put(bucket, "peft/model.safetensors", content)
    obstore.put(bucket, "peft/README.md", b"# style")
    code, out, err = run("inspect", "s3://models/peft", "--json")
    assert code == 0 and json.loads(out)["path"] == "s3://models/peft", err
    assert not (tmp_path / "store").exists() and len(sha256(content)) == 64


@pytest.mark.parametrize(("address", "code", "what"), [
    ("s3://models/nothing.safetensors", 3, "no such object"), ("s3://nothing/x.safetensors", 3, "no such object"),
])  # fmt: skip
def test_object_that_is_not_there_is_an_input_error(
    bucket: Any, run: Command, address: str, code: int, what: str
) -> None:
    number, _, err = run("inspect", address)
    assert number == code and what in err, err


def test_store_that_is_out_of_reach_is_a_lack_of_resources(
    bucket: Any, run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from obstore import store

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(store, "S3Store", partial(store.S3Store, retry_config={"max_retries": 0}))  # 10: 9 s
    code, _, err = run("inspect", "s3://models/sd/base.safetensors")
    assert code == 5, err


def test_object_is_kept_with_cache_and_found_without_requests(
    bucket: Any, run: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The version of the recipe is the key; with a store that is gone the copy is enough."""
    monkeypatch.delenv("LORA_MERGE_CACHE")
    words = ["base.safetensors", "s3://models/sd/style.safetensors:0.5"]
    code, _, err = run(*words, "-o", "a.safetensors", "--cache", "here")
    assert code == 0 and "are downloaded from s3://models/sd/style.safetensors?versionId=" in err, err
    Path("style.safetensors").unlink()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    code, _, err = run("replay", "a.safetensors", "-o", "b.safetensors", "--cache", "here")
    assert code == 0 and Path("b.safetensors").read_bytes() == Path("a.safetensors").read_bytes(), err
    monkeypatch.setenv("LORA_MERGE_OFFLINE", "1")
    code, _, err = run(*words, "-o", "c.safetensors", "--cache", "here")
    assert code == 0 and Path("c.safetensors").read_bytes() == Path("a.safetensors").read_bytes(), err


def test_adapters_of_objects_are_written_with_their_versions(bucket: Any, run: Command) -> None:
    code, _, err = run("resize", "s3://models/sd/style.safetensors", "--rank", "2", "-o", "a.safetensors")
    assert code == 0, err
    source = json.loads(metadata(Path("a.safetensors"))[KEY])["adapters"][0]["source"]
    assert source.startswith("s3://models/sd/style.safetensors?versionId=")
    obstore.put(bucket, "sd/style.safetensors", b"another file")
    Path("style.safetensors").unlink()
    code, _, err = run("verify", "a.safetensors")
    assert code == 0, err


def test_object_that_changes_while_it_is_read_is_refused(
    bucket: Any, run: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a bucket without versions the ETag is what the plan knows."""
    monkeypatch.delenv("LORA_MERGE_CACHE")
    boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"]).create_bucket(Bucket="plain")
    store = obstore.store.S3Store("plain")
    content = save({**sd1_sample(), "more": torch.zeros(1 << 18)}, tmp_path / "big.safetensors").read_bytes()
    obstore.put(store, "big.safetensors", content)
    put = obstore.put
    reads: list[int] = []
    get = obstore.get

    def changing(*words: Any, **options: Any) -> Any:
        reads.append(1)
        if len(reads) == 4:
            put(store, "big.safetensors", content[:-1] + b".")
        return get(*words, **options)

    monkeypatch.setattr(obstore, "get", changing)
    code, _, err = run("s3://plain/big.safetensors", "style.safetensors", "-o", "a.safetensors")
    assert code == 3 and "changed while it was read" in err and not Path("a.safetensors").exists(), err

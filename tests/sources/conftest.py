"""Servers for the tests of this folder, and an environment in which nothing else is reached."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lora_merge.sources import inputs, web
from tests.kit import command_line
from tests.kit.adapters import kohya
from tests.kit.command_line import Answer, Command
from tests.kit.files import save
from tests.kit.models import sd1_sample
from tests.sources.server import Machines, serving


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """The program in the folder of the test. Each call looks addresses up, as a new process does."""
    monkeypatch.chdir(tmp_path)

    def call(*words: object) -> Answer:
        inputs._located.clear()
        return command_line.run(*words)

    return call


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machines]:
    """The servers, with the hub and Civitai at their addresses, and empty caches."""
    for name in ("LORA_MERGE_OFFLINE", "HF_HUB_OFFLINE", "HF_TOKEN", "CIVITAI_API_TOKEN", "CIVITAI_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("LORA_MERGE_CACHE", str(tmp_path / "store"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(web, "wait", lambda _: None)
    monkeypatch.setattr(inputs, "_located", {})
    with serving(Machines()) as servers:
        monkeypatch.setenv("HF_ENDPOINT", servers.url)
        monkeypatch.setenv("CIVITAI_ENDPOINT", servers.url)
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", servers.url)
        yield servers


@pytest.fixture
def published(machines: Machines, tmp_path: Path) -> Machines:
    """A repository with a base, and one with an adapter."""
    base, lora = (
        save(sd1_sample(), tmp_path / "local.safetensors"),
        save(kohya(sd1_sample()), tmp_path / "style.safetensors"),
    )
    machines.repositories["me/sd"] = {
        "README.md": b"# sd", "other.safetensors": b"x" * 4000, "sd.safetensors": base.read_bytes(),
    }  # fmt: skip
    machines.repositories["me/style"] = {"README.md": b"# style", "style.safetensors": lora.read_bytes()}
    return machines


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The address of a server of S3."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A bucket that keeps versions, with a base and an adapter."""
    boto3, obstore = pytest.importorskip("boto3"), pytest.importorskip("obstore")
    monkeypatch.delenv("LORA_MERGE_OFFLINE", raising=False)
    monkeypatch.setenv("LORA_MERGE_CACHE", str(tmp_path / "store"))
    monkeypatch.setattr(inputs, "_located", {})
    for name, value in {"AWS_ENDPOINT_URL": server, "AWS_ALLOW_HTTP": "true", "AWS_ACCESS_KEY_ID": "AKIASECRETKEYID",
                        "AWS_SECRET_ACCESS_KEY": "secretsecret", "AWS_REGION": "us-east-1"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", endpoint_url=server)
    client.create_bucket(Bucket="models")
    client.put_bucket_versioning(Bucket="models", VersioningConfiguration={"Status": "Enabled"})
    store = obstore.store.S3Store("models")
    obstore.put(store, "sd/base.safetensors", save(sd1_sample(), tmp_path / "base.safetensors").read_bytes())
    obstore.put(store, "sd/style.safetensors", save(kohya(sd1_sample()), tmp_path / "style.safetensors").read_bytes())
    return store

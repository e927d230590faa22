"""Files of Civitai: versions, AIRs and hashes; tokens, stores, and downloads that break."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lora_merge.planning.recipe import KEY
from tests.kit.adapters import kohya
from tests.kit.command_line import Command
from tests.kit.files import metadata, save
from tests.kit.models import sd1_sample
from tests.sources.server import SIGNATURE, TOKEN, Machines, sha256


@pytest.fixture
def lora(machines: Machines, tmp_path: Path) -> bytes:
    """An adapter as version 12 of model 7, next to a base of this machine."""
    save(sd1_sample(), tmp_path / "base.safetensors")
    content = save(kohya(sd1_sample()), tmp_path / "style.safetensors").read_bytes()
    machines.civitai(12, [{"id": 90, "name": "style.safetensors", "content": content},
                          {"id": 91, "name": "style.zip", "type": "Training Data", "content": b"PK"}],
                     air="urn:air:sd1:lora:civitai:7@12")  # fmt: skip
    return content


NAMES = ["civitai:12", "civitai:7@12", "urn:air:sd1:lora:civitai:7@12", "urn:air:sd1:lora:civitai:7",
         "https://civitai.com/models/7?modelVersionId=12", "https://civitai.red/models/7/style",
         "https://civitai.com/api/download/models/12?fileId=90"]  # fmt: skip


@pytest.mark.few(4)
@pytest.mark.parametrize("name", [*NAMES, "sha256"])
def test_every_name_of_a_file_leads_to_it(machines: Machines, lora: bytes, run: Command, name: str) -> None:
    name = f"sha256:{sha256(lora)}" if name == "sha256" else name
    code, out, err = run("inspect", f"{name}:0.5", "--json")
    assert code == 0, err
    facts = json.loads(out)
    assert facts["algorithms"] == {"lora": 5} and facts["hashes"]["sha256"] == sha256(lora)
    assert "urn:air:sd1:lora:civitai:7@12#90" in facts["path"]


def test_merge_keeps_the_file_and_names_version_and_file(
    machines: Machines, lora: bytes, run: Command, tmp_path: Path
) -> None:
    code, _, err = run("base.safetensors", "civitai:12:0.5", "-o", "a.safetensors")
    assert code == 0 and "are downloaded from urn:air:sd1:lora:civitai:7@12#90" in err, err
    code, _, err = run("base.safetensors", "style.safetensors:0.5", "-o", "b.safetensors")
    assert Path("a.safetensors").stat().st_size > 0
    used = json.loads(metadata(Path("a.safetensors"))[KEY])["adapters"][0]
    assert used["source"] == "urn:air:sd1:lora:civitai:7@12#90" and used["name"] == "style.safetensors"
    assert {r.method for r in machines.requests} == {"GET"}
    assert SIGNATURE not in "".join(p.read_text() for p in (tmp_path / "store").rglob("source.json"))
    asked = len(machines.requests)
    Path("style.safetensors").unlink()
    code, _, err = run("replay", "a.safetensors", "-o", "c.safetensors")
    assert code == 0 and Path("c.safetensors").read_bytes() == Path("a.safetensors").read_bytes(), err
    assert len(machines.requests) == asked
    shutil.rmtree(tmp_path / "store")
    assert run("verify", "a.safetensors")[0] == 0 and len(machines.requests) > asked


def test_file_is_chosen_by_the_user_if_there_are_several(machines: Machines, lora: bytes, run: Command) -> None:
    machines.civitai(13, [{"id": 92, "name": "a-bf16.safetensors", "metadata": {"fp": "bf16"}, "content": lora},
                          {"id": 93, "name": "a-fp8.safetensors", "metadata": {"fp": "fp8"}, "content": lora}])  # fmt: skip
    code, _, err = run("inspect", "civitai:13")
    assert code == 2 and "civitai:13#92 (a-bf16.safetensors, bf16" in err and "civitai:13#93" in err
    assert run("inspect", "civitai:13#93")[0] == 0
    code, _, err = run("inspect", "civitai:13#5")
    assert code == 3 and "has no file 5" in err


def test_token_goes_to_the_api_alone(
    machines: Machines, lora: bytes, run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines.early.add("12")
    code, _, err = run("base.safetensors", "civitai:12", "-o", "a.safetensors")
    assert code == 3 and "CIVITAI_API_TOKEN" in err and "early access" in err
    monkeypatch.setenv("CIVITAI_API_TOKEN", TOKEN)
    code, out, err = run("base.safetensors", "civitai:12", "-o", "a.safetensors", "--report", "r.json")
    assert code == 0, err
    assert {r.token for r in machines.requests if r.server == "store"} == {""}
    assert not any(secret in text for secret in (TOKEN, SIGNATURE) for text in (out, err, Path("r.json").read_text()))


def test_bytes_of_another_hash_are_refused_and_removed(
    machines: Machines, lora: bytes, run: Command, tmp_path: Path
) -> None:
    machines.blobs["90"] = lora[:-1] + bytes([lora[-1] ^ 1])
    code, _, err = run("base.safetensors", "civitai:12", "-o", "a.safetensors")
    assert code == 3 and "another SHA-256" in err, err
    assert (
        not [p for p in (tmp_path / "store").rglob("*") if p.is_file() and p.stat().st_size > 1000]
        and not Path("a.safetensors").exists()
    )


def test_download_that_breaks_is_continued(machines: Machines, lora: bytes, run: Command) -> None:
    code, _, _ = run("inspect", "civitai:12")
    machines.breaks[:] = [1000, 2000, 1]
    before = len(machines.requests)
    code, _, err = run("base.safetensors", "civitai:12", "-o", "a.safetensors")
    assert code == 0, err
    assert {"bytes=1000-", "bytes=3000-", "bytes=3001-"} <= {r.range for r in machines.requests[before:]}


def test_file_that_changes_while_it_is_read_is_never_mixed(machines: Machines, lora: bytes, run: Command) -> None:
    """If-Range gives the whole new file, whose hash is not that which the API states."""
    run("inspect", "civitai:12")
    machines.breaks[:] = [1000]
    other = bytes(len(lora))
    machines.blobs["90"] = lora

    def change() -> None:
        machines.blobs["90"] = other

    machines.after = change
    code, _, err = run("base.safetensors", "civitai:12", "-o", "a.safetensors")
    assert code == 3, err


@pytest.mark.parametrize(
    ("answers", "code"), [([429], 0), ([503, 502, 500], 0), ([429] * 9, 5), ([404], 3), ([403], 3)]
)
def test_busy_server_is_asked_again(
    machines: Machines, lora: bytes, run: Command, answers: list[int], code: int
) -> None:
    machines.answers[:] = answers
    number, _, err = run("inspect", "civitai:12")
    assert number == code, err


def test_number_that_is_no_version_is_answered_with_what_helps(machines: Machines, lora: bytes, run: Command) -> None:
    code, _, err = run("inspect", "civitai:999")
    assert code == 3 and "modelVersionId" in err
    code, _, err = run("inspect", f"sha256:{'0' * 64}")
    assert code == 3

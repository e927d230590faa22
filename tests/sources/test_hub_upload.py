"""Outputs that are uploaded to the hub."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from threading import Event

import pytest
from huggingface_hub import HfApi
from huggingface_hub.utils import are_progress_bars_disabled

from lora_merge.sources import hub_upload
from tests.kit.command_line import Command
from tests.kit.folders import llama_folder, peft_folder
from tests.sources.server import SIGNATURE, TOKEN, Machines

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub and its own client

MERGE = ("local.safetensors", "style.safetensors:0.5")
TO = "hf://me/merged/a.safetensors"


@pytest.fixture
def hub(published: Machines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machines:
    """The hub, logged in, without Xet."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("time.sleep", lambda _: None)
    return published


def commits(hub: Machines) -> list[str]:
    return [r.path for r in hub.requests if "/commit/" in r.path]


def nothing_is_left(tmp_path: Path) -> bool:
    return not [*tmp_path.rglob("lora-merge-uploads/*")]


def test_merge_to_a_repository_is_one_private_commit_with_a_card(
    hub: Machines, run: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    send, silent = HfApi.preupload_lfs_files, list[bool]()
    monkeypatch.setattr(
        HfApi, "preupload_lfs_files", lambda *a, **b: (silent.append(are_progress_bars_disabled()), send(*a, **b))
    )
    assert run(*MERGE, "-o", "a.safetensors")[0] == 0
    code, out, err = run(*MERGE, "-o", "hf://me/merged/a", "--json")
    assert code == 0, err
    files, report = hub.repositories["me/merged"], json.loads(out)
    assert report["output"] == TO and hub.created == {"me/merged": "private"}
    assert files["a.safetensors"] == Path("a.safetensors").read_bytes() and b"lora-merge" in files["README.md"]
    assert commits(hub) == ["/api/models/me/merged/commit/main"] and hub.commit("me/merged") in report["notes"][-1]
    assert TOKEN not in out + err and nothing_is_left(tmp_path)
    assert silent[0] and not are_progress_bars_disabled(), "the library draws no bars for what is sent"
    assert not [name for name, c in files.items() if TOKEN.encode() in c or SIGNATURE.encode() in c]
    code, _, err = run(*MERGE, "-o", TO)
    assert code == 2 and "the output exists" in err and "a.safetensors" in err
    code, _, err = run("verify", TO)
    assert code == 0, err


def test_upload_that_breaks_makes_no_commit_and_is_continued(hub: Machines, run: Command, tmp_path: Path) -> None:
    hub.upload_breaks = [1000] * 40
    code, out, err = run(*MERGE, "-o", TO)
    assert code == 5 and "run again" in err and TOKEN not in out + err, err
    assert "may be left there: the new private repository me/merged" in err
    assert commits(hub) == [] and {*hub.repositories["me/merged"]} == {".gitattributes"} and nothing_is_left(tmp_path)
    hub.upload_breaks = []
    assert run(*MERGE, "-o", TO)[0] == 0
    assert len(hub.uploads) == 1 and len(commits(hub)) == 1


def test_run_that_fails_does_not_wait_for_the_library(
    hub: Machines, run: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The library cannot be interrupted while it sends a file, which may take hours."""
    end, waited = Event(), list[bool]()
    monkeypatch.setattr("huggingface_hub.HfApi.preupload_lfs_files", lambda *_, **__: waited.append(end.wait(20)))
    monkeypatch.setattr("lora_merge.engine.merge.verify", lambda *_, **__: (_ for _ in ()).throw(OSError("no proof")))
    code, _, err = run(*MERGE, "-o", TO)
    assert code and not waited and commits(hub) == [] and nothing_is_left(tmp_path), err
    end.set()


@pytest.mark.slow
def test_connections_that_break_twice_are_tried_again(hub: Machines, run: Command) -> None:
    hub.upload_breaks = [1000, 2000]
    code, _, err = run(*MERGE, "-o", TO)
    assert code == 0 and "a.safetensors" in hub.repositories["me/merged"], err


@pytest.mark.slow
def test_what_the_hub_has_already_is_not_sent_again(
    hub: Machines, run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = hub_upload.client

    def refusing() -> object:
        made = api()
        made.create_commit = lambda *_, **__: (_ for _ in ()).throw(OSError("the connection breaks"))
        return made

    monkeypatch.setattr(hub_upload, "client", refusing)
    assert run(*MERGE, "-o", TO)[0] == 5
    sent = len(hub.uploads)
    monkeypatch.setattr(hub_upload, "client", api)
    assert run(*MERGE, "-o", TO)[0] == 0 and len(hub.uploads) == sent


@pytest.mark.slow
def test_upload_of_a_run_that_is_killed_is_continued(
    hub: Machines, run: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    llama_folder(tmp_path / "tiny", 3), peft_folder(tmp_path / "peft")
    words = ("tiny", "peft:0.5", "-o", "hf://me/tiny")
    hub.upload_gate, end = Event(), time.monotonic() + 60
    with subprocess.Popen(
        [sys.executable, "-m", "lora_merge", *words], stderr=subprocess.PIPE, cwd=tmp_path
    ) as process:
        while not hub.uploads and process.poll() is None and time.monotonic() < end:
            Event().wait(0.05)
        process.kill()
    assert len(hub.uploads) == 1 and not commits(hub)
    hub.upload_gate.set()
    code, _, err = run(*words)
    assert code == 0 and len(hub.uploads) == len({*hub.uploads}) == 3 and nothing_is_left(tmp_path), err
    assert len([name for name in hub.repositories["me/tiny"] if name.endswith(".safetensors")]) == 3


@pytest.mark.slow
def test_damaged_upload_is_reported_with_its_commit(hub: Machines, run: Command) -> None:
    hub.corrupt = True
    code, _, err = run(*MERGE, "-o", TO)
    assert code == 6 and "is not the one that was sent" in err and hub.commit("me/merged") in err, err


@pytest.mark.slow
def test_folder_on_a_branch_leaves_the_others_as_they_are(hub: Machines, run: Command, tmp_path: Path) -> None:
    llama_folder(tmp_path / "tiny"), peft_folder(tmp_path / "peft")
    hub.repositories["me/tiny"] = {"README.md": b"# mine", "picture.png": b"png"}
    assert run("tiny", "peft:0.5", "-o", "there")[0] == 0
    code, out, err = run("tiny", "peft:0.5", "-o", "hf://me/tiny", "--json")
    assert code == 2 and "README.md" in err
    code, out, err = run("tiny", "peft:0.5", "-o", "hf://me/tiny@half", "--json")
    assert code == 0 and json.loads(out)["output"] == "hf://me/tiny@half", err
    assert hub.repositories["me/tiny"] == {"README.md": b"# mine", "picture.png": b"png"} and not hub.created
    files = hub.repositories["me/tiny@half"]
    assert {*files} == {"picture.png", *(p.name for p in Path("there").iterdir())}
    for path in (p for p in Path("there").iterdir() if p.name != "README.md"):
        assert files[path.name] == path.read_bytes()
    code, _, err = run("verify", "hf://me/tiny@half", "--full")
    assert code == 0, err
    code, out, err = run("tiny", "peft:0.5", "-o", "hf://me/tiny@half")
    assert code == 2 and "the output exists" in err
    hub.repositories["me/tiny@half"]["model-00009.safetensors"] = b"x"
    code, _, err = run("tiny", "peft:0.5", "-o", "hf://me/tiny@half", "--overwrite")
    assert code == 2 and "model-00009.safetensors" in err


@pytest.mark.slow
def test_adapter_is_written_to_a_repository(hub: Machines, run: Command, tmp_path: Path) -> None:
    peft_folder(tmp_path / "peft")
    code, out, err = run("resize", "peft", "--rank", "2", "-o", "hf://me/small", "--json")
    assert code == 0 and json.loads(out)["output"] == "hf://me/small", err
    assert {"adapter_model.safetensors", "adapter_config.json"} < {*hub.repositories["me/small"]}


@pytest.mark.slow
@pytest.mark.parametrize(("token", "to", "what"), [
    ("", "hf://me/merged", "requires a token"), ("hf_reader", "hf://me/merged", "may read only"),
    (TOKEN, "hf://you/merged", "may not create a repository there"), ("hf_reader", "hf://me/sd", "refuses write access"),
])  # fmt: skip
def test_token_that_may_not_write_is_named_before_the_merge(  # noqa: PLR0917
    hub: Machines, run: Command, monkeypatch: pytest.MonkeyPatch, token: str, to: str, what: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    if not token:
        monkeypatch.delenv("HF_TOKEN")
    before = len(hub.uploads)
    code, out, err = run(*MERGE, "-o", to)
    assert code == 2 and what in err and "hf_" not in out + err, err
    assert len(hub.uploads) == before and commits(hub) == []
    assert "hf://me/merged" in err or to != "hf://you/merged"


@pytest.mark.slow
def test_own_card_of_a_repository_stays(hub: Machines, run: Command) -> None:
    hub.repositories["me/merged"] = {"README.md": b"# mine"}
    code, out, err = run(*MERGE, "-o", TO, "--json")
    assert code == 0 and hub.repositories["me/merged"]["README.md"] == b"# mine", err
    assert any("stays as it is" in note for note in json.loads(out)["notes"])


@pytest.mark.slow
def test_card_of_an_earlier_merge_is_brought_up_to_date(hub: Machines, run: Command) -> None:
    assert run(*MERGE, "-o", TO)[0] == 0
    card = hub.repositories["me/merged"]["README.md"]
    assert b"0.5" in card and b"0.25" not in card
    hub.repositories["me/merged"]["README.md"] = card + b"My own words.\n"
    code, _, err = run("local.safetensors", "style.safetensors:0.25", "-o", TO, "--overwrite")
    card = hub.repositories["me/merged"]["README.md"]
    assert code == 0 and b"0.25" in card and b"0.5" not in card and b"My own words." in card, err


@pytest.mark.slow
def test_commit_whose_reply_is_lost_is_found(hub: Machines, run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    api = hub_upload.client

    def losing() -> object:
        library = api()
        commit = library.create_commit

        def lose(*words: object, **named: object) -> None:
            commit(*words, **named)
            raise OSError("the connection breaks")

        library.create_commit = lose
        return library

    monkeypatch.setattr(hub_upload, "client", losing)
    code, out, err = run(*MERGE, "-o", TO, "--json")
    assert code == 0 and hub.commit("me/merged") in json.loads(out)["notes"][-1], err


@pytest.mark.slow
def test_missing_library_is_named_before_the_merge(
    hub: Machines, run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_upload, "is_installed", lambda: False)
    code, _, err = run(*MERGE, "-o", TO)
    assert code == 2 and "pip install" in err


def test_switched_off_requests_refuse_the_output(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_MERGE_OFFLINE", "1")
    code, _, err = run("base.safetensors", "style.safetensors", "-o", TO)
    assert code == 2 and "LORA_MERGE_OFFLINE" in err


@pytest.mark.slow
def test_batch_writes_into_a_repository_that_is_there_and_skips_what_is_done(hub: Machines, run: Command) -> None:
    hub.repositories["me/all"] = {".gitattributes": b"", "README.md": b"# mine"}
    job = {"base": "local.safetensors", "adapters": ["style.safetensors"], "output": "hf://me/all/one.safetensors"}
    Path("jobs.yaml").write_text(json.dumps({"version": 1, "jobs": [job]}))
    for status in ("merged", "skipped"):
        code, out, err = run("batch", "jobs.yaml", "--json")
        assert code == 0 and json.loads(out)["status"] == status, err
    assert len(commits(hub)) == 1 and hub.repositories["me/all"]["README.md"] == b"# mine"
    Path("jobs.yaml").write_text(json.dumps({"version": 1, "jobs": [{**job, "dtype": "bf16"}]}))
    code, out, err = run("batch", "jobs.yaml", "--json")
    assert code == 7 and "made by another recipe" in out, err

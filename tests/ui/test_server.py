"""The server on the loopback: who may use it, and the way from a filled form to a verified file."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from safetensors.torch import load_file

from lora_merge import merge
from tests.kit.command_line import run
from tests.kit.files import save
from tests.kit.forms import TINY, A, form
from tests.kit.page_server import Page, serving


@pytest.fixture
def page(comfy: Path) -> Iterator[Page]:
    """The page for a folder of ComfyUI."""
    with serving(comfy) as it:
        yield it


JSON = "application/json"


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (200, {}),
        (200, {"Origin": "http://127.0.0.1:PORT"}),
        (200, {"Origin": "http://localhost:PORT", "Host": "localhost:PORT"}),
        (403, {"Origin": "http://evil.example"}),
        (403, {"Origin": "null"}),
        (403, {"Origin": "http://127.0.0.1:1"}),
        (403, {"Host": "evil.example:PORT"}),
        (403, {"Host": "127.0.0.1"}),
        (415, {"Content-Type": "text/plain"}),
        (415, {"Content-Type": "application/x-www-form-urlencoded"}),
        (415, {"Content-Type": ""}),
    ],
)
def test_requests_of_other_pages_are_refused(status: int, headers: dict[str, str], page: Page) -> None:
    headers = {name: value.replace("PORT", str(page.port)) for name, value in headers.items()}
    reply = page.send("POST", f"{page.root}api/queue", b"{}", **{"Content-Type": JSON, **headers})
    assert reply.status == status
    assert not [name for name in reply.headers if name.startswith("access-control")]


def test_token_method_and_policy(page: Page) -> None:
    assert len(page.root) > 40
    assert page.send("GET", "/").status == page.send("GET", f"/{'x' * 43}/").status == 404
    assert page.send("POST", "/api/queue", b"{}", Content__Type=JSON).status == 404
    assert page.send("GET", f"{page.root}api/queue").status == 405
    asked = page.send("OPTIONS", f"{page.root}api/run", Access__Control__Request__Method="POST")
    assert asked.status == 405 and "access-control-allow-origin" not in asked.headers
    first = page.send("GET", page.root)
    assert first.status == 200 and "unsafe-inline" not in first.headers["content-security-policy"]
    assert b"<script>" not in first.body and b"style=" not in first.body and b" on" + b"click" not in first.body
    assert first.headers["referrer-policy"] == "no-referrer"


def test_calls_that_are_no_calls(page: Page) -> None:
    for body, status in ((b"{", 422), (b"[]", 422), (b"[" * 100_000, 422), (b"x" * (2 << 20), 413)):
        assert page.send("POST", f"{page.root}api/preview", body, Content__Type=JSON).status == status


def test_form_becomes_a_verified_file(page: Page, comfy: Path) -> None:
    filled = form("merge", comfy)
    filled["options"] = {}
    preview = page.call("preview", **filled)
    files = page.call("files", **filled)["files"]
    assert [file.get("fits") for file in files] == [None, True, True]
    assert files[1]["triggers"] == ["ohwx <b>"]
    assert preview["plan"]["status"] == "to run" and preview["plan"]["bytes"] > 0 and preview["plan"]["memory"] > 0
    done = page.ended(page.call("run", **filled)["number"])
    assert done["state"] == "done", done
    assert {name: style for name, _, style in done["facts"]}["verified"] == "green"
    assert Path(done["output"]).stat().st_size == preview["plan"]["bytes"]
    assert page.call("preview", **filled)["plan"]["status"] == "done"
    assert page.ended(page.call("run", **filled)["number"])["state"] == "skipped"


def test_time_is_that_of_the_disk_until_a_run_has_shown_it(
    page: Page, comfy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled, before = form("merge", comfy), sorted(comfy.rglob("*"))
    assert page.call("preview", **filled)["plan"]["seconds"] is None
    page.measured()
    assert sorted(comfy.rglob("*")) == before
    plan = page.call("preview", **filled)["plan"]
    assert 0 < plan["seconds"] < 60 and not plan["measured"]
    for least, measured in ((1 << 30, False), (1, True)):  # a small run is over before it is at full speed
        monkeypatch.setattr("lora_merge.ui.runs.LEAST", least)
        assert page.ended(page.call("run", **filled)["number"])["state"] == "done"
        Path(plan["output"]).unlink()
        assert page.call("preview", **filled)["plan"]["measured"] is measured


def test_error_of_a_form_comes_before_the_run(page: Page, comfy: Path) -> None:
    filled = {**form("merge", comfy), "base": str(comfy / "models/checkpoints/sd3.safetensors")}
    filled["adapters"] = [{"path": filled["adapters"][0]["path"]}]
    preview = page.call("preview", **filled)
    assert page.call("files", **filled)["files"][1]["fits"] is False
    assert preview["plan"]["error"]["kind"] == "UnmatchedModules" and preview["plan"]["error"]["fix"]
    assert page.call("run", **filled)["error"]["kind"] == "UnmatchedModules"
    assert page.call("queue")["runs"] == []


def test_mistake_in_a_form_is_not_called_one_of_a_jobs_file(page: Page, comfy: Path) -> None:
    filled = {"command": "resize", "adapters": [{"path": str(comfy / "models" / A)}], "output": "small"}
    for rank, what in (("", "resize needs"), ("many", "'many' is not a rule")):
        for call in ("preview", "run"):
            error = page.call(call, **filled, options={"rank": rank})["error"]
            assert error["what"].startswith(what) and error["where"] == "rank", error
            assert "schema" not in error["fix"]


def test_cancelled_runs_leave_nothing(page: Page, comfy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that works, and the one that waits."""
    from lora_merge.ui.runs import Run

    work = Run._work

    def waiting(run: Run) -> None:  # in the thread of the run, which does not wait for who takes its steps
        run.cancelled.wait(30)
        work(run)

    monkeypatch.setattr(Run, "_work", waiting)
    before = sorted(comfy.rglob("*"))
    first, second = (page.call("run", **form("merge", comfy, name))["number"] for name in ("out/x", "out/y"))
    assert page.call("cancel", number=second)["runs"][1]["state"] == "cancelled"
    page.call("cancel", number=first)
    assert page.ended(first)["state"] == "cancelled"
    assert sorted(comfy.rglob("*")) == before


def test_looks_show_texts_and_write_nothing(page: Page, comfy: Path) -> None:
    adapters = [{"path": str(comfy / "models" / name)} for name in (A, "loras/b.safetensors")]
    before = sorted(comfy.rglob("*"))
    compared = page.ended(page.call("run", command="compare", adapters=adapters)["number"])
    assert compared["state"] == "done" and "cosine" in compared["text"]
    base = str(comfy / "models" / TINY)
    seen = page.ended(page.call("run", command="inspect", base=base, adapters=adapters[:1])["number"])
    assert seen["state"] == "done" and "20 of 20" in seen["text"]
    assert sorted(comfy.rglob("*")) == before


def test_recipe_of_a_finished_file_is_enough(page: Page, comfy: Path) -> None:
    """To verify it, to write it again, and to take its adapters out; the copied commands do the same."""
    models = comfy / "models"
    product = models / "checkpoints/product.safetensors"
    merge(models / TINY, (models / A, 0.8), product, dtype="fp32")
    for command, more in (("verify", {"product": str(product), "options": {"full": "true"}}),
                          ("replay", {"product": str(product), "output": "again"}),
                          ("unmerge", {"base": str(product), "output": "without"})):  # fmt: skip
        filled = {"command": command, "adapters": [], **more}
        preview = page.call("preview", **filled)
        assert "error" not in preview and "jobs" not in preview
        assert preview.get("plan", {}).get("bytes") == (product.stat().st_size if "output" in more else None)
        done = page.ended(page.call("run", **filled)["number"])
        assert done["state"] == "done", done
        assert done["output"] == (str(comfy / f"{more['output']}.safetensors") if "output" in more else "")
        if "output" in more:
            written = Path(done["output"]).read_bytes()
            Path(done["output"]).unlink()
        else:
            assert {name: style for name, _, style in done["facts"]}["verified"] == "green"
        assert (answer := run(*shlex.split(preview["command"])[1:])).code == 0, answer.err
        assert "output" not in more or Path(done["output"]).read_bytes() == written
    again = {"command": "replay", "product": str(product), "output": "again"}
    assert "exists" in page.call("preview", **again)["error"]["what"]
    for command in ("verify", "replay", "unmerge"):
        place = "base" if command == "unmerge" else "product"
        error = page.call("preview", **{"command": command, place: str(models / TINY), "output": "x"})["error"]
        assert error["what"] == "the file has no recipe" and error["fix"]


def test_file_without_a_recipe_is_verified_by_its_inputs(page: Page, comfy: Path) -> None:
    models = comfy / "models"
    product = models / "checkpoints/product.safetensors"
    merge(models / TINY, (models / A, 0.8), product, metadata={})
    bare = save(load_file(product), models / "checkpoints/bare.safetensors")
    filled = {"command": "verify", "product": str(bare), "base": str(models / TINY)}
    for strength, state in ((0.8, "done"), (0.7, "failed")):
        adapters = [{"path": str(models / A), "strength": strength}]
        assert page.ended(page.call("run", **filled, adapters=adapters)["number"])["state"] == state
    command = page.call("preview", **filled, adapters=adapters)["command"]
    assert run(*shlex.split(command)[1:]).code == 6
    assert "no recipe" in page.call("run", command="verify", product=str(bare))["error"]["what"]


def test_several_files_are_inspected(page: Page, comfy: Path) -> None:
    adapters = [{"path": str(comfy / "models" / name)} for name in (A, "loras/b.safetensors")]
    for base in ("", str(comfy / "models" / TINY)):
        filled = {"command": "inspect", "base": base, "adapters": adapters}
        done = page.ended(page.call("run", **filled)["number"])
        assert done["state"] == "done" and all(Path(a["path"]).name in done["text"] for a in adapters)
        assert done["text"].count("20 of 20") == (2 if base else 0)
        assert run(*shlex.split(page.call("preview", **filled)["command"])[1:]).code == 0
    filled["adapters"][1] = {"path": str(comfy / "models/checkpoints/tuned.safetensors")}
    refused = page.call("preview", **filled)
    assert refused["at"] == "adapters.1" and refused["error"] == page.call("run", **filled)["error"]


def test_parts_have_the_presets_that_fit(page: Page, comfy: Path) -> None:
    parts = page.call("parts", path=str(comfy / "models/checkpoints/sd3.safetensors"))
    assert "ALL" in parts["presets"] and "MIDD" not in parts["presets"]
    assert page.call("parts", path="/etc/hostname")["error"]["kind"] == "UsageError"


def test_dropped_file_is_uploaded(page: Page, comfy: Path) -> None:
    content = (comfy / "models/loras/b.safetensors").read_bytes()
    kind = {"Content__Type": "application/octet-stream"}
    reply = page.send("POST", f"{page.root}api/upload?name=new%20one.safetensors", content, **kind)
    assert json.loads(reply.body) == {"path": str(comfy / "dropped/new one.safetensors")}
    assert (comfy / "dropped/new one.safetensors").read_bytes() == content
    assert page.send("POST", f"{page.root}api/upload?name=..%2Fx.safetensors", content, **kind).status == 422
    foreign = page.send(
        "POST", f"{page.root}api/upload?name=y.safetensors", content, Origin="http://evil.example", **kind
    )
    assert foreign.status == 403


def test_report_has_an_origin_of_its_own(comfy: Path) -> None:
    pytest.importorskip("plotly")
    with serving(comfy, pictures=True) as page:
        number = page.call("run", **form("ties", comfy))["number"]
        assert page.ended(number)["page"] is True
        reply = page.send("GET", f"{page.root}report/{number}")
        assert reply.status == 200 and b"histogram" in reply.body
        assert reply.headers["content-security-policy"].startswith("sandbox allow-scripts;")
        assert page.send("GET", f"{page.root}report/99").status == 404


def test_page_is_answered_while_the_program_is_imported(comfy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To import all that merges takes a second: the calls wait for it, the page does not."""
    for name in [m for m in sys.modules if m.startswith("lora_merge.ui")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("lora_merge.files.checkpoint", "lora_merge.viewing.inspect", "lora_merge.batch.run"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of one of these fails
    from lora_merge.ui.library import Library
    from lora_merge.ui.server import Server

    imported = threading.Event()

    def broken() -> Any:
        imported.wait(30)
        raise ImportError("no numpy")

    library = Library([comfy])
    server = Server(library, broken)
    thread = threading.Thread(target=server.run)
    thread.start()
    page = Page(library, None, server.address)  # type: ignore[arg-type]  # there is none
    for name in ("", "page.css", "page.js"):
        assert page.send("GET", f"{page.root}{name}").status == 200
    imported.set()
    answer = page.send("POST", f"{page.root}api/start", b"{}", Content__Type=JSON)
    assert answer.status == 422 and "no numpy" in json.loads(answer.body)["error"]["what"]
    server.stop()
    thread.join()


def test_command_without_its_libraries_names_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [m for m in sys.modules if m.startswith(("lora_merge.ui", "starlette", "uvicorn"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    answer = run("ui", tmp_path, "--no-browser")
    assert answer.code == 2 and "pip install starlette uvicorn" in answer.err


def test_command_refuses_a_folder_that_is_not_there_and_a_port_in_use(page: Page, tmp_path: Path) -> None:
    answer = run("ui", tmp_path / "none", "--no-browser")
    assert answer.code == 3 and "folder not found" in answer.err
    answer = run("ui", tmp_path, "--no-browser", "--port", page.port)
    assert answer.code == 2 and f"--port {page.port}" in answer.err


def test_outputs_do_not_replace_without_leave(page: Page, comfy: Path) -> None:
    target = comfy / "out/x.safetensors"
    target.parent.mkdir()
    merge(comfy / "models" / TINY, comfy / "models/loras/b.safetensors", target)
    content, filled = target.read_bytes(), form("ties", comfy)
    assert page.call("run", **filled)["error"]["fix"]
    assert target.read_bytes() == content
    assert page.ended(page.call("run", **filled, overwrite=True)["number"])["state"] == "done"
    assert target.read_bytes() != content


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals of other processes are those of POSIX")
def test_program_prints_its_address_and_ends_with_ctrl_c(comfy: Path) -> None:
    command = [sys.executable, "-m", "lora_merge", "ui", str(comfy), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None and program.stderr is not None
        address = program.stdout.readline().split()[-1]
        parts = urlsplit(address)
        connection = HTTPConnection(parts.netloc, timeout=60)
        connection.request("GET", parts.path)
        assert connection.getresponse().status == 200
        connection.close()
        program.send_signal(signal.SIGINT)
        assert program.wait(60) == 130
        assert "nothing was left behind" in program.stderr.read()

"""Outputs that are uploaded to S3, served by moto."""

from __future__ import annotations

import json
import select
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

import lora_merge
from lora_merge.disk import hashes
from lora_merge.engine.pipeline import Pipeline
from lora_merge.errors import ResourceError
from lora_merge.sources import object_upload, sent_files
from tests.kit.command_line import Command
from tests.kit.files import load
from tests.kit.folders import llama_folder, peft_folder
from tests.sources.server import sha256

obstore = pytest.importorskip("obstore")
boto3 = pytest.importorskip("boto3")

MERGE = ("base.safetensors", "style.safetensors:0.5")


def names(prefix: str = "out/") -> list[str]:
    rows = obstore.list(obstore.store.S3Store("models"), prefix)
    return sorted(str(row["path"]) for some in rows for row in some)


def unfinished(server: str) -> list[str]:
    return [upload["Key"] for upload in uploads(server)]


def uploads(server: str) -> list[Any]:
    answer = boto3.client("s3", endpoint_url=server).list_multipart_uploads(Bucket="models")
    return list(answer.get("Uploads", []))


@pytest.fixture
def out(bucket: Any, server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The bucket, with small parts; at its end nothing that tests have uploaded is left."""
    monkeypatch.setattr(object_upload, "PART", 8 << 10)
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1 << 10)
    yield bucket
    for name in names():
        obstore.delete(bucket, name)
    for upload in uploads(server):
        boto3.client("s3", endpoint_url=server).abort_multipart_upload(
            Bucket="models", Key=upload["Key"], UploadId=upload["UploadId"]
        )
    assert not [*tmp_path.rglob("lora-merge-uploads/*")]


def test_merge_to_an_object_is_the_file_of_the_merge(out: Any, run: Command) -> None:
    assert run(*MERGE, "-o", "a.safetensors")[0] == 0
    code, text, err = run(*MERGE, "-o", "s3://models/out/a", "--json")
    report = json.loads(text)
    assert code == 0 and report["output"] == "s3://models/out/a.safetensors", err
    assert report["notes"][-1].endswith("the MD5 of all bytes is that of what was sent")
    assert bytes(obstore.get(out, "out/a.safetensors").bytes()) == Path("a.safetensors").read_bytes()
    assert "secret" not in text + err
    code, _, err = run(*MERGE, "-o", "s3://models/out/a")
    assert code == 2 and "the output exists" in err
    code, text, _ = run(*MERGE, "-o", "s3://models/out/a", "--dry-run")
    assert code == 0 and "the output exists" in text and "first, with" in text
    assert run("base.safetensors", "style.safetensors", "-o", "s3://models/out/a", "--overwrite")[0] == 0
    code, _, err = run("verify", "s3://models/out/a.safetensors")
    assert code == 0, err


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), pytest.param(OSError("broken"), marks=pytest.mark.slow)])
def test_upload_that_ends_early_leaves_neither_objects_nor_parts(
    out: Any, run: Command, server: str, monkeypatch: pytest.MonkeyPatch, stop: BaseException
) -> None:
    write = object_upload.ObjectWriter.write

    def stopped(upload: Any) -> Iterator[int]:
        yield from write(upload)
        assert unfinished(server) == [upload.key]
        raise stop

    monkeypatch.setattr(object_upload.ObjectWriter, "write", stopped)
    code, _, err = run(*MERGE, "-o", "s3://models/out/a")
    assert code == (130 if isinstance(stop, KeyboardInterrupt) else 5), err
    assert not names() and not unfinished(server)


def test_files_are_sent_while_the_rest_is_written(
    out: Any, run: Command, server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A shard is sent when it is written, and a file whose base has a known hash while it is; a proof that fails then
    leaves nothing."""
    llama_folder(tmp_path / "tiny", 3), peft_folder(tmp_path / "peft")
    monkeypatch.setattr(object_upload, "PART", 1 << 10)
    monkeypatch.setattr(sent_files, "PIECE", 1 << 12)
    finish, under_way = Pipeline._finish, list[list[str]]()

    def waiting(pipeline: Pipeline, number: int) -> None:
        end = time.monotonic() + 30
        while not (keys := unfinished(server)) and time.monotonic() < end:
            time.sleep(0.01)
        under_way.append(keys)
        finish(pipeline, number)

    monkeypatch.setattr(Pipeline, "_finish", waiting)
    code, _, err = run("tiny", "peft:0.5", "-o", "s3://models/out/tiny")
    assert code == 0 and under_way == [["out/tiny/model-00002-of-00003.safetensors"]], err
    base = tmp_path / MERGE[0]
    hashes.know(base, sha256(base.read_bytes()))
    monkeypatch.setattr("lora_merge.engine.merge.verify", lambda *_, **__: (_ for _ in ()).throw(OSError("no proof")))
    code, _, err = run(*MERGE, "-o", "s3://models/out/a")
    assert code and under_way[1:] == [["out/a.safetensors"]], err
    assert not unfinished(server) and "out/a.safetensors" not in names()


@pytest.mark.parametrize("reachable", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_name_whose_reply_is_lost_is_looked_up(
    out: Any, run: Command, monkeypatch: pytest.MonkeyPatch, *, reachable: bool
) -> None:
    """The upload has succeeded if the object is there; if that cannot be found out, the error names it."""
    complete = object_upload.ObjectWriter.complete

    def lose(upload: Any) -> None:
        writer = upload._writer

        class Losing:
            def close(self) -> None:
                writer.close()
                if not reachable:
                    monkeypatch.setattr("obstore.head", lambda *_: (_ for _ in ()).throw(OSError("no network")))
                raise OSError("the reply is lost")

        upload._writer = Losing()
        complete(upload)

    monkeypatch.setattr(object_upload.ObjectWriter, "complete", lose)
    code, _, err = run(*MERGE, "-o", "s3://models/out/a")
    assert code == (0 if reachable else 5) and names() == ["out/a.safetensors"], err
    assert reachable or "may be left there: out/a.safetensors" in err


def test_parts_of_an_object_that_gets_no_name_are_named(
    out: Any, run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """obstore forgets the parts of an object that it could not complete, so nothing can remove them."""

    def forget(upload: Any) -> None:
        upload._asked = True
        upload._writer.__exit__(OSError, OSError(), None)
        upload._writer.close()

    monkeypatch.setattr(object_upload.ObjectWriter, "complete", forget)
    code, _, err = run(*MERGE, "-o", "s3://models/out/a")
    assert code == 5 and "may be left there: out/a.safetensors" in err and not names(), err


@pytest.mark.slow
def test_damaged_upload_is_removed_and_reported(out: Any, run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    complete = object_upload.ObjectWriter.complete

    def damage(upload: Any) -> None:
        complete(upload)
        content = bytearray(bytes(obstore.get(out, upload.key).bytes()))
        content[len(content) // 2] ^= 1
        obstore.put(out, upload.key, bytes(content))

    monkeypatch.setattr(object_upload.ObjectWriter, "complete", damage)
    code, _, err = run(*MERGE, "-o", "s3://models/out/a")
    assert code == 6 and "is not the one that was sent" in err and not names(), err


@pytest.mark.slow
def test_folder_is_complete_with_its_index_last(
    out: Any, run: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    llama_folder(tmp_path / "tiny"), peft_folder(tmp_path / "peft")
    order: list[str] = []
    complete = object_upload.ObjectWriter.complete
    monkeypatch.setattr(object_upload.ObjectWriter, "complete", lambda u: (order.append(u.key), complete(u)))
    assert run("tiny", "peft:0.5", "-o", "there")[0] == 0
    code, text, err = run("tiny", "peft:0.5", "-o", "s3://models/out/tiny", "--json")
    assert code == 0 and json.loads(text)["output"] == "s3://models/out/tiny", err
    assert names() == sorted(f"out/tiny/{p.name}" for p in Path("there").iterdir())
    for path in (p for p in Path("there").iterdir() if p.name != "README.md"):  # whose title is the folder's name
        assert bytes(obstore.get(out, f"out/tiny/{path.name}").bytes()) == path.read_bytes()
    assert order[0].endswith(".safetensors") and order[-1] == "out/tiny/model.safetensors.index.json"
    code, _, err = run("verify", "s3://models/out/tiny", "--full")
    assert code == 0, err
    obstore.put(out, "out/tiny/other.txt", b"")
    code, _, err = run("tiny", "peft", "-o", "s3://models/out/tiny", "--overwrite")
    assert code == 2 and "other.txt" in err
    assert run(*MERGE, "-o", "s3://models/out/carded", "--card")[0] == 0
    assert b"lora-merge" in bytes(obstore.get(out, "out/carded.md").bytes())
    obstore.delete(out, "out/tiny/other.txt")
    assert run("tiny", "peft", "-o", "s3://models/out/tiny", "--overwrite")[0] == 0


@pytest.mark.slow
def test_every_command_that_writes_takes_an_address(out: Any, run: Command, tmp_path: Path) -> None:
    llama_folder(tmp_path / "tiny"), peft_folder(tmp_path / "peft")
    style, to = "style.safetensors", "s3://models/out/"
    calls = [
        ("resize", style, "--rank", "2"), ("convert", style, "--to", "comfy", "--base", "base.safetensors"), ("combine", style, style),
        ("average", style, style), ("extract", "base.safetensors", "merged.safetensors", "--rank", "4"),
        ("unmerge", "merged.safetensors"), ("replay", "merged.safetensors"), ("resize", "peft", "--rank", "2"),
    ]  # fmt: skip
    assert run(*MERGE, "-o", "merged.safetensors")[0] == 0
    for n, call in enumerate(calls):
        name = f"{n}" if call[1] == "peft" else f"{n}.safetensors"
        code, text, err = run(*call, "-o", f"{to}{name}", "--json")
        assert code == 0 and json.loads(text)["output"] == f"{to}{name}", (call, err)
        assert run(*call, "-o", name)[0] == 0
        files = [Path(name)] if Path(name).is_file() else [*Path(name).iterdir()]
        for path in files:
            key = f"out/{name}" if path == Path(name) else f"out/{name}/{path.name}"
            assert bytes(obstore.get(out, key).bytes()) == path.read_bytes(), key
    report = lora_merge.merge("base.safetensors", style, "s3://models/out/python")
    assert report.output == "s3://models/out/python.safetensors" and "out/python.safetensors" in names()
    code, _, err = run("convert", style, "--to", "comfy", "--base", "base.safetensors", "-o", "s3://models/out/")
    assert code == 0 and "out/style.comfy.safetensors" in names(), err


class Proxy(socketserver.ThreadingTCPServer):
    """Passes bytes on to a server; the next connections are cut after so many bytes that the client has sent."""

    daemon_threads = True

    def __init__(self, server: str, cuts: list[int]) -> None:
        host, _, port = server.removeprefix("http://").partition(":")
        self.place, self.cuts, self.cut = (host, int(port)), cuts, 0
        super().__init__(("127.0.0.1", 0), Passing)


class Passing(socketserver.BaseRequestHandler):
    server: Proxy

    def handle(self) -> None:
        """Pass on what comes from either side."""
        there, sent = socket.create_connection(self.server.place), 0
        with there:
            while True:
                for side in select.select([self.request, there], [], [])[0]:
                    data = side.recv(1 << 16)
                    sent += len(data) if side is self.request else 0
                    if self.server.cuts and sent > self.server.cuts[0]:
                        self.server.cuts.pop(0)
                        self.server.cut += 1
                        return
                    if not data:
                        return
                    (there if side is self.request else self.request).sendall(data)


@pytest.mark.slow
def test_connections_that_are_cut_are_made_again(out: Any, run: Command, server: str) -> None:
    with Proxy(server, [6000]) as proxy, pytest.MonkeyPatch.context() as patch:
        threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_address[1]}")
        assert run(*MERGE, "-o", "a.safetensors")[0] == 0
        code, _, err = run(*MERGE, "-o", "s3://models/out/a")
        proxy.shutdown()
    assert code == 0 and proxy.cut == 1 and not unfinished(server), err
    assert bytes(obstore.get(out, "out/a.safetensors").bytes()) == Path("a.safetensors").read_bytes()


@pytest.mark.slow
def test_batch_writes_to_a_bucket_and_skips_what_is_there(out: Any, run: Command, tmp_path: Path) -> None:
    jobs = {"version": 1, "jobs": [
        {"base": "s3://models/sd/base.safetensors", "adapters": [{"path": "style.safetensors", "strength": "{s}"}],
         "matrix": {"s": [0.25, 0.5]}, "output": "s3://models/out/style-{s}.safetensors"},
        {"command": "resize", "adapters": ["style.safetensors"], "rank": 2, "output": "s3://models/out/small"},
    ]}  # fmt: skip
    Path("jobs.yaml").write_text(json.dumps(jobs))
    code, text, err = run("batch", "jobs.yaml", "--json")
    rows = [json.loads(line) for line in text.splitlines()]
    assert code == 0 and names() == [
        "out/small.safetensors",
        "out/style-0.25.safetensors",
        "out/style-0.5.safetensors",
    ], err
    assert {row["output"] for row in rows} == {f"s3://models/{name}" for name in names()}
    code, text, err = run("batch", "jobs.yaml", "--json", "--workers", "2")
    assert code == 0 and [json.loads(line)["status"] for line in text.splitlines()] == ["skipped"] * 3, err
    obstore.delete(out, "out/style-0.5.safetensors")
    code, text, err = run("batch", "jobs.yaml", "--json", "--workers", "2")
    assert code == 0 and len(names()) == 3, err


def test_parts_that_may_be_left_end_one_job_of_a_group_alone(
    out: Any, run: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    finish = Pipeline._finish
    hashes.know(base := tmp_path / MERGE[0], sha256(base.read_bytes()))

    def fail_first(pipeline: Pipeline, number: int) -> None:
        finish(pipeline, number)
        if not number:
            monkeypatch.setattr(object_upload.ObjectWriter, "remove", lambda _: False)
            raise ResourceError("no memory", "this machine", "try again")

    monkeypatch.setattr(Pipeline, "_finish", fail_first)
    job = {"base": MERGE[0], "adapters": ["style.safetensors:{s}"], "matrix": {"s": [0.25, 0.5]},
           "output": "s3://models/out/style-{s}.safetensors"}  # fmt: skip
    Path("jobs.yaml").write_text(json.dumps({"version": 1, "jobs": [job]}))
    code, text, err = run("batch", "jobs.yaml", "--json")
    rows = [json.loads(line) for line in text.splitlines()]
    assert code and [row["status"] for row in rows[:2]] == ["failed", "merged"], err + text
    assert "may be left there: out/style-0.25.safetensors" in rows[0]["error"]["where"]
    assert names() == ["out/style-0.5.safetensors"]


@pytest.mark.slow
def test_output_in_place_of_an_object_that_is_read_is_refused(out: Any, run: Command) -> None:
    where = "s3://models/sd/base.safetensors"
    code, _, err = run(where, "style.safetensors", "-o", where, "--overwrite")
    assert code == 2 and "would replace" in err and where in err


@pytest.mark.slow
def test_role_that_may_not_write_is_named(out: Any, run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise obstore.exceptions.PermissionDeniedError("https://secret?X-Amz-Signature=secret")

    monkeypatch.setattr("obstore.open_writer", refused)
    code, _, err = run(*MERGE, "-o", "s3://models/out/a")
    assert code == 2 and "PutObject" in err and "secret" not in err


def test_bucket_that_is_missing_is_named(out: Any, run: Command) -> None:
    """A listing of it fails with an error whose text alone has the status."""
    for output in ("s3://nobody/x.safetensors", "s3://nobody/folder/"):
        code, _, err = run(*MERGE, "-o", output)
        assert code == 2 and "there is no such bucket" in err


@pytest.mark.slow
def test_merge_from_and_to_google(
    out: Any, run: Command, server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its API for objects is that of S3, so moto serves it."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication

    key = {"gcs_base_url": server, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    (tmp_path / "key.json").write_text(json.dumps(key))
    everyone = {"Effect": "Allow", "Principal": "*", "Action": "*", "Resource": "arn:aws:s3:::models/*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [everyone]})
    boto3.client("s3", endpoint_url=server).put_bucket_policy(Bucket="models", Policy=policy)
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "key.json"))
    infer = DomainDispatcherApplication.infer_service_region_host

    def without_token(app: Any, environ: dict[str, str], path: str) -> Any:
        if environ.get("HTTP_AUTHORIZATION", "").strip() == "Bearer":  # with which moto fails
            del environ["HTTP_AUTHORIZATION"]
        return infer(app, environ, path)

    monkeypatch.setattr(DomainDispatcherApplication, "infer_service_region_host", without_token)
    assert run(*MERGE, "-o", "a.safetensors")[0] == 0
    code, _, err = run(
        "gs://models/sd/base.safetensors", "gs://models/sd/style.safetensors:0.5", "-o", "gs://models/out/a"
    )
    assert code == 0 and names() == ["out/a.safetensors"] and not unfinished(server), err
    code, _, err = run("verify", "gs://models/out/a.safetensors")
    assert code == 0, err
    tensors, uploaded = load(Path("a.safetensors")), tmp_path / "uploaded.safetensors"
    uploaded.write_bytes(bytes(obstore.get(out, "out/a.safetensors").bytes()))
    assert all((load(uploaded)[name] == tensor).all() for name, tensor in tensors.items())
    assert run(*MERGE, "-o", "gs://nobody/out/a")[0] == 2


def test_pieces_are_all_bytes_of_a_file_if_reads_return_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Short(BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(min(size or 0, 7))

    monkeypatch.setattr(sent_files, "BytesIO", Short)
    content = bytes(range(100))
    assert b"".join(sent_files.GrowingFile(content, 100, 100).pieces()) == content

"""Servers on the loopback interface: the hub's file API, Civitai's API, plain files, and a store on another port that
refuses tokens, as signed stores do."""

from __future__ import annotations

import hashlib
import json
import mmap
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_secretsecretsecretsecret"
SIGNATURE = "secretsignature"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Request:
    """One request that a server got."""

    server: str
    method: str
    path: str
    range: str
    token: str
    agent: str


@dataclass
class Machines:
    """What the servers have, what they were asked, and how they fail."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    commits: dict[str, str] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    versions: dict[str, dict[str, Any]] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    early: set[str] = field(default_factory=set)
    files: dict[str, bytes] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    """Status of the next answers, in place of what was asked for."""
    breaks: list[int] = field(default_factory=list)
    """Bytes after which the connections of the next downloads break."""
    range_breaks: list[int] = field(default_factory=list)
    """The same for requests of a range with an end."""
    failure: tuple[int, int] | None = None
    """Bytes after which all requests fail, and the status of their answers; 0: the connection is closed without one."""
    damage: Callable[[bytes], bytes] | None = None
    """What becomes of the content of a file on its way; its ETag stays."""
    delay: float = 0.0
    """Seconds before each answer."""
    after: Callable[[], None] | None = None
    """Is called after the last of them."""
    etags: dict[str, str] = field(default_factory=dict)
    created: dict[str, str] = field(default_factory=dict)
    """Repositories that were created → their visibility."""
    writers: set[str] = field(default_factory=lambda: {TOKEN})
    """Tokens that may write; `users` may create repositories of these names."""
    users: tuple[str, ...] = ("me",)
    uploads: list[str] = field(default_factory=list)
    """SHA-256 of what was sent to the store of large files."""
    upload_breaks: list[int] = field(default_factory=list)
    """Bytes after which the connections of the next uploads break."""
    upload_gate: threading.Event | None = None
    """All uploads but the first wait for it."""
    corrupt: bool = False
    """Whether what is uploaded is damaged in the store."""
    large: int = 1000
    """Bytes from which on a file of a repository is in the store."""
    url: str = ""
    store: str = ""

    def commit(self, name: str) -> str:
        return self.commits.get(name, COMMIT)

    def tree(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Return the commit and the files of a branch, or of its last commit; other branches are `name@branch`."""
        for key in (name, *(k for k in self.repositories if k.startswith(f"{name}@"))):
            if revision in (key.partition("@")[2] or "main", self.commit(key)) and key in self.repositories:
                return self.commit(key), self.repositories[key]
        return None

    def bytes_sent(self, server: str = "") -> int:
        return sum(self.sent[n] for n, r in enumerate(self.requests) if server in ("", r.server))

    sent: list[int] = field(default_factory=list)

    def civitai(self, version: int, files: list[dict[str, Any]], model: int = 7, **facts: Any) -> None:
        """Publish a version; each file has `content`."""
        listed = []
        for file in files:
            content = file.pop("content")
            digest = hashlib.sha256(content).hexdigest().upper()
            self.blobs[str(file["id"])] = content
            listed.append({"type": "Model", "sizeKB": len(content) / 1024, "hashes": {"SHA256": digest}, **file})
        self.versions[str(version)] = {"id": version, "modelId": model, "files": listed, **facts}


class Hollow(mmap.mmap):
    """The content of a file that may have full size and no data: no test reads all of it."""

    @classmethod
    def of(cls, path: Path) -> Hollow:
        with path.open("rb") as f:
            return cls(f.fileno(), 0, access=mmap.ACCESS_READ)


@lru_cache(32)
def sha256(content: bytes) -> str:
    if isinstance(content, Hollow):
        return hashlib.sha256(b"hollow %d" % len(content)).hexdigest()
    return hashlib.sha256(content).hexdigest()


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    machines: Machines
    name: str

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, machines = unquote(urlsplit(self.path).path), self.machines
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        machines.requests.append(
            Request(
                self.name, self.command, path, self.headers.get("Range", ""), token, self.headers.get("User-Agent", "")
            )
        )
        machines.sent.append(0)
        self.number = len(machines.sent) - 1
        time.sleep(machines.delay)
        if machines.failure is not None and sum(machines.sent) >= machines.failure[0]:
            if machines.failure[1]:
                self.give(machines.failure[1], b"", {"Retry-After": "0"})
            self.close_connection = True
            return
        if machines.answers and (status := machines.answers.pop(0)):
            self.give(status, b"", {"Retry-After": "0"})
            return
        if self.name == "store":
            self.of_store(path, token)
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/auth-check/write", path):
            self.give(200 if token in machines.writers else 403)
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/refs", path):
            branches = [k.partition("@")[2] or "main" for k in machines.repositories if k.partition("@")[0] == match[1]]
            rows = [{"name": b, "ref": f"refs/heads/{b}", "targetCommit": COMMIT} for b in branches]
            self.give(200, json.dumps({"branches": rows, "converts": [], "tags": []}).encode())
        elif path == "/api/whoami-v2":
            role = {"auth": {"accessToken": {"role": "write" if token in machines.writers else "read"}}}
            me = {"name": machines.users[0], "orgs": [{"name": n} for n in machines.users[1:]], **role}
            self.give(200 if token else 401, json.dumps(me).encode())
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self.info(match[1], match[2] or "main", token)
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self.resolve(match[1], match[2], match[3], token)
        elif match := re.fullmatch(r"/api/v1/models/([^/]+/[^/]+)/repo(/files)?", path):
            self.of_modelscope(match[1], parse_qs(urlsplit(self.path).query), listing=bool(match[2]))
        elif path.startswith(("/api/v1/", "/api/download/")):
            self.of_civitai(path, token)
        elif path.removeprefix("/files/") in machines.files:
            name = path.removeprefix("/files/")
            content = machines.files[name]
            self.content(content, machines.etags.get(name, f'"{sha256(content)}"'))
        else:
            self.give(404)

    def info(self, name: str, revision: str, token: str) -> None:
        machines = self.machines
        if name not in machines.repositories:
            self.give(401, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
            return
        tree = machines.tree(name, revision)
        if tree is None:
            self.give(404, b"", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
            return
        siblings = [{"rfilename": file, **self.facts(content)} for file, content in tree[1].items()]
        body = {"id": name, "modelId": name, "sha": tree[0], "siblings": siblings, "tags": [],
                "private": False, "downloads": 0, "likes": 0}  # fmt: skip
        self.give(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def facts(self, content: bytes) -> dict[str, Any]:
        large = len(content) >= self.machines.large
        entry: dict[str, Any] = {"size": len(content), "blobId": (sha256(content)[:40] if large else git_hash(content))}
        if large:
            entry["lfs"] = {"sha256": sha256(content), "size": len(content), "pointerSize": 130}
        return entry

    def do_PUT(self) -> None:
        """Take the content of a large file."""
        machines, length = self.machines, int(self.headers["Content-Length"])
        if machines.upload_breaks:
            self.rfile.read(min(length, machines.upload_breaks.pop(0)))
            self.close_connection = True
            self.connection.close()
            return
        content = self.rfile.read(length)
        if machines.upload_gate is not None and machines.uploads and not machines.upload_gate.wait(60):
            return
        if self.headers.get("Authorization") or SIGNATURE not in self.path:
            self.give(403)
            return
        machines.blobs[sha256(content)] = content[:-1] + b"?" if machines.corrupt else content
        machines.uploads.append(sha256(content))
        self.give(200)

    def do_POST(self) -> None:
        """Answer what changes a repository, or asks about many files of one."""
        from tests.sources.hub_writes import answer

        path, token = unquote(urlsplit(self.path).path), self.headers.get("Authorization", "").removeprefix("Bearer ")
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.machines.requests.append(Request(self.name, "POST", path, "", token, self.headers.get("User-Agent", "")))
        self.machines.sent.append(0)
        self.number = len(self.machines.sent) - 1
        if self.machines.answers and (status := self.machines.answers.pop(0)):
            self.give(status, b"", {"Retry-After": "0"})
            return
        status, value, headers = answer(self.machines, path, body, token)
        self.give(status, json.dumps(value).encode(), {"Content-Type": "application/json", **headers})

    def resolve(self, name: str, revision: str, file: str, token: str) -> None:
        machines = self.machines
        tree = machines.tree(name, revision)
        commit = {"X-Repo-Commit": tree[0] if tree else ""}
        if tree is None:
            self.give(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif name in machines.gated and token != TOKEN:
            self.give(403 if token else 401, b"", {**commit, "X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
        elif file not in tree[1]:
            self.give(404, b"", {**commit, "X-Error-Code": "EntryNotFound"})
        else:
            content = tree[1][file]
            if len(content) < machines.large:
                self.content(content, f'"{git_hash(content)}"', commit)
                return
            machines.blobs.setdefault(sha256(content), content)
            linked = {"X-Linked-Size": str(len(content)), "X-Linked-ETag": f'"{sha256(content)}"', **commit}
            self.give(302, b"", {**linked, "Location": f"{machines.store}/blob/{sha256(content)}?X-Sig={SIGNATURE}"})

    def of_modelscope(self, name: str, query: dict[str, list[str]], *, listing: bool) -> None:
        files = self.machines.repositories.get(name)
        if files is None or query.get("Revision", [""])[0] not in ("master", COMMIT):
            self.give(404)
        elif listing:
            rows = [{"Path": file, "Name": file.rpartition("/")[2], "Type": "blob", "Size": len(content),
                     "Sha256": sha256(content), "Revision": COMMIT} for file, content in files.items()]  # fmt: skip
            self.give(
                200, json.dumps({"Code": 200, "Data": {"Files": [{"Path": "sub", "Type": "tree"}, *rows]}}).encode()
            )
        else:
            content = files.get(query["FilePath"][0])
            self.give(404) if content is None else self.content(content, f'"{sha256(content)}"')

    def of_civitai(self, path: str, token: str) -> None:
        machines = self.machines
        if self.command == "HEAD":  # whoever sends HEAD to Civitai gets odd answers
            self.give(400)
        elif "Python-urllib" in self.headers.get("User-Agent", ""):
            self.give(403)
        elif (match := re.fullmatch(r"/api/v1/model-versions/(\d+)", path)) and match[1] in machines.versions:
            self.give(200, json.dumps(machines.versions[match[1]]).encode())
        elif match := re.fullmatch(r"/api/v1/model-versions/by-hash/(\w+)", path):
            for version in machines.versions.values():
                if any(f["hashes"]["SHA256"].lower() == match[1].lower() for f in version["files"]):
                    self.give(200, json.dumps(version).encode())
                    return
            self.give(404)
        elif match := re.fullmatch(r"/api/v1/models/(\d+)", path):
            versions = [v for v in machines.versions.values() if str(v["modelId"]) == match[1]]
            self.give(
                200 if versions else 404, json.dumps({"id": int(match[1]), "modelVersions": versions[::-1]}).encode()
            )
        elif match := re.fullmatch(r"/api/download/models/(\d+)", path):
            number = parse_qs(urlsplit(self.path).query).get("fileId", [""])[0]
            if match[1] in machines.early and token != TOKEN:
                self.give(401)
            elif number in machines.blobs:
                self.give(307, b"", {"Location": f"{machines.store}/blob/{number}?X-Amz-Signature={SIGNATURE}"})
            else:
                self.give(404)
        else:
            self.give(404)

    def of_store(self, path: str, token: str) -> None:
        if token:
            self.give(400)
        elif SIGNATURE not in self.path:
            self.give(403)
        else:
            name = path.removeprefix("/blob/")
            content = self.machines.blobs.get(name)
            self.give(404) if content is None else self.content(
                content, self.machines.etags.get(name, f'"{sha256(content)}"')
            )

    def content(self, content: bytes, etag: str, headers: dict[str, str] | None = None) -> None:
        content = content if self.machines.damage is None else self.machines.damage(content)
        headers = {"ETag": etag, "Accept-Ranges": "bytes", **(headers or {})}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted and self.headers.get("If-Range", etag) == etag:
            first, last = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
            if first >= len(content):
                self.give(416, b"", {"Content-Range": f"bytes */{len(content)}"})
                return
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            self.give(206, content[first : last + 1], headers)
        else:
            self.give(200, content, headers)

    def give(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        bounded = re.fullmatch(r"bytes=\d+-\d+", self.headers.get("Range", "")) is not None
        breaks = self.machines.range_breaks if bounded else self.machines.breaks
        if len(body) > 1 and status in (200, 206) and breaks and body[:1] != b"{":
            body = body[: breaks.pop(0)]
            self.close_connection = True
            if not breaks and self.machines.after is not None:
                self.machines.after()
        self.machines.sent[self.number] += len(body)
        self.wfile.write(body)


class Quiet(ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """Say nothing of clients that have read enough."""


@contextmanager
def serving(machines: Machines) -> Iterator[Machines]:
    """Run the servers."""
    servers = []
    for name in ("api", "store"):
        handler = type("Of", (Handler,), {"machines": machines, "name": name})
        server = Quiet(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    api, store = (server.server_address[1] for server in servers)
    machines.url, machines.store = f"http://127.0.0.1:{api}", f"http://localhost:{store}"  # two hosts
    try:
        yield machines
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()

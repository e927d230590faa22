"""The hub's API by which repositories are made and committed to, for the servers of the tests."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

if TYPE_CHECKING:
    from tests.sources.server import Machines

Answer = tuple[int, Any, dict[str, str]]
MISSING: Answer = 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}


def answer(machines: Machines, path: str, body: bytes, token: str) -> Answer:  # noqa: PLR0911  # one for each request
    """Return status, value and headers of the answer to a POST."""
    if path == "/api/validate-yaml":
        return 200, {"errors": [], "warnings": []}, {}
    if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/paths-info/(.+)", path):
        return _facts(machines, match[1], match[2], parse_qs(body.decode())["paths"])
    if token not in machines.writers:
        return 403, {"error": "Forbidden: you do not have write access"}, {}
    if path == "/api/repos/create":
        return _create(machines, json.loads(body))
    if match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
        return 200, {"objects": [_place(machines, row) for row in json.loads(body)["objects"]]}, {}
    match = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|branch|commit)/(.+)", path)
    if match is None or match[1] not in machines.repositories:
        return MISSING
    key = match[1] if match[3] == "main" else f"{match[1]}@{match[3]}"
    if match[2] == "branch":
        machines.repositories[key] = dict(machines.repositories[match[1]])
        machines.commits[key] = machines.commit(match[1])
        return 200, {}, {}
    if match[2] == "preupload":
        files = [{"path": row["path"], "uploadMode": "lfs" if row["size"] >= machines.large else "regular",
                  "shouldIgnore": False} for row in json.loads(body)["files"]]  # fmt: skip
        return 200, {"files": files}, {}
    return _commit(machines, key, [json.loads(line) for line in body.splitlines()])


def _create(machines: Machines, asked: dict[str, Any]) -> Answer:
    name = f"{asked['organization']}/{asked['name']}"
    if asked["organization"] not in machines.users:
        return 403, {"error": "Forbidden"}, {}
    if name in machines.repositories:
        return 409, {"error": "exists", "url": f"{machines.url}/{name}"}, {}
    machines.repositories[name] = {".gitattributes": b"*.safetensors filter=lfs"}
    machines.created[name] = asked.get("visibility") or ("private" if asked.get("private") else "public")
    return 200, {"url": f"{machines.url}/{name}", "name": name}, {}


def _place(machines: Machines, row: dict[str, Any]) -> dict[str, Any]:
    from tests.sources.server import SIGNATURE

    if row["oid"] in machines.blobs:
        return row
    return {**row, "actions": {"upload": {"href": f"{machines.store}/put/{row['oid']}?X-Sig={SIGNATURE}"}}}


def _facts(machines: Machines, name: str, revision: str, paths: list[str]) -> Answer:
    from tests.sources.server import git_hash, sha256

    tree = machines.tree(name, revision)
    if tree is None:
        return MISSING
    rows = []
    for path in (p for p in paths if p in tree[1]):
        content = tree[1][path]
        row: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": git_hash(content)}
        if len(content) >= machines.large:
            row["lfs"] = {"oid": sha256(content), "size": len(content), "pointerSize": 130}
        rows.append(row)
    return 200, rows, {}


def _commit(machines: Machines, key: str, lines: list[dict[str, Any]]) -> Answer:
    header, tree = lines[0]["value"], dict(machines.repositories[key])
    if header.get("parentCommit", machines.commit(key)) != machines.commit(key):
        return 412, {"error": "the branch has moved"}, {}
    for line in lines[1:]:
        value = line["value"]
        if line["key"] == "lfsFile":
            if value["oid"] not in machines.blobs:
                return 400, {"error": "the file was not uploaded"}, {}
            tree[value["path"]] = machines.blobs[value["oid"]]
        else:
            tree[value["path"]] = base64.b64decode(value["content"])
    machines.repositories[key] = tree
    machines.commits[key] = hashlib.sha1(json.dumps(lines).encode()).hexdigest()
    url = f"{machines.url}/{key.partition('@')[0]}/commit/{machines.commits[key]}"
    return 200, {"commitUrl": url, "commitOid": machines.commits[key], "hookOutput": ""}, {}

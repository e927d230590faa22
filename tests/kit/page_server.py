"""The page of `lora-merge ui` on a free port, and calls as its script makes them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from lora_merge.ui.library import Library
from lora_merge.ui.previews import Previews
from lora_merge.ui.runs import ENDED, Queue
from lora_merge.ui.server import Server


class Reply(NamedTuple):
    """An answer of the server."""

    status: int
    headers: dict[str, str]
    body: bytes


class Page:
    """A client of the page."""

    def __init__(self, library: Library, queue: Queue, address: str) -> None:
        self.library, self.queue, self.address = library, queue, address
        self.port, self.root = urlsplit(address).port, urlsplit(address).path

    def send(self, method: str, path: str, body: bytes | Iterator[bytes] = b"", **headers: str) -> Reply:
        """A request with these headers; `__` in their names is a hyphen."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body, {name.replace("__", "-"): value for name, value in headers.items()})
            answer = connection.getresponse()
            return Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def call(self, name: str, **values: Any) -> Any:
        """The result of a call of the script."""
        reply = self.send(
            "POST", f"{self.root}api/{name}", json.dumps(values).encode(), Content__Type="application/json"
        )
        assert reply.status in (200, 422), reply
        return json.loads(reply.body)

    def measured(self) -> None:
        """Measure the disk, as the server of a user does when it starts."""
        Queue.estimate(self.queue, self.library.output)

    def ended(self, number: int, seconds: float = 60) -> dict[str, Any]:
        """A run of the queue, when it has ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            run: dict[str, Any] = next(r for r in self.call("queue")["runs"] if r["number"] == number)
            if run["state"] in ENDED:
                return run
            time.sleep(0.02)
        raise TimeoutError(f"run {number} takes more than {seconds} s")


@contextmanager
def serving(*folders: Path, output: Path | None = None, pictures: bool = False) -> Iterator[Page]:
    """The page for these folders."""
    library, queue = Library(folders, output), Queue(pictures=pictures)
    queue.estimate = lambda _: None  # type: ignore[method-assign]  # 32 MiB are written by `measured` alone
    server = Server(library, lambda: Previews(library, queue))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield Page(library, queue, server.address)
    finally:
        server.stop()
        thread.join()

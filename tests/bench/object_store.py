"""A small object store on the loopback interface that gives ranges of the files of a folder, as S3 does.

`python -m tests.bench.object_store FOLDER` prints its port. It checks no signature.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD of /BUCKET/NAME."""

    protocol_version = "HTTP/1.1"
    folder = Path()

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        """Answer without the content."""
        self.do_GET()

    def do_GET(self) -> None:
        """Answer with a range, or all of a file."""
        path = self.folder / self.path.partition("?")[0].rpartition("/")[2]
        if not path.is_file():
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        size = path.stat().st_size
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first, last = (int(span[1]), int(span[2] or size - 1)) if span else (0, size - 1)
        self.send_response(206 if span else 200)
        for name, value in {
            "ETag": f'"{size:x}"', "Last-Modified": formatdate(path.stat().st_mtime, usegmt=True),
            "Content-Length": str(last + 1 - first), **({"Content-Range": f"bytes {first}-{last}/{size}"} if span else {}),
        }.items():  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            with path.open("rb") as f, suppress(OSError):
                self.wfile.flush()
                while first <= last:
                    first += os.sendfile(self.connection.fileno(), f.fileno(), first, last + 1 - first)


if __name__ == "__main__":
    Handler.folder = Path(sys.argv[1])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    server.serve_forever()

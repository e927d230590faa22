"""The server: one page, its style and script, and the calls of the script, below a random token on the loopback.

No other page and no other user of the machine can drive it. The address has a token of 256 bits; the Host header must
name the loopback and the port, which stops names that were bound again to it; a foreign Origin is refused; a POST must
have a type that no form of another page can send; and the policy of the page allows only its own script.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import MergeError, UsageError, as_merge_error, failure
from ..text import json_text
from .library import Library

if TYPE_CHECKING:
    from .previews import Previews
    from .runs import Queue

HOST: Final = "127.0.0.1"
NAMES: Final = (HOST, "localhost", "[::1]")
"""Names of the loopback interface that a browser may use."""

JSON: Final = "application/json"
BYTES: Final = "application/octet-stream"

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""What the page may load: its own files alone."""

FRAMED: Final = "sandbox allow-scripts; frame-ancestors 'self'"
"""The policy of a report, which brings its own rules for scripts. Names in it are a stranger's text, so it has an
origin of its own."""

HEADERS: Final = {
    "Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin",
}  # fmt: skip

LONGEST: Final = 1 << 20  # bytes of a call

STATIC: Final = {"": ("page.html", "text/html"), "page.css": ("page.css", "text/css"),
                 "page.js": ("page.js", "text/javascript")}  # fmt: skip
"""Path below the token → file of this room and its type."""


class LoopbackGuard:
    """Refuses requests by any other page or name before anything else sees them."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with 403 or 415."""
        if scope["type"] == "http" and (why := self._refusal(Request(scope))):
            await Response(f"{why[1]}\n", why[0], HEADERS, "text/plain")(scope, receive, send)
            return
        if scope["type"] in ("http", "lifespan"):
            await self.app(scope, receive, send)

    def _refusal(self, request: Request) -> tuple[int, str] | None:
        if request.headers.get("host", "").lower() not in self.hosts:
            return 403, "this name is not that of the page"
        origin = request.headers.get("origin")
        if origin is not None and origin.lower() not in {f"http://{host}" for host in self.hosts}:
            return 403, "another page may not use this one"
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method == "POST" and kind not in (JSON, BYTES):
            return 415, "send JSON"
        return None


CALLS: Final[Mapping[str, Callable[[Previews, Mapping[str, Any]], Any]]] = {
    "start": lambda page, _: page.start(),
    "library": lambda page, _: page.library.to_dict(),
    "files": lambda page, values: page.files(values),
    "preview": lambda page, values: page.preview(values),
    "parts": lambda page, values: page.parts(str(values.get("path"))),
    "run": lambda page, values: page.run(values),
    "queue": lambda page, _: page.queue.to_dict(),
    "cancel": lambda page, values: _cancel(page.queue, values),
    "find": lambda page, values: page.find(str(values.get("name")), int(values.get("size") or 0)),
}
"""Call of the script → what answers it."""


def application(library: Library, previews: Future[Previews], token: str, port: int) -> ASGIApp:
    """Return the application below `/token/`. Its calls wait for `previews`; its files do not."""
    root = f"/{token}"
    routes = [Route(f"{root}/{name}", _static(*file)) for name, file in STATIC.items()]
    routes += [Route(f"{root}/api/{name}", _call(call, previews), methods=["POST"]) for name, call in CALLS.items()]
    routes.append(Route(f"{root}/api/upload", _uploading(library), methods=["POST"]))
    routes.append(Route(f"{root}/report/{{number:int}}", _reports(previews)))
    hosts = frozenset(f"{name}:{port}" for name in NAMES)
    return LoopbackGuard(Starlette(routes=routes), hosts)


def _static(name: str, kind: str) -> Callable[[Request], Response]:
    content = files(__package__).joinpath(name).read_bytes()
    return lambda _: Response(content, 200, {**HEADERS, "Content-Security-Policy": POLICY}, kind)


def _answer(value: Any, status: int = 200) -> Response:
    return Response(json_text(value), status, HEADERS, JSON)


def _failed(error: Exception) -> Response:
    return _answer(failure(as_merge_error(error, "lora-merge ui")), 422)


def _call(
    function: Callable[[Previews, Mapping[str, Any]], Any], previews: Future[Previews]
) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint that gives the JSON of a request to a function, and answers with its result."""

    async def endpoint(request: Request) -> Response:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > LONGEST:
                return Response("too long\n", 413, HEADERS, "text/plain")
        try:
            values = json.loads(bytes(body) or b"{}")
        except (ValueError, RecursionError) as e:
            return _failed(UsageError(f"the call is not valid JSON: {e}", "lora-merge ui", "load the page again"))
        if not isinstance(values, dict):
            return _failed(UsageError("the call is no table", type(values).__name__, "load the page again"))
        try:
            return _answer(await run_in_threadpool(lambda: function(previews.result(), values)))
        except Exception as e:  # noqa: BLE001  # whatever it is, the page shows it
            return _failed(e)

    return endpoint


def _uploading(library: Library) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint that takes a dropped file."""

    async def endpoint(request: Request) -> Response:
        stream, loop = request.stream(), asyncio.get_running_loop()

        async def chunk() -> bytes:
            return await anext(stream, b"")

        def read() -> bytes:  # in the thread that writes
            return asyncio.run_coroutine_threadsafe(chunk(), loop).result()

        length = request.headers.get("content-length", "")
        try:
            upload = library.upload(unquote(request.query_params.get("name", "")),
                                    int(length) if length.isdigit() else 0)  # fmt: skip
            path = await run_in_threadpool(upload.receive, read)
        except (MergeError, OSError) as e:
            return _failed(e)
        return _answer({"path": str(path)})

    return endpoint


def _reports(previews: Future[Previews]) -> Callable[[Request], Response]:
    """Return the endpoint of the page about a run, which the page shows in a frame."""

    def endpoint(request: Request) -> Response:
        from .runs import report_page

        run = previews.result().queue.run(request.path_params["number"])
        if run is None or run.result is None:
            return Response("there is no such report\n", 404, HEADERS, "text/plain")
        try:
            text = report_page(run)
        except (MergeError, OSError) as e:
            return Response(f"{as_merge_error(e, run.title)}\n", 422, HEADERS, "text/plain")
        return HTMLResponse(text.encode(errors="replace"), 200, {**HEADERS, "Content-Security-Policy": FRAMED})

    return endpoint


def _cancel(queue: Queue, values: Mapping[str, Any]) -> dict[str, Any]:
    run = queue.run(int(values.get("number") or 0))
    if run is not None:
        run.cancel()
    return queue.to_dict()


class Server:
    """The server on a port of the loopback interface. `address` is what a browser opens."""

    def __init__(self, library: Library, previews: Callable[[], Previews], port: int = 0) -> None:
        """Bind the port, 0 for any free one; UsageError if another program has it.

        `previews`: makes what answers the calls. It is called by `run`, while the browser loads the page: to import all
        that merges takes a second.
        """
        try:
            self._socket = socket.create_server((HOST, port))
        except (OSError, OverflowError) as e:
            raise UsageError(f"the port cannot be used: {e}", f"--port {port}", "name another port") from e
        number, token = self._socket.getsockname()[1], secrets.token_urlsafe(32)
        self._make, self._ends = previews, ExitStack()
        self._previews: Future[Previews] = Future()
        self.address = f"http://{HOST}:{number}/{token}/"
        config = uvicorn.Config(
            application(library, self._previews, token, number), log_level="error", access_log=False,
            server_header=False, lifespan="off", ws="none", timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._server = uvicorn.Server(config)

    def run(self) -> None:
        """Answer requests until a signal ends the program, or `stop` is called; then end what runs."""
        threading.Thread(target=self._open, name="opening", daemon=True).start()
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()
            self._ends.close()

    def stop(self) -> None:
        """End `run`, from any thread."""
        self._server.should_exit = True

    def _open(self) -> None:
        """Make what answers the calls, and let it look ahead."""
        try:
            previews = self._make()
            self._ends.enter_context(previews.queue)
        except Exception as e:  # noqa: BLE001  # every call answers with it
            self._previews.set_exception(e)
            return
        self._previews.set_result(previews)
        previews.warm_up()

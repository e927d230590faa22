"""Plays the program in a pseudo terminal of a chosen width, and tells what a person would see."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from lora_merge.cli import main as program
from lora_merge.cli.stdio import SafeStream

pty, fcntl, termios = (
    pytest.importorskip(name, reason="no pseudo terminals here") for name in ("pty", "fcntl", "termios")
)

_COMMAND = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")


@dataclass
class Played:
    code: int
    text: str  # all that was sent to the terminal
    screen: list[str]  # what stands on it at the end
    redraws: int
    longest: float  # seconds without anything sent


@contextmanager
def terminal(columns: int) -> Iterator[tuple[int, list[tuple[float, bytes]]]]:
    """The descriptor of a pseudo terminal, and what arrives there, when."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    arrived: list[tuple[float, bytes]] = []

    def listen() -> None:
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # Linux: the other end is closed
                return
            if not part:
                return
            arrived.append((time.monotonic(), part))

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        yield theirs, arrived
    finally:
        os.close(theirs)
        thread.join()
        os.close(ours)


def _played(code: int, arrived: list[tuple[float, bytes]], columns: int) -> Played:
    text = b"".join(part for _, part in arrived).decode()
    times = [when for when, _ in arrived]
    longest = max((b - a for a, b in pairwise(times)), default=0.0)
    return Played(code, text, screen(text, columns), text.count("\x1b[J"), longest)


def played(words: list[str], folder: Path, *, columns: int = 80, env: dict[str, str] | None = None) -> Played:
    """Run `lora-merge` in a process of its own, with stdout and stderr on a terminal."""
    there = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
    there |= {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **(env or {})}
    with terminal(columns) as (end, arrived):
        command = [sys.executable, "-m", "lora_merge", *words]
        code = subprocess.run(command, cwd=folder, env=there, stdin=end, stdout=end, stderr=end, check=False).returncode
    return _played(code, arrived, columns)


def played_here(
    words: list[str], monkeypatch: pytest.MonkeyPatch, *, columns: int = 80, keep: Sequence[str] = ()
) -> Played:
    """The same in this process, where torch is there already."""
    with terminal(columns) as (end, arrived), ExitStack() as stack, monkeypatch.context() as monkeypatch:
        for name in {"NO_COLOR", "COLUMNS", "LINES"} - {*keep}:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("COLORTERM", "truecolor")  # Rich keeps the codes of a style, whatever a later terminal has
        files = [stack.enter_context(os.fdopen(os.dup(end), "w", encoding="utf-8")) for _ in range(2)]
        monkeypatch.setattr(sys, "argv", ["lora-merge", *words])
        monkeypatch.setattr(sys, "stdout", SafeStream(files[0]))
        monkeypatch.setattr(sys, "stderr", SafeStream(files[1]))
        monkeypatch.setattr("shutil.get_terminal_size", lambda *_: os.terminal_size((columns, 50)))
        try:
            program.main()
            code: object = 0
        except SystemExit as e:
            code = e.code or 0
    return _played(int(str(code)), arrived, columns)


def screen(text: str, columns: int) -> list[str]:
    """The rows of a terminal after a text: it knows line ends, moves up, and clearing; colours are left out."""
    rows, y, x, at = [[]], 0, 0, 0  # type: list[list[str]], int, int, int
    while at < len(text):
        if match := _COMMAND.match(text, at):
            at = match.end()
            if match[2] == "A":
                y = max(0, y - int(match[1] or 1))
            elif match[2] == "J":
                rows[y] = rows[y][:x]
                del rows[y + 1 :]
            elif match[2] == "K":
                rows[y] = rows[y][:x]
            continue
        letter, at = text[at], at + 1
        if letter == "\r":
            x = 0
        elif letter == "\n" or x == columns:
            y, x = y + 1, 0
            rows += [[]] * 0 if y < len(rows) else [[]]
        if letter not in "\r\n":
            row = rows[y]
            row += " " * (x + 1 - len(row))
            row[x], x = letter, x + 1
    return ["".join(row).rstrip() for row in rows]

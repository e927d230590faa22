"""Pages in a real browser."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--virtual-time-budget=8000", "--enable-logging=stderr", "--v=0")  # fmt: skip


def shown(page: Path, folder: Path, *more: str) -> str:
    """What a browser makes of a page, after its script has run; the script must report nothing."""
    if BROWSER is None:
        pytest.skip("no Chromium is installed")
    done = subprocess.run(
        [BROWSER, *FLAGS, f"--user-data-dir={folder}", *more, "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    assert 'data-ready="yes"' in done.stdout
    return done.stdout

"""Pages in a real browser."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


class Window:
    """A browser window that a test drives. What a page reports as an error ends the test."""

    def __init__(self, driver: Any, address: str) -> None:
        self.driver, self.address = driver, address

    def js(self, code: str, *arguments: Any) -> Any:
        """What JavaScript returns; `$` is `document.querySelector`."""
        return self.driver.execute_script(f"const $ = (css) => document.querySelector(css); {code}", *arguments)

    def until(self, code: str, *arguments: Any, seconds: float = 60) -> Any:
        """What an expression is as soon as it is true."""
        return wait(lambda: self.js(f"return {code}", *arguments), code, seconds)

    def open(self) -> None:
        """Load the page."""
        self.driver.get(self.address)
        self.until("document.documentElement.dataset.ready")

    def press(self, *keys: str) -> None:
        """Type into what has the focus."""
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def choose(self, css: str, word: str) -> None:
        """Choose the option of a list whose text has a word."""
        code = "const s = $(arguments[0]); s.value = [...s.options].find((o) => o.text.includes(arguments[1])).value;"
        self.js(f"{code} s.dispatchEvent(new Event('change', {{bubbles: true}}))", css, word)

    def errors(self) -> list[str]:
        """What the console of the page has."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


def wait(answer: Callable[[], Any], what: str, seconds: float = 60) -> Any:
    """The first true answer; TimeoutError without one."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := answer():
            return value
        time.sleep(0.05)
    raise TimeoutError(what)


@contextmanager
def window(address: str, width: int = 1280, height: int = 1000, *, dark: bool = False) -> Iterator[Window]:
    """A window of headless Chromium; skips the test if there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    service = shutil.which("chromedriver")
    if BROWSER is None or service is None:
        pytest.skip("no Chromium with its driver is installed")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS[1:8], "--headless=new", "--hide-scrollbars", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(service))
    try:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        yield Window(driver, address)
    finally:
        driver.quit()

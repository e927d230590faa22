"""A plugin of pytest that writes down every result at once, so that a run that is cut off has told something."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

FILE: Final = "GPU_TEST_RESULTS"
"""The variable of the environment with the file that gets a line for each result: name, outcome, text of an error."""

WORKER: Final = "PYTEST_XDIST_WORKER"
"""The variable that pytest-xdist sets in its workers, which their children inherit."""


def _note(name: str, outcome: str, text: str) -> None:
    if FILE in os.environ and not os.environ.get(WORKER):  # workers tell the first process
        with Path(os.environ[FILE]).open("a", encoding="utf-8") as f:
            f.write(json.dumps([name, outcome, text[-600:]]) + "\n")


def pytest_runtest_logreport(report: Any) -> None:
    """A test, or a failure before or after it."""
    if report.failed or (report.when == "call" and report.passed):
        _note(report.nodeid, report.outcome, str(report.longrepr) if report.failed else "")


def pytest_warning_recorded(warning_message: Any, nodeid: str) -> None:
    """A warning, which is no error here: other versions of libraries warn of other things."""
    _note(nodeid, "warned", f"{warning_message.category.__name__}: {warning_message.message}")


def pytest_collectreport(report: Any) -> None:
    """A file of tests that cannot be read, as a library is missing."""
    if report.failed:
        _note(report.nodeid, "not collected", str(report.longrepr))

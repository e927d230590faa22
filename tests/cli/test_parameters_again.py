"""A command that a process runs many times reads its options the same way each time."""

from __future__ import annotations

from typing import Any

import pytest

from lora_merge.cli import main, parameters
from tests.kit.command_line import run


def test_each_run_reads_its_options_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    depths, depth, process = [0], [0], parameters._process

    def counted(*given: Any) -> Any:
        depth[0] += 1
        depths.append(depth[0])
        try:
            return process(*given)
        finally:
            depth[0] -= 1

    monkeypatch.setattr(parameters, "_process", counted)
    main._program.cache_clear()  # the commands are made again, with the counting function
    try:
        for _ in range(4):
            run("merge", "no-such-base", "no-such-adapter", "-o", "out", "--overwrite")
    finally:
        main._program.cache_clear()
    assert max(depths) == 1

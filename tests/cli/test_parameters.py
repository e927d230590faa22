"""A process that runs many commands reads the options of each anew, at the same cost."""

from __future__ import annotations

from tests.kit.command_line import run
from tests.kit.cost import steps


def test_options_cost_the_same_in_the_tenth_run() -> None:
    def merge() -> None:
        assert run("merge", "no-such-base", "no-such-adapter", "-o", "out", "--overwrite").code == 3

    merge()  # imports
    second = steps(merge)
    for _ in range(7):
        merge()
    assert steps(merge) < 1.005 * second

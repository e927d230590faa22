"""The progress bar of ComfyUI; its states are kept for the tests."""

from collections.abc import Callable

shown: list[tuple[float, float]] = []
watchers: list[Callable[[], object]] = []


class ProgressBar:
    def __init__(self, total: float, node_id: object = None) -> None:
        self.total = total

    def update_absolute(self, value: float, total: float | None = None, preview: object = None) -> None:
        shown.append((value, self.total if total is None else total))
        for watcher in watchers:
            watcher()

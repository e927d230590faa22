"""What the page shows before anything runs: what files are, whether they fit, the plan. Headers alone are read."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import islice, product
from pathlib import Path
from typing import Any, Final, TypeAlias

from .. import Facts, FormerPlans, MergeError, inspect, plan_batch
from ..disk.destination import check_output, files_under
from ..disk.writer import Room
from ..errors import UsageError, error_dict
from ..job import parse_size
from ..options import OPTIONS
from ..paths import exists, with_ending
from ..planning.recipe import KEY
from ..version import __version__
from ..viewing.parts import parts_of, presets_of
from .forms import FORMS, by_recipe, command_line, entry, in_jobs_file, jobs_file, place_of, runnable
from .library import ADAPTER, BASE, Library
from .runs import Queue

KEPT: Final = 200
"""Files and pairs whose facts are kept."""

WITHOUT_RECIPE: Final = {
    "verify": "choose its base and its adapters, too", "replay": "choose an output with its recipe",
    "unmerge": "choose the adapters, too",
}  # fmt: skip
"""Command → what to do with a file that has no recipe."""

TRIED: Final = 3
"""Files that are looked at with a chosen one before somebody chooses one of them."""

OF_JOB: Final = re.compile(r"jobs \(jobs\[0\](?:\.([^)]*))?\): (.*?)(?: \(([^()]*)\))?(?:; (.*))?")
"""A mistake in a jobs file of one job, its place first or last: jobs (jobs[0]): density 7 is … (density); use …"""
MISTAKE: Final = "in the jobs"
"""What the headline of mistakes has; another error has its own."""
FIELDS: Final = "lists the fields"
"""The end of a fix for jobs, which a form has no use for."""

FileStates: TypeAlias = tuple[str, float, int]
"""A path, and the latest time and the bytes of the files there."""


class Previews:
    """Answers the calls of the page."""

    def __init__(self, library: Library, queue: Queue) -> None:
        self.library, self.queue = library, queue
        self._former, self._turn = FormerPlans(), threading.Lock()
        self._facts = lru_cache(KEPT)(self._inspected)
        self._ahead: dict[tuple[str, str], threading.Thread] = {}  # base or adapter → what looks at others with it

    def start(self) -> dict[str, Any]:
        """Return the forms and the library, as the page begins."""
        return {
            "forms": [form.to_dict() for form in FORMS.values()], "version": __version__,
            "folders": [*map(str, self.library.folders)], "pictures": self.queue.pictures,
            "overwrite": OPTIONS["overwrite"].help, **self.library.to_dict(),
        }  # fmt: skip

    def warm_up(self) -> None:
        """Look at the smallest files, which loads tables and modules, and measure the disk, before somebody waits for
        it."""
        self._look_ahead()
        self.queue.estimate(self.library.output)

    def files(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the files of a form are, and whether adapters fit the base."""
        rows = [*self._files(values)]
        base = str(values.get("base") or "")
        chosen = base, "" if base else next((row["path"] for row in rows if row.get("kind") == "adapter"), "")
        if any(chosen) and chosen not in self._ahead:
            self._ahead[chosen] = threading.Thread(target=self._look_ahead, args=chosen, name="ahead", daemon=True)
            self._ahead[chosen].start()
        return {"files": rows}

    def _look_ahead(self, base: str = "", adapter: str = "") -> None:
        """Look at a base with adapters, or at an adapter on bases, the smallest first, until one fits: this works out
        the names that most adapters share, on all bases with the same tensors."""
        with suppress(OSError):  # it is reported when somebody chooses the file
            bases = [base] if base else self._smallest(BASE)
            adapters = [adapter] if adapter else self._smallest(ADAPTER)
            for first, second in islice(product(bases, adapters), TRIED):
                if any(row.get("fits") for row in self._files({"base": first, "adapters": [{"path": second}]})):
                    break

    def _smallest(self, kind: str) -> list[str]:
        """Return the paths of the files of a kind, the smallest first; "" if there is none."""
        files = [entry for entry in self.library.entries() if entry.kinds == (kind,)]
        return [file.path for file in sorted(files, key=lambda file: file.bytes)] or [""]

    def preview(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the plan of a filled form, its command and its jobs file; or its `error`, and the field `at` fault."""
        result: dict[str, Any] = {}
        try:
            job = entry(values, self.library)
            result |= {"command": command_line(job)}
            if in_jobs_file(job):
                result |= {"jobs": jobs_file(job)}
            if plan := self._plan(job, overwrite=bool(values.get("overwrite"))):
                result |= {"plan": {**plan, **self.queue.times(plan["effort"])}}
        except MergeError as e:
            result["error"] = error_dict(e)
        if error := result.get("error") or result.get("plan", {}).get("error"):
            result |= {"error": error, "at": place_of(error["where"], values, self.library)}
        return result

    def run(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Put a filled form into the queue and return the `number` of its run; what `preview` does if it cannot run."""
        preview, overwrite = self.preview(values), bool(values.get("overwrite"))
        if "error" in preview:
            return preview
        effort = preview.get("plan", {}).get("effort", 0)
        return {"number": self.queue.add(entry(values, self.library), overwrite=overwrite, effort=effort).number}

    def parts(self, path: str) -> dict[str, Any]:
        """Return parts, blocks and presets of a base."""
        base = self.library.path(path)
        with self._turn:
            opened = self._former.checkpoints([base])
            return {**parts_of(base, opened), "presets": presets_of(base, opened)}

    def find(self, name: str, size: int) -> dict[str, Any]:
        """Return the path of a dropped file that the library has; "" if it must be uploaded."""
        known = self.library.find(name, size)
        return {"path": "" if known is None else known.path}

    def _plan(self, job: Mapping[str, Any], *, overwrite: bool) -> dict[str, Any]:
        """Return what a job writes, its `effort`, and its `error` if it cannot run; nothing for one that only reads."""
        if by_recipe(job):
            return self._plan_by_recipe(job, overwrite=overwrite)
        if not in_jobs_file(job):
            for path in job["adapters"] if job["command"] == "inspect" and "base" in job else ():
                self._facts(self._state(job["base"]), self._state(path))  # fails for a model, which is no adapter
            return {}
        try:
            with self._turn:
                (planned,) = plan_batch([runnable(job)], overwrite=overwrite, former=self._former)
        except UsageError as e:
            raise _of_form(e) from e
        return {**planned.to_dict(), "effort": planned.effort}

    def _plan_by_recipe(self, job: Mapping[str, Any], *, overwrite: bool) -> dict[str, Any]:
        """Return the same for a job whose inputs are found by their content, which only the run does."""
        product = Path(job.get("product") or job["base"])
        facts = self._facts(self._state(str(product)))
        if KEY not in facts["metadata"]:
            raise UsageError("the file has no recipe", str(product), WITHOUT_RECIPE[job["command"]])
        if "output" not in job:
            return {}
        output, folder = Path(job["output"]), product.is_dir()
        output = output if folder else with_ending(output, product.suffix or ".safetensors")
        check_output(output, [product], overwrite=overwrite, folder=folder, contents=files_under(product))
        needed = facts["bytes"]
        return {
            "status": "to run", "output": str(output), "bytes": needed, "effort": needed, "error": None,
            "memory": parse_size(job.get("max_memory", OPTIONS["max_memory"].default)),
            "disk": Room.at(output, needed).facts,
        }  # fmt: skip

    def _files(self, values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield a table for the base and for each adapter: its text, trigger words, and how it fits."""
        product, base = (str(values.get(name) or "") for name in ("product", "base"))
        for path in (product, base, *(str(a.get("path") or "") for a in values.get("adapters") or ())):
            if not path:
                continue
            row: dict[str, Any] = {"path": path}
            try:
                facts = self._facts(self._state(path))
                row |= {"text": facts.text, "verdict": facts["verdict"]["text"], "kind": facts["kind"]}
                row["triggers"] = [*facts.get("trained", {}).get("trigger_words", ())]
                if base and path not in (product, base) and facts["kind"] == "adapter":
                    match = self._facts(self._state(base), self._state(path))["match"]
                    row |= {name: match.get(name) for name in ("fits", "matched", "total", "components")}
                    row["why"] = match["error"]["what"] if "error" in match else match["why"]
            except MergeError as e:
                row["error"] = error_dict(e)
            yield row

    def _state(self, text: str) -> FileStates:
        """Return a path with what changes when it, or a file in it, does."""
        path = self.library.path(text)
        if not exists(path):
            return str(path), 0.0, 0
        states = [file.stat() for file in (path, *(path.iterdir() if path.is_dir() else ()))]
        return str(path), max(s.st_mtime for s in states), sum(s.st_size for s in states)

    def _inspected(self, *states: FileStates) -> Facts:
        with self._turn:
            return inspect(*(Path(path) for path, *_ in states), hashes=None, former=self._former)


def _of_form(e: UsageError) -> UsageError:
    """Return an error about a job, which is the only one of its jobs file, as one about a field: of several mistakes
    the first."""
    mistake = OF_JOB.fullmatch(e.where.partition("\n")[0])
    if mistake is None:
        return e
    place, what, inside, fix = mistake.groups()
    if MISTAKE not in e.what:
        return UsageError(e.what, what, e.fix)
    return UsageError(what, place or inside or "", fix or ("correct it" if e.fix.endswith(FIELDS) else e.fix))

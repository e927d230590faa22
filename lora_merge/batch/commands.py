"""The commands of a jobs file: merging, and the table of commands that write adapters.

A job of such a command is kept as a Request, plain data that goes to worker processes. Torch is imported when one is
planned.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from ..adapter_options import Request
from ..adapters_out.commands import COMMANDS
from ..errors import UsageError
from ..method_parameters import PARAMETER_NAMES
from ..options import OPTIONS
from ..text import plural

if TYPE_CHECKING:
    from ..adapters_out.job import AdapterJob
    from ..job import Job

MERGE: Final = "merge"
"""The command of a job that names none."""

UNMERGE: Final = "unmerge"
"""The command of a job that takes adapters out of its base: a merge at the opposite strengths."""

_OF_MERGE: Final = tuple(name for name, option in OPTIONS.items() if option.in_batch)

TAKES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType({
    MERGE: _OF_MERGE,
    UNMERGE: tuple(name for name in _OF_MERGE if name != "method" and name not in PARAMETER_NAMES),
    **{name: tuple(n for n, option in row.options.items() if option.in_batch) for name, row in COMMANDS.items()},
})  # fmt: skip
"""Command → the options that it takes."""


def adapter_job(request: Request, bounds: Job | None = None) -> AdapterJob:
    """Return the checked job of a request. `bounds`: the job whose limit on memory and permission to replace the output
    hold instead. UsageError or FitError for what is wrong."""
    command, options = COMMANDS[request.command], dict(request.options)
    if bounds is not None:
        options |= {"max_memory": bounds.max_memory, "overwrite": bounds.overwrite}
    if command.inputs != "adapters" and len(request.adapters) != 1:
        raise UsageError(
            f"{command.name} takes one adapter", plural(len(request.adapters), "adapter"), "write a job for each"
        )
    from ..engine.torch_preload import load_library  # imported here: help and the command line read the tables alone
    from ..planning.checkpoint_cache import CheckpointCache

    load_library()
    return command.job(request.adapters, request.output, request.base, options, CheckpointCache())

"""Merge LoRA, LyCORIS and PEFT adapters into `.safetensors` checkpoints.

The names below are loaded on first use, so that `import lora_merge` and `--help` do not wait for torch.
"""

import os  # nothing more: `__main__` sets the handlers of signals only after this module

TYPE_CHECKING = False  # type checkers take a variable of this name as true

if not os.path.isdir(os.path.join(os.path.dirname(__file__), "algorithms")):  # noqa: PTH112, PTH118, PTH120
    # A checkout without symbolic links, as on Windows, has a text file instead of the link: search the parent folder.
    __path__.append(os.path.dirname(os.path.dirname(__file__)))  # noqa: PTH120

if TYPE_CHECKING:
    from .adapters_out.report import AdapterReport
    from .api import (
        average,
        combine,
        compare,
        convert,
        extract,
        inspect,
        merge,
        plan,
        replay,
        resize,
        unmerge,
        verify,
    )
    from .batch.job_plan import JobPlan
    from .batch.report import JobReport, Reports
    from .batch.run import plan_batch, run_batch
    from .errors import MergeError
    from .facts import Facts
    from .job import Adapter, Job
    from .memory.adapter_values import AdapterSum, OpenAdapter, load_adapter
    from .memory.loaded_adapter import LoadedAdapter
    from .memory.merge import merge_state_dict
    from .memory.merge_into import MergedModel, merge_into
    from .planning.former_plans import FormerPlans
    from .planning.plan import Plan
    from .progress import Step
    from .report import Report
    from .version import __version__

_HOMES = {
    "__version__": "version",
    "merge": "api",
    "plan": "api",
    "replay": "api",
    "unmerge": "api",
    "verify": "api",
    "inspect": "api",
    "compare": "api",
    "merge_state_dict": "memory.merge",
    "merge_into": "memory.merge_into",
    "MergedModel": "memory.merge_into",
    "load_adapter": "memory.adapter_values",
    "AdapterSum": "memory.adapter_values",
    "OpenAdapter": "memory.adapter_values",
    "LoadedAdapter": "memory.loaded_adapter",
    "Adapter": "job",
    "Job": "job",
    "Plan": "planning.plan",
    "Report": "report",
    "MergeError": "errors",
    "run_batch": "batch.run",
    "plan_batch": "batch.run",
    "JobPlan": "batch.job_plan",
    "FormerPlans": "planning.former_plans",
    "JobReport": "batch.report",
    "Reports": "batch.report",
    "Step": "progress",
    "Facts": "facts",
    "average": "api",
    "combine": "api",
    "convert": "api",
    "extract": "api",
    "resize": "api",
    "AdapterReport": "adapters_out.report",
}

__all__ = [
    "Adapter",
    "AdapterReport",
    "AdapterSum",
    "Facts",
    "FormerPlans",
    "Job",
    "JobPlan",
    "JobReport",
    "LoadedAdapter",
    "MergeError",
    "MergedModel",
    "OpenAdapter",
    "Plan",
    "Report",
    "Reports",
    "Step",
    "__version__",
    "average",
    "combine",
    "compare",
    "convert",
    "extract",
    "inspect",
    "load_adapter",
    "merge",
    "merge_into",
    "merge_state_dict",
    "plan",
    "plan_batch",
    "replay",
    "resize",
    "run_batch",
    "unmerge",
    "verify",
]


if not TYPE_CHECKING:  # type checkers would accept any name of a module that has a `__getattr__`

    def __getattr__(name: str) -> object:
        if name in _HOMES:
            from importlib import import_module

            return getattr(import_module(f".{_HOMES[name]}", __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})

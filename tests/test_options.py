"""One table of options: what is written out elsewhere says the same."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

import lora_merge
from lora_merge import typed_options
from lora_merge.batch.schema import Options
from lora_merge.cli import main, verify_commands
from lora_merge.engine.admission import plan_merge
from lora_merge.job import Job, make_job
from lora_merge.options import JOB_OPTIONS, OPTIONS, Option
from lora_merge.planning.recipe import blanks, recipe
from lora_merge.text import beginning, shown
from lora_merge.typed_options import MergeOptions
from tests.kit.adapters import kohya
from tests.kit.cost import steps
from tests.kit.files import save
from tests.kit.models import sd1

ROOT = Path(__file__).parent.parent
JOB = {f.name: f.default for f in fields(Job)[3:]}
OTHERS: dict[str, Any] = {
    "dtype": "bf16", "compute_dtype": "fp64", "device": "cpu", "strength": [0.5], "strength_for": {"te": 0.5},
    "unmatched": "skip", "on_overflow": "saturate", "rounding": "stochastic", "seed": 7, "keep_precision": ["re:x"], "method": "compose", "setting": {"lora_alpha": 16}, "map": "names.yaml",
    "overwrite": True, "max_memory": "2GiB", "max_vram": "1GiB", "verify": False,
    "density": 0.5, "gamma": 0.25, "epsilon": 0.125, "t": 0.5, "elect": "count", "normalise": "weight", "agree": 1,
    "scale": 2.0, "title": "Ink", "tokenizer": "adapter", "metadata": {"a": "b"}, "no_metadata": True, "card": True, "cache": "downloads",
}  # fmt: skip
"""A value that is not the default, of every option."""

METHOD = {"density": "ties", "gamma": "breadcrumbs", "epsilon": "della", "t": "slerp", "elect": "ties",
          "normalise": "ties", "agree": "consensus", "scale": "prune"}  # fmt: skip
"""Option → a method that takes it."""


def method_for(option: Option) -> dict[str, Any]:
    """The other options that a job needs in order to have this one."""
    found: dict[str, Any] = {"method": METHOD[option.name]} if option.name in METHOD else {}
    return {**found, "density": 0.5} if option.name in ("gamma", "epsilon") else found


def inputs_for(option: Option) -> list[str]:
    """Two adapters for slerp, else one."""
    return ["adapter", "other"] if option.name == "t" else ["adapter"]


def test_type_checkers_know_the_same_options() -> None:
    assert sorted(MergeOptions.__annotations__) == sorted(OPTIONS)
    for name, option in OPTIONS.items():
        if option.kind == "word":
            assert (
                get_args(eval(MergeOptions.__annotations__[name].__forward_arg__, vars(typed_options))) == option.words
            )


def test_job_holds_every_option_with_its_default() -> None:
    """Strengths belong to its adapters."""
    made = make_job("base", "adapter", "output")
    assert {o.name for o in OPTIONS.values() if o.recorded != "adapters"} == JOB.keys()
    assert {name: getattr(made, name) for name in JOB} == JOB
    for name, option in OPTIONS.items():
        assert not option.words or option.default == option.words[0], name


@pytest.mark.parametrize("option", OPTIONS.values(), ids=lambda o: o.name)
def test_every_option_is_taken_and_kept(option: Option) -> None:
    others, adapters = method_for(option), inputs_for(option)
    made = make_job("base", adapters, "output", **others, **{option.name: OTHERS[option.name]})
    assert made != make_job("base", adapters, "output", **({} if option.name == "t" else others))


@pytest.mark.few(5)
@pytest.mark.parametrize("option", OPTIONS.values(), ids=lambda o: o.name)
def test_recipe_records_what_changes_a_byte_and_nothing_else(option: Option, tmp_path: Path) -> None:
    save(sd1(), tmp_path / "base.safetensors")
    save(kohya(sd1()), tmp_path / "ink.safetensors")
    (tmp_path / "names.yaml").write_text("{}")
    base, ink = tmp_path / "base.safetensors", tmp_path / "ink.safetensors"
    plan = plan_merge(make_job(base, ink, tmp_path / "out.safetensors"))

    def told(**options: Any) -> dict[str, Any]:
        used = [ink] * len(inputs_for(option))
        job = make_job(base, used, tmp_path / "out.safetensors", **options)
        adapters = [m.adapter.index for m in plan.adapters] * len(used)
        return recipe(job, plan.base, adapters, blanks(plan.base, adapters))

    value = str(tmp_path / "names.yaml") if option.name == "map" else OTHERS[option.name]
    others = method_for(option)
    before, after = told(**({} if option.name == "t" else others)), told(**others, **{option.name: value})
    assert (before != after) == (option.recorded != "never")
    assert (option.name in after) == (option.recorded in ("always", "given"))
    assert (option.name in before) == (option.recorded == "always")


def test_commands_take_the_options_of_the_table() -> None:
    signature = inspect.signature(main.merge)
    assert {*OPTIONS} <= signature.parameters.keys()
    for name, option in OPTIONS.items():
        text = get_args(signature.parameters[name].annotation)[1]
        assert text.help == option.help
        assert option.flag in "".join(text.param_decls or ()) + text.default
    taken = inspect.signature(verify_commands.verify).parameters
    assert {name for name in OPTIONS if name in taken} == {n for n, o in OPTIONS.items() if o.in_verify} | {"cache"}
    assert {n for n, o in OPTIONS.items() if o.in_verify} <= {n for n, o in OPTIONS.items() if o.recorded != "never"}


def test_jobs_file_has_the_same_fields() -> None:
    assert [*Options.model_fields] == [n for n, o in JOB_OPTIONS.items() if o.in_batch]
    for name, field in Options.model_fields.items():
        assert field.description == JOB_OPTIONS[name].help


def test_help_shows_every_option_and_an_editor_its_type() -> None:
    for call in (lora_merge.merge, lora_merge.plan, lora_merge.merge_state_dict):
        assert inspect.signature(call).parameters["options"].annotation == "Unpack[PythonOptions]"
    described = re.findall(r"^    (\w+): ", inspect.getdoc(lora_merge.merge) or "", re.MULTILINE)
    assert {*described} >= {*OPTIONS, "base", "adapters", "output", "strengths"}


PUBLIC = [getattr(lora_merge, n) for n in lora_merge.__all__ if inspect.isfunction(getattr(lora_merge, n))]


@pytest.mark.parametrize("call", PUBLIC, ids=lambda c: c.__name__)
def test_help_shows_parameters_results_errors_and_gives_an_example(call: Any) -> None:
    text = inspect.getdoc(call) or ""
    for part in ("Parameters", "Returns", "Raises", "Examples"):
        assert f"\n{part}:\n" in text, part
    described = {*re.findall(r"^    (\w+): ", text.partition("\nReturns:\n")[0], re.MULTILINE)}
    assert {*inspect.signature(call).parameters} - {"options"} <= described
    rows = (MergeOptions, typed_options.ResizeOptions, typed_options.CombineOptions)
    known = {*(name for row in rows for name in row.__annotations__), "strengths"}
    assert described <= {*inspect.signature(call).parameters, *known}


def test_page_of_the_command_line_shows_every_option_with_its_default() -> None:
    text = (ROOT / "configs" / "site" / "pages" / "command-line.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `--([\w-]+)` \| ([^|]+) \|", text, re.MULTILINE))
    assert {name.replace("-", "_") for name in rows} == {*OPTIONS}
    for name, default in rows.items():
        option = OPTIONS[name.replace("-", "_")]
        plain = "on" if option.default is True else "off" if option.default is False else option.default
        told = option.kind == "whole" or isinstance(option.default, str)
        assert default.startswith("–" if plain in (None, ()) else f"`{plain}`" if told else str(plain)), name


def test_plan_depends_on_what_changes_a_byte_and_on_memory() -> None:
    """Jobs of a batch that differ in other options have one outline between them."""
    assert {n for n, o in OPTIONS.items() if not o.planned} == {"device", "overwrite", "verify", "card", "cache"}
    assert {n for n, o in OPTIONS.items() if o.same_in_read} <= JOB.keys()


def test_long_value_is_looked_at_by_its_beginning() -> None:
    """A configuration may hold one of a megabyte, and a message for each of thousands of modules shows it."""
    nested: Any = "x" * 1000
    for _ in range(8):
        nested = [nested] * 1000
    for value in ("a" * 10**6, list(range(10**6)), {str(i): i for i in range(10**5)}, nested, [10**5000]):
        assert steps(lambda value=value: repr(beginning(value, 80))) < 50_000
    for value in ("a b", [1, [2, {"a": None}]], {"a": [1.5, "b"]}, 3, None, True):
        assert beginning(value, 80) == value
    assert str(list(range(10**6)))[:50] == shown(list(range(10**6)), 80)[:50]

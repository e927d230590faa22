"""The Python API as a program or a notebook uses it."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import inspect as signatures
import json
import re
import shutil
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
import torch

import lora_merge
from lora_merge import boundary, typed_options
from lora_merge.command import Command
from lora_merge.errors import UsageError, VerificationFailed
from lora_merge.options import OPTIONS
from lora_merge.recipes.commands import COMMANDS
from tests.kit.adapters import kohya
from tests.kit.files import load, save
from tests.kit.models import sd1

FUNCTIONS = [getattr(lora_merge, n) for n in lora_merge.__all__ if signatures.isfunction(getattr(lora_merge, n))]


def test_names_are_looked_up_without_torch() -> None:
    """A merge writes what needs no torch while torch is imported; what works on tensors in memory needs it at once."""
    own = [n for n in lora_merge.__all__ if not lora_merge._HOMES[n].startswith("memory.")]
    code = f"import sys, lora_merge; [getattr(lora_merge, n) for n in {own}]; sys.exit('torch' in sys.modules)"
    assert len(own) > 15
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


RANK_1 = {"0.lora_A.weight": torch.ones(1, 4), "0.lora_B.weight": torch.ones(4, 1)}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path, Path]:
    """A base, two adapters, and the merge of the base with 0.5 of the first."""
    folder = tmp_path_factory.mktemp("python")
    base, ink, oil, out = (folder / f"{name}.safetensors" for name in ("base", "ink", "oil", "out"))
    save(sd1(), base)
    save(kohya(sd1()), ink)
    save(kohya(sd1(), seed=300), oil)
    lora_merge.merge(base, [(ink, 0.5)], out)
    return base, ink, oil, out


def test_strengths_can_be_said_in_every_natural_way(files: tuple[Path, Path, Path, Path]) -> None:
    base, ink, oil, _ = files
    want = lora_merge.plan(base, [(ink, 0.5), (oil, 0.25)]).job.adapters
    for adapters, more in (
        ([ink, oil], {"strengths": [0.5, 0.25]}), ([ink, oil], {"strength": [0.5, 0.25]}),
        ({ink: 0.5, oil: 0.25}, {}), ({str(ink): 0.5, str(oil): 0.25}, {}),
    ):  # fmt: skip
        assert lora_merge.plan(base, adapters, **more).job.adapters == want
    with pytest.raises(UsageError, match="given twice"):
        lora_merge.plan(base, [ink], strength=[1.0], strengths=[1.0])
    with pytest.raises(UsageError):
        lora_merge.plan(base, {})


def test_tensors_in_memory_take_the_same_words(files: tuple[Path, Path, Path, Path]) -> None:
    base, ink, _, out = files
    state, want = load(base), load(out)
    for adapters, more in (({ink: 0.5}, {}), ([load(ink)], {"strengths": [0.5]}), (load(ink), {"strengths": [0.5]})):
        made = lora_merge.merge_state_dict(state, adapters, **more)
        assert all(torch.equal(made[key], want[key]) for key in want)


def test_progress_is_a_function_or_a_bar(
    files: tuple[Path, Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, ink, _, _ = files
    steps: list[lora_merge.Step] = []
    report = lora_merge.merge(base, ink, tmp_path / "a.safetensors", progress=steps.append)
    assert sum(s.done for s in steps if s.stage == "merge") == report.written
    assert {"load", "merge", "prove"} <= {s.stage for s in steps}
    assert capsys.readouterr() == ("", "")
    lora_merge.replay(tmp_path / "a.safetensors", tmp_path / "b.safetensors", progress=True, search=[base.parent])
    assert "prove" in capsys.readouterr().err
    with pytest.raises(UsageError):
        lora_merge.merge(base, ink, tmp_path / "c.safetensors", progress="yes")  # type: ignore[arg-type]


def test_output_is_verified_and_reproduced(files: tuple[Path, Path, Path, Path], tmp_path: Path) -> None:
    base, ink, oil, out = files
    proof = lora_merge.verify(out)
    assert proof["proven"]
    assert json.loads(proof.to_json())["schema"] == "lora-merge/proof/1"
    assert lora_merge.verify(out, base, [(ink, 0.5)], full=True)["full"]
    with pytest.raises(VerificationFailed):
        lora_merge.verify(out, base, oil)
    report = lora_merge.replay(out, tmp_path / "again.safetensors", search=[base.parent])
    assert (tmp_path / "again.safetensors").read_bytes() == out.read_bytes()
    assert report.written == out.stat().st_size


def test_files_are_looked_at(files: tuple[Path, Path, Path, Path]) -> None:
    base, ink, oil, out = files
    facts = lora_merge.inspect(ink)
    assert (facts["kind"], len(facts), set(facts)) == ("adapter", len(dict(facts)), {*dict(facts)})
    assert lora_merge.inspect(base, (ink, 0.5))["match"]["strength"] == 0.5
    assert lora_merge.compare(base, out)["different"] == 20
    assert lora_merge.compare(ink, oil, base=base)["common"] == 20


@pytest.mark.slow
def test_objects_show_themselves_in_a_few_lines(files: tuple[Path, Path, Path, Path], tmp_path: Path) -> None:
    """As text and as HTML, in which a name cannot be markup."""
    base, ink, _, out = files
    odd = save(kohya(sd1()), tmp_path / "<b>&.safetensors")
    jobs = [{"base": str(base), "adapters": [str(ink)], "output": str(tmp_path / "j.safetensors")}]
    report = lora_merge.merge(base, {odd: 0.5}, tmp_path / "o.safetensors")
    shown = {
        "0.5 ×": report, "20 of 20": lora_merge.plan(base, odd, tmp_path / "p.safetensors"), "lora 20": lora_merge.load_adapter(odd),
        "merged": lora_merge.run_batch(jobs), "verified": lora_merge.verify(out), "adapter": lora_merge.inspect(odd),
        "rank 2": lora_merge.resize(odd, tmp_path / "r.safetensors", rank=2),
        "1 tensor; undo": lora_merge.merge_into(torch.nn.Sequential(torch.nn.Linear(4, 4)), RANK_1),
    }  # fmt: skip
    for words, found in shown.items():
        assert words in repr(found)
        assert len(repr(found)) < 2500
        html = found._repr_html_()
        assert html.startswith("<table>")
        assert "<b>&" not in html


def test_report_shows_what_is_remarked_about_adapters_too(files: tuple[Path, Path, Path, Path]) -> None:
    report = lora_merge.merge(files[0], {files[1]: 5.0}, files[0].with_name("strong.safetensors"))
    notes = [note for one in report.coverage.values() for note in one["notes"]]
    assert notes and all(note in repr(report) for note in notes)


@pytest.mark.parametrize("call", FUNCTIONS, ids=lambda c: c.__name__)
def test_editors_know_every_keyword(call: Any) -> None:
    """No parameter is Any; all types can be read while the program runs."""
    assert typing.get_type_hints(call)
    for name, parameter in signatures.signature(call).parameters.items():
        text = str(parameter.annotation)
        assert "Any" not in text, f"{name}: {text}"
        if parameter.kind is parameter.VAR_KEYWORD:
            assert text.startswith("Unpack[")


def test_editors_know_every_field_of_a_job() -> None:
    from lora_merge.batch import schema

    for table, model in ((typed_options.JobTable, schema.JobEntry), (typed_options.Defaults, schema.JobDefaults),
                         (typed_options.JobsTable, schema.JobsFile), (typed_options.AdapterTable, schema.AdapterEntry)):  # fmt: skip
        assert {*table.__annotations__} == {*model.model_fields}


def test_user_calls_every_function_under_a_strict_type_checker() -> None:
    """`make types` reads that file."""
    text = (Path(__file__).parents[1] / "kit" / "typed_user.py").read_text(encoding="utf-8")
    assert {name for name in FUNCTIONS if f"lora_merge.{name.__name__}(" not in text} == set()


def test_editors_know_every_keyword_of_methods() -> None:
    for kind in (getattr(lora_merge, name) for name in lora_merge.__all__):
        for name, method in signatures.getmembers(kind, signatures.isfunction) if signatures.isclass(kind) else ():
            found = [p for p in signatures.signature(method).parameters.values() if p.kind is p.VAR_KEYWORD]
            assert name.startswith("_") or all("Unpack[" in str(p.annotation) for p in found), f"{kind}.{name}"


@pytest.mark.parametrize("call", FUNCTIONS, ids=lambda c: c.__name__)
def test_help_shows_what_goes_in_and_what_comes_out(call: Any) -> None:
    text = signatures.getdoc(call) or ""
    heads = re.findall(r"^(Parameters|Returns|Raises|Examples):$", text, re.MULTILINE)
    assert heads == ["Parameters", "Returns", "Raises", "Examples"]
    told = re.findall(r"^    (\w+):", text.partition("Parameters:")[2].partition("\nReturns:")[0], re.MULTILINE)
    own = [p for p in signatures.signature(call).parameters.values() if p.kind is not p.VAR_KEYWORD]
    assert not {p.name for p in own} - {*told}
    assert "lora_merge." in text.partition("Examples:")[2]
    looks = call in (lora_merge.plan, lora_merge.plan_batch, lora_merge.load_adapter)
    assert looks or "progress" in [p.name for p in own]


CLASSES = [getattr(lora_merge, n) for n in lora_merge.__all__ if signatures.isclass(getattr(lora_merge, n))]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda c: c.__name__)
def test_help_of_a_class_shows_its_fields_its_methods_and_an_example(kind: Any) -> None:
    text = signatures.getdoc(kind) or ""
    assert re.search(r"^    (>>>|\.\.\.) .*lora_merge\.", text.partition("Examples:")[2], re.MULTILINE)
    named = set(re.findall(r"^    (\w+):", text.partition("Attributes:")[2].partition("\n\n")[0], re.MULTILINE))
    fields = (
        [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else getattr(kind, "_fields", ())
    )
    assert kind is lora_merge.Job or {*fields} <= named, "the fields of a job are the options"
    assert "_repr_html_" in dir(kind)
    for name, method in signatures.getmembers(kind, signatures.isfunction):
        if name.startswith("_") or (name in dir(kind.__base__) and not method.__module__.startswith("lora_merge")):
            continue
        told, signature = signatures.getdoc(method) or "", signatures.signature(method)
        own = [p.name for p in list(signature.parameters.values())[1:] if p.kind is not p.VAR_KEYWORD]
        assert not own or {*own} <= {*re.findall(r"^    (\w+):", told.partition("Parameters:")[2], re.MULTILINE)}, name
        assert str(signature.return_annotation) in ("None", "AdapterSum") or "Returns:" in told, name
        assert not any(str(p.annotation) == "Any" for p in signature.parameters.values()), name


@pytest.mark.parametrize("public", [*FUNCTIONS, *CLASSES], ids=lambda c: c.__name__)
def test_examples_are_python(public: Any) -> None:
    found = doctest.DocTestParser().get_examples(signatures.getdoc(public) or "")
    assert found
    for example in found:
        compile(example.source, public.__name__, "single")


@pytest.mark.parametrize("kind", [lora_merge.Adapter, lora_merge.Step, lora_merge.MergeError, lora_merge.AdapterSum])
def test_small_values_are_tables_in_notebooks_too(kind: Any, files: tuple[Path, Path, Path, Path]) -> None:
    found = {
        lora_merge.Adapter: lambda: lora_merge.Adapter(Path("<b>.safetensors"), 0.8),
        lora_merge.Step: lambda: lora_merge.Step("merge", "<b>.safetensors", 1, 2),
        lora_merge.MergeError: lambda: lora_merge.MergeError("<b>.safetensors", "where", "fix"),
        lora_merge.AdapterSum: lambda: 0.5 * lora_merge.load_adapter(files[1]),
    }[kind]()
    html = found._repr_html_()
    assert html.startswith("<table>") and "<b>." not in html
    assert len(repr(found)) < 300


@pytest.mark.slow
def test_tensors_and_batches_show_how_far_they_are(
    files: tuple[Path, Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, ink, _, _ = files
    steps: list[lora_merge.Step] = []
    state = load(base)
    lora_merge.merge_state_dict(state, ink, progress=steps.append)
    assert sum(s.done for s in steps) == steps[-1].total == sum(t.nbytes for t in state.values())
    jobs = [{"base": str(base), "adapters": [str(ink)], "output": str(tmp_path / f"{n}.safetensors")} for n in "ab"]
    lora_merge.run_batch(jobs[:1], progress=steps.append)
    assert str(tmp_path / "a.safetensors") in {s.output for s in steps}
    assert capsys.readouterr() == ("", "")
    lora_merge.run_batch(jobs, progress=True)
    assert "2/2" in capsys.readouterr().err


def test_verify_has_the_options_of_the_table() -> None:
    assert {*typing.get_type_hints(typed_options.VerifyOptions, None, {"torch": torch})} == {
        name for name, option in OPTIONS.items() if option.in_verify
    }


@pytest.mark.parametrize("command", COMMANDS.values(), ids=lambda c: c.name)
def test_function_of_a_command_has_the_options_of_its_row(command: Command) -> None:
    """With its defaults: an option is declared once."""
    parameters = signatures.signature(getattr(lora_merge, command.name)).parameters
    keywords = typing.get_type_hints(getattr(lora_merge, command.name), None, {"torch": torch})["options"]
    typed = {*typing.get_type_hints(typing.get_args(keywords)[0], None, {"torch": torch})}
    shown = {name for name, option in command.options.items() if option.group}
    python = {"strength", "strengths", "strength_for", "setting", "title", "metadata"}
    assert shown <= {*parameters, *typed}
    assert typed - python <= shown
    inputs = {"adapter", "adapters", "tuned", "base", "merged", "search"}
    assert {*parameters} - shown <= {*inputs, "output", "progress", "options"}
    for name in shown & parameters.keys():
        default = command.options[name].default
        assert parameters[name].default == (signatures.Parameter.empty if command.options[name].required else default)


@pytest.mark.release
def test_names_of_files_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(sd1(), tmp_path / "base.safetensors")
    save(kohya(sd1()), tmp_path / "ink.safetensors")
    save(kohya(sd1(), seed=3), tmp_path / "oil.safetensors")
    monkeypatch.chdir(tmp_path)
    assert lora_merge.merge("base", "ink", "v1.5").output == str(tmp_path / "v1.5.safetensors")
    assert lora_merge.plan("base", ["ink", ("oil", 0.5)]).job.output.name == "base+ink+oil.safetensors"
    assert lora_merge.inspect("base", "ink") and lora_merge.compare("ink", "oil")
    assert lora_merge.verify("v1.5")["proven"] and lora_merge.verify("v1.5", "base", "ink")["proven"]
    assert lora_merge.load_adapter("ink").path.name == "ink.safetensors"
    assert lora_merge.merge_state_dict(sd1(), "ink")
    made = [
        lora_merge.combine(["ink", "oil"], "both"), lora_merge.resize("ink", "small", rank=2),
        lora_merge.convert("ink", "other", to="comfy", base="base"), lora_merge.average(["ink", "oil"], "mean"),
        lora_merge.extract("base", "v1.5", "gone", rank=4), lora_merge.replay("v1.5", "again"),
        lora_merge.unmerge("v1.5", "ink", "back"),
    ]  # fmt: skip
    names = ["both", "small", "other", "mean", "gone", "again", "back"]
    assert [Path(report.output).name for report in made] == [f"{name}.safetensors" for name in names]


@pytest.mark.slow
def test_path_names_the_output_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every function that writes a file; a str gets an ending."""
    base, ink = save(sd1(), tmp_path / "base.safetensors"), save(kohya(sd1()), tmp_path / "ink.safetensors")
    monkeypatch.chdir(tmp_path)
    merged = lora_merge.merge(base, ink, Path("merged"))
    made = [
        merged, lora_merge.combine([ink, ink], Path("both")), lora_merge.resize(ink, Path("small"), rank=2),
        lora_merge.convert(ink, Path("other"), to="comfy", base=base), lora_merge.average([ink, ink], Path("mean")),
        lora_merge.extract(base, "merged", Path("gone"), rank=4), lora_merge.extract(base, "merged", Path("kohya"), format="kohya"),
        lora_merge.replay("merged", Path("again")), lora_merge.unmerge("merged", ink, Path("back")),
        lora_merge.load_adapter(ink).save(Path("saved"), format="comfy", base=base),
    ]  # fmt: skip
    names = ["merged", "both", "small", "other", "mean", "gone", "kohya", "again", "back", "saved"]
    assert [report.output for report in made] == [str(tmp_path / name) for name in names]
    assert all((tmp_path / name).is_file() for name in names)


STATE = {"a.weight": torch.ones(8, 4)}
NET = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 8, bias=False)})
JOB = {"base": "base", "adapters": ["ink.safetensors"], "output": "out"}

SLIPS = [
    # call, the fix that it is answered with
    ("merge()", 'write base="base.safetensors"'),
    ("merge('base', [('ink.safetensors', '0.5')], 'out')", 'write ("ink.safetensors", 0.5)'),
    ("merge('base', ('ink.safetensors', '0.5'), 'out')", 'write ("ink.safetensors", 0.5)'),
    ("merge('base', ['ink.safetensors', '0.5'], 'out')", 'write ("ink.safetensors", 0.5)'),
    ("merge('base', [['ink.safetensors', 0.5]], 'out')", 'write ("ink.safetensors", 0.5)'),
    ("merge('base', {'ink.safetensors': '0.5'}, 'out')", 'write ("ink.safetensors", 0.5)'),
    ("merge('base', [{'path': 'ink.safetensors', 'strength': 0.5}], 'out')", 'write ("ink.safetensors", 0.5)'),
    ("merge('base', {'path': 'ink.safetensors', 'strength': 0.5}, 'out')", 'write ("ink.safetensors", 0.5)'),
    ("merge('base', {'file': 'ink.safetensors', 'scale': 0.5}, 'out')", 'write ("ink.safetensors", 0.5)'),
    ("merge('base', 'ink', 'oil')", 'write merge("base", ["ink", "oil"], "out.safetensors")'),
    ("merge('base', Adapter('ink.safetensors', '0.5'), 'out')", 'write ("ink.safetensors", 0.5)'),
    ("merge('base', 'ink', 'out', strength=0.5)", "write strength=[0.5]"),
    ("merge('base', 'ink', 'out', strength='0.5')", "write strength=[0.5]"),
    ("merge('base', 'ink', 'out', 'bf16')", 'write dtype="bf16"'),
    ("merge('base', 'ink', 'out', dtyp='bf16')", "did you mean dtype?"),
    ("merge(model='base', adapters='ink', output='out')", "did you mean base?"),
    ("merge('base', 'ink', ['out'])", 'write output="out"'),
    ("merge('base', 'ink', 'out', strength_for='model=0.5')", 'write strength_for={"model": 0.5}'),
    ("merge('base', 'ink', 'out', strength_for=('model', 0.5))", 'write strength_for={"model": 0.5}'),
    ("merge('base', 'ink', 'out', seed='1')", "write seed=1"),
    ("merge('base', 'ink', 'out', overwrite='yes')", "write overwrite=True"),
    ("merge('base', 'ink', 'out', metadata='a=b')", 'write metadata={"a": "b"}'),
    ("merge(STATE, 'ink', 'out')", "for a state dict use merge_state_dict()"),
    ("merge(NET, 'ink', 'out')", "for a model in memory use merge_into(), or give its state_dict() to merge_state_dict()"),
    ("merge('base', NET, 'out')", "for a model in memory use merge_into(), or give its state_dict() to merge_state_dict()"),
    ("merge('base', STATE, 'out')", "for tensors in memory use merge_state_dict() or merge_into(); to files, save them first"),
    ("merge('base', 5, 'out')", 'give a path, or a pair such as ("a.safetensors", 0.8), or a list of these'),
    ("merge(['ink'], 'base')", 'write merge("base", ["ink"])'),
    ("merge('base', 'ink', 0.8)", 'write merge("base", ("ink", 0.8))'),
    ("merge(base_model='base', loras=['ink'])", "did you mean base, adapters?"),
    ("merge('base', 'ink', 'oil', 'out')", 'write merge("base", ["ink", "oil"], "out")'),
    ("plan('base', [('ink.safetensors', '0.5')])", 'write ("ink.safetensors", 0.5)'),
    ("unmerge()", 'write merged="merged.safetensors"'),
    ("unmerge('m', [('ink.safetensors', '1')], 'out')", 'write ("ink.safetensors", 1)'),
    ("unmerge('m', 'ink', 'out', ['.'])", 'write search=["."]'),
    ("replay('m')", 'write output="out.safetensors"'),
    ("replay('m', 'out', ['.'])", 'write search=["."]'),
    ("verify('m', full='yes')", "write full=True"),
    ("verify('m', serch=['.'])", "did you mean search?"),
    ("inspect(['ink', 'oil'])", 'write path="ink", and one call for each'),
    ("inspect(STATE)", 'save it first: safetensors.torch.save_file(tensors, "model.safetensors")'),
    ("inspect('ink', weight=True)", "did you mean weights?"),
    ("inspect('base', 'ink', True)", "write weights=True"),
    ("inspect('base', adapters='ink')", "did you mean adapter?"),
    ("compare('base')", 'write b="tuned.safetensors"'),
    ("compare(['base'], 'm')", 'write a="base"'),
    ("combine('ink', 'oil', 'out')", 'write combine(["ink", "oil"], "out")'),
    ("combine('ink', 'oil')", 'write combine(["ink", "oil"], "out.safetensors")'),
    ("combine([('ink', 0.5)], 'oil')", 'write combine([("ink", 0.5), "oil"], "out.safetensors")'),
    ("combine([], 'out')", 'write adapters=["style.safetensors"]'),
    ("combine(['ink', 'oil'], 'out', strengths=0.5)", "write strength=[0.5, 0.5]"),
    ("combine(['ink', 'oil'], 'out', method='ties', rank=1, density='0.5')", "write density=0.5"),
    ("resize('ink', 'out')", "write rank=16"),
    ("resize('ink', 'out', 1)", "write rank=1"),
    ("resize('ink', 'out', rank=0.9)", 'write rank="energy:0.9"'),
    ("resize('ink', 'out', rank=1.0)", "write rank=1"),
    ("resize('ink', 'out', dim=1)", "did you mean rank?"),
    ("resize(['ink'], 'out', rank=1)", 'write adapter="ink"'),
    ("convert('ink', 'PEFT')", 'write convert("ink.safetensors", to="peft")'),
    ("extract('m', 'base')", 'write extract("base.safetensors", "m.safetensors"); at strength -1 that adapter takes the merge back'),
    ("convert('ink', 'out', 'peft')", 'write to="peft"'),
    ("convert('ink', 'out', format='peft')", "did you mean to?"),
    ("convert('ink', 'out', to='peft', rank=1, max_rank='1')", "write max_rank=1"),
    ("extract('base', 'm', 'out', 1)", "write rank=1"),
    ("extract('base', ['m'], 'out')", 'write tuned="m"'),
    ("average(['ink.safetensors:0.7', 'oil'], 'out')", "write weights=[0.7,0.3]"),
    ("average(['ink', 'oil'], 'out', strengths=[0.7, 0.3])", "write weights=[0.7,0.3]"),
    ("average([('ink', 0.7), ('oil', 0.3)], 'out')", "write weights=[0.7,0.3]"),
    ("average({'ink': 0.7, 'oil': 0.3}, 'out')", "write weights=[0.7,0.3]"),
    ("average(['ink', ('oil', '0.3')], 'out')", "write weights=[0.7,0.3]"),
    ("average(['ink', 'oil'], 'out', [0.7, 0.3])", "write weights=[0.7, 0.3]"),
    ("average(['ink', 'oil'], 'out', weights=0.7)", "write weights=[0.7,0.3]"),
    ("average(['ink', 'oil'], 'out', weights=[0.7])", "write weights=[0.7,0.3]"),
    ("average(['ink', 'oil'], 'out', weights='0.7,0.3')", "write weights=[0.7, 0.3]"),
    ("average(['ink', 'oil'], 'out', weight=[0.7, 0.3])", "did you mean weights?"),
    *((f"average(['ink', 'oil'], 'out', weights={text})", "write weights=[0.7, 0.3]") for text in ("'0.7;0.3'", "'[0.7 0.3]'", "{'ink': 0.7, 'oil': 0.3}")),
    ("average('ink', 'oil')", 'write average(["ink", "oil"], "out.safetensors")'),
    ("resize('ink', 'out', rank='energy:95')", 'write rank="energy:0.95"'),
    ("merge('base', 'ink', 'out', dtype='fp64')", 'write dtype="fp32"'),
    ("merge('base', ['ink', 'oil'], 'out', strengths={'oil': 0.5})", "write strengths=[1.0, 0.5]"),
    ("merge('base', ['ink', 'oil'], 'out', strengths={'model': 0.5})", 'write strength_for={"model": 0.5}'),
    ("merge('base', ['ink', 'oil'], 'out', strengths=['1', '0.5'])", "write strength=[1, 0.5]"),
    ("combine(['ink', 'oil'], [0.5, 0.5])", "write strengths=[0.5, 0.5]"),
    ("merge_state_dict(STATE, 'ink', 'oil')", 'write merge_state_dict(state_dict, ["ink", "oil"])'),
    ("merge_state_dict(STATE, 'ink', 0.8)", 'write merge_state_dict(state_dict, ("ink", 0.8))'),
    ("merge(['base', 'ink'])", 'write merge("base", ["ink"])'), ("extract(['base', 'm'])", 'write extract("base", "m")'),
    ("extract('base', 'm', 1)", "write rank=1"),
    ("average(['ink', 'oil'], 'out', ema='0.9')", "write ema=0.9"),
    ("average('[io]*.safetensors', 'out')", 'write adapters=["ink.safetensors", "oil.safetensors"]'),
    ("average('ink', 'out')", 'write adapters=["ink"]'),
    ("load_adapter(['ink'])", 'write path="ink"'),
    ("load_adapter('ink').delta()", "write name=adapter.modules[0]"),
    ("load_adapter('ink').save('out', 'peft')", 'write format="peft"'),
    ("load_adapter('ink').save('out', to='peft')", "did you mean format?"),
    ("merge_state_dict('base', 'ink')", "for a file use merge()"),
    ("merge_state_dict(STATE)", 'write adapters=["style.safetensors"]'),
    ("merge_state_dict(STATE, NET)", "give its state_dict()"),
    ("merge_state_dict(STATE, [NET])", "give its state_dict()"),
    ("merge_state_dict(STATE, {'path': 'ink.safetensors', 'strength': 0.5})", 'write ("ink.safetensors", 0.5)'),
    ("merge_state_dict(STATE, [('ink.safetensors', '0.5')])", 'write ("ink.safetensors", 0.5)'),
    ("merge(None, 'ink', 'out')", "give a path"),
    ("merge('base', [(0.5, 'ink.safetensors')], 'out')", 'write ("ink.safetensors", 0.5)'),
    ("merge('base', ['ink.safetensors', 0.5], 'out')", 'write ("ink.safetensors", 0.5)'),
    ("merge('base', 'ink', 'out', strength_for=['re:a=0.5'])", 'write strength_for={"re:a": 0.5}'),
    ("merge('base', 'ink', 'out', strength_for=[{'re:a': 0.5}])", 'write strength_for={"re:a": 0.5}'),
    ("merge('base', 'ink', 'out', json=True)",
     "leave it out: the API prints nothing, `plan` writes nothing, and the report of `merge` has to_json()"),
    ("merge_state_dict(STATE, 'ink', output='out')", "for files use merge()"),
    ("merge_state_dict(STATE, [(0.5, 'ink.safetensors')])", 'write ("ink.safetensors", 0.5)'),
    ("average(['ink', 'oil'], 'out', ema=2)", "use a number from 0 to less than 1"),
    ("verify('m', search='more')", 'write search=["more"]'),
    ("verify('m', adapters=['ink'])", "name the base and all adapters"),
    ("merge('base', 'ink.safetensors, oil.safetensors', 'out')", 'write ["ink.safetensors", "oil.safetensors"]'),
    ("merge('base', 'ink', 'out', map=5)", "give a path"),
    ("merge('base', 'ink', 'out', strength_for={'IN99': 0.5})",
     'this base has model, and the blocks BASE; inspect(BASE)["blocks"] lists all'),
    ("average(['ink', 'oil'], 'out', weights=['a', 'b'])", "give a list of numbers"),
    ("resize('ink', rank=None)", "write rank=16"),
    ("run_batch(None)", "give a path, or a list of jobs"),
    ("merge_into(NET, 'ink', '0.5')", 'write merge_into(model, ("ink", 0.5))'),
    ("merge_into('ink', NET)", 'write merge_into(model, "ink")'),
    ("merge_state_dict('ink', STATE)", 'write merge_state_dict(state_dict, "ink")'),
    ("merge_state_dict(STATE, ['ink'], strength='half')", "give a list of numbers, one per adapter"),
    ("resize('ink', 0.9)", 'write resize("ink", rank="energy:0.9")'),
    ("resize('ink', 16)", 'write resize("ink", rank=16)'),
    ("merge_into(NET)", 'write adapters=["style.safetensors"]'),
    ("run_batch()", 'write path="jobs.yaml"'),
    ("run_batch('base.safetensors')", "one merge needs no file: merge(BASE, [(ADAPTER, 0.8)])"),
    ("run_batch([JOB], 2)", "write workers=2"),
    ("run_batch([JOB], workers='1')", "write workers=1"),
    ("run_batch([JOB], worker=1)", "did you mean workers?"),
    ("run_batch([JOB], on_report=5)", "give a function of a lora_merge.JobReport"),
    ("run_batch([{**JOB, 'adapters': [('ink.safetensors', 0.5)]}])", 'write {"path": "ink.safetensors", "strength": 0.5}'),
    ("plan_batch([{**JOB, 'matrix': {'x': 5}}])",
     "correct it; print(*lora_merge.typed_options.JobTable.__annotations__) lists the fields"),
]  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, two adapters, and the merge with one, of a few bytes; and the files of examples."""
    folder = tmp_path_factory.mktemp("tiny")
    for name in ("base", "tuned"):
        save({"a.weight": torch.rand(8, 4)}, folder / f"{name}.safetensors")
    for name in ("ink", "oil", "style"):
        factors = {
            f"base_model.model.a.lora_{end}.weight": torch.rand(*shape) for end, shape in (("A", (1, 4)), ("B", (8, 1)))
        }
        save(factors, folder / f"{name}.safetensors")
    for name in ("m", "merged"):
        lora_merge.merge(folder / "base", folder / ("ink" if name == "m" else "style"), folder / f"{name}.safetensors")
    (folder / "jobs.yaml").write_text(json.dumps({"version": 1, "jobs": [JOB]}))
    (folder / "more").mkdir()
    return folder


def answered(call: str) -> UsageError:
    """The error of a call, which has no option as the command line has it."""
    with pytest.raises(UsageError) as failed:
        eval(call, {**vars(lora_merge), "STATE": STATE, "NET": NET, "JOB": JOB, "adapter": None}, Names())
    assert "--" not in str(failed.value) and "lora-merge " not in str(failed.value), failed.value
    return failed.value


def test_commands_in_errors_are_calls(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the files of the call."""
    monkeypatch.chdir(tiny)
    base, ink, oil = (json.dumps(str(tiny / f"{name}.safetensors")) for name in ("base", "ink", "oil"))
    calls = {
        "compare('base', 'ink')": f"use inspect({base}, {ink}); or give two adapters, or two models",
        "inspect('ink', 'oil')": f"use compare({ink}, {oil}), or name a base first",
    }
    for call, fix in calls.items():
        assert answered(call).fix == fix
        assert eval(re.findall(r"use (.*?\))[;,] ", fix)[0], {}, Names())["schema"]


@pytest.mark.parametrize(("adapters", "call"), [
    (["base", "oil"], 'merge("base", ["ink", "oil"], "out")'), ("oil", 'combine(["ink", "oil"], "out")'),
])  # fmt: skip
def test_adapter_in_the_place_of_the_base_is_answered_with_the_call(
    adapters: Any, call: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny, tmp_path / "tiny")
    monkeypatch.chdir(tmp_path / "tiny")
    with pytest.raises(lora_merge.MergeError) as failed:
        lora_merge.merge("ink", adapters, "out")
    assert failed.value.fix == f"write {call}"
    assert eval(call, {}, Names()).written


def test_results_are_in_the_words_of_python(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports, facts, and the reports that a batch passes on: notes, errors, and how they show themselves."""
    monkeypatch.chdir(tiny)
    fading = {
        "base": "base",
        "adapters": ["ink.safetensors:1e-4"],
        "output": str(tmp_path / "b"),
        "dtype": "fp8_e4m3fn",
    }
    passed_on = list[lora_merge.JobReport]()
    failing = {**fading, "output": str(tmp_path / "c"), "strength_for": {"te": 0.5}}
    batch = lora_merge.run_batch([fading, failing], on_report=passed_on.append)
    assert passed_on == batch and {job.status for job in batch} == {"merged", "failed"}
    reports: list[Any] = [
        lora_merge.merge("base", ("ink", 1e-4), tmp_path / "a", dtype="fp8_e4m3fn", verify=False),
        *(job.report for job in batch if job.report), *(job.error for job in batch if job.error),
    ]  # fmt: skip
    for report in reports[:2]:
        notes = (*report.notes, *(report.verified or {}).get("warnings", ()))
        assert any('write dtype="fp32"' in note for note in notes)
    assert "(verify=False)" in repr(reports[0]) and 'inspect(BASE)["blocks"]' not in repr(reports[0])
    facts = lora_merge.inspect("base", "ink")
    for shown in (
        *map(str, reports),
        *map(repr, reports),
        *(report._repr_html_() for report in reports),
        facts.text,
        facts._repr_html_(),
    ):
        assert not re.search(r"(?<![\w-])--[a-z]|lora-merge [a-z]", shown), shown


class Names(dict[str, Any]):
    """The public names, which are loaded when they are used."""

    def __missing__(self, name: str) -> Any:
        return getattr(lora_merge, name) if name in lora_merge.__all__ else {}[name]


@pytest.mark.few(40)
@pytest.mark.parametrize(("call", "fix"), SLIPS, ids=[call for call, _ in SLIPS])
def test_slip_in_a_call_is_answered_in_python(call: str, fix: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny)
    assert answered(call).fix == fix


def corrected(call: str, fix: str) -> str | None:
    """The call with the correction that a fix states; None for advice in words."""
    tree = ast.parse(call, mode="eval")
    outer = tree.body
    assert isinstance(outer, ast.Call)
    kind = lora_merge.OpenAdapter if isinstance(outer.func, ast.Attribute) else lora_merge
    function = signatures.signature(getattr(kind, ast.unparse(outer.func).rpartition(".")[2]))
    placed = [p.name for p in function.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]
    given = dict(zip(placed, outer.args, strict=False)) | {str(k.arg): k.value for k in outer.keywords}
    if right := re.fullmatch(r"did you mean (\w+)\?", fix):
        wrong = next(name for name in given if name not in function.parameters)
        given[right[1]] = given.pop(wrong)
    elif right := re.fullmatch(r"write (\w+)=(.*?)(?:, and one call for each)?", fix):
        given.pop("strengths", None)
        named = [name for name, value in zip(placed, outer.args, strict=False) if ast.unparse(value) == right[2]]
        given = {name: value for name, value in given.items() if name not in named}
        given |= {right[1]: ast.parse(right[2].replace("adapter.", "load_adapter('ink')."), mode="eval").body}
        if right[1] == "weights" and "adapters" in placed:  # the snapshots are paths alone
            given["adapters"] = ast.parse("['ink', 'oil']", mode="eval").body
    elif fix.startswith("write ("):
        given["adapters"] = ast.parse(f"[{fix.removeprefix('write ')}]", mode="eval").body
    elif fix.startswith("write {"):
        return f"run_batch([{{**JOB, 'adapters': [{fix.removeprefix('write ')}]}}])"
    else:
        return fix.removeprefix("write ").partition("; at ")[0] if fix.startswith("write ") else None
    return f"{ast.unparse(outer.func)}({', '.join(f'{name}={ast.unparse(value)}' for name, value in given.items())})"


PROPOSED = [(call, right) for call, fix in SLIPS if (right := corrected(call, fix))]
"""Each call with the one that is proposed."""


@pytest.mark.few(4)
@pytest.mark.parametrize(("call", "right"), PROPOSED, ids=[right for _, right in PROPOSED])
def test_proposed_call_works(
    call: str, right: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another argument is missing too, it is the one that is asked for next."""
    shutil.copytree(tiny, tmp_path / "tiny")
    monkeypatch.chdir(tmp_path / "tiny")
    while True:
        try:
            eval(right, {"STATE": STATE, "state_dict": STATE, "NET": NET, "model": NET, "JOB": JOB}, Names())
            return
        except UsageError as e:
            assert e.what.endswith("is missing") or e.what.startswith("no adapter"), (right, e)
            right = corrected(right, e.fix if e.fix.startswith("write ") else "write adapters=['ink']") or ""


def test_every_parameter_has_words_for_its_kind_and_an_example() -> None:
    methods = [m for kind in (lora_merge.OpenAdapter, lora_merge.AdapterSum)
               for name, m in signatures.getmembers(kind, signatures.isfunction) if name[0] != "_"]  # fmt: skip
    for function in (*FUNCTIONS, *methods):
        for parameter in signatures.signature(function).parameters.values():
            if parameter.name not in ("self", "options"):
                assert boundary.annotation_of(parameter) in boundary.VALUE_KINDS, (function, parameter)
                assert parameter.default is not parameter.empty or parameter.name in boundary.EXAMPLES

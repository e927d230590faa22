"""How several adapters meet on one weight: `--method`. Run: pytest tests/engine/test_methods.py"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lora_merge
from lora_merge.batch.schema import Options
from lora_merge.boundary import worded
from lora_merge.engine import row_blocks
from lora_merge.engine.fold import FOLD_RULES
from lora_merge.engine.merge import run
from lora_merge.errors import FitError, MergeError, VerificationFailed
from lora_merge.merge_methods import METHODS
from lora_merge.options import MethodName
from lora_merge.planning.plan import coverage
from lora_merge.planning.recipe import KEY
from lora_merge.recipes.replay import plan_again, prove
from tests.kit import command_line
from tests.kit.files import load, metadata, save
from tests.kit.methods import FUSED, KINDS, MODULES, flux, module
from tests.kit.pairs import examples
from tests.kit.peft_oracle import Layers, assert_close, assert_same_function, train
from tests.kit.peft_oracle import save as save_peft
from tests.kit.tensors import Tensors, rand

BOTH: tuple[Literal["sum", "compose"], ...] = ("sum", "compose")
"""The methods that combine no changes."""


ADDED = ("lora", "diff")
"""Kinds whose change does not depend on the base."""

ONE = st.tuples(st.sampled_from(KINDS), st.sampled_from(list(MODULES)), st.sampled_from([1.0, 0.6, -0.5]))


def in_steps(base: Tensors, adapters: Sequence[tuple[Tensors, float]]) -> Tensors:
    """One merge after the other, without rounding in between."""
    for adapter in adapters:
        base = lora_merge.merge_state_dict(base, [adapter], compute_dtype="fp64")
    return base


@pytest.mark.few(1)
@pytest.mark.parametrize("fused", [False, True])
@settings(max_examples=examples(25), deadline=None)
@given(chosen=st.lists(ONE, min_size=2, max_size=4), largest=st.sampled_from([1, 40, 2**20]))
def test_compose_is_to_merge_one_after_the_other(fused: bool, chosen: list[Any], largest: int) -> None:  # noqa: FBT001
    base = flux(fused=fused)
    adapters = [(module(kind, name, seed=10 * n), s) for n, (kind, name, s) in enumerate(chosen)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_blocks, "BLOCK_ELEMENTS", largest)
        got = lora_merge.merge_state_dict(base, adapters, method="compose", compute_dtype="fp64")
    for key, value in in_steps(base, adapters).items():
        torch.testing.assert_close(got[key], value, rtol=1e-9, atol=1e-11, msg=key)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("pair", [("lora", "diff"), ("boft", "lora"), ("dora in", "diff")])
def test_methods_are_one_where_no_later_formula_reads_the_base(fused: bool, pair: tuple[str, str]) -> None:  # noqa: FBT001
    base = flux(fused=fused)
    adapters = [(module(kind, FUSED, seed=n), 0.7) for n, kind in enumerate(pair)]
    by = [lora_merge.merge_state_dict(base, adapters, method=m, compute_dtype="fp64") for m in BOTH]
    for key, value in by[0].items():
        torch.testing.assert_close(by[1][key], value, rtol=1e-12, atol=1e-13, msg=key)


LINEAR = ["wide", "tall", "square"]
TRAINED: dict[str, dict[str, Any]] = {
    "OFT": {"oft_block_size": 4, "r": 0, "use_cayley_neumann": False},
    "BOFT": {"boft_block_size": 4, "boft_n_butterfly_factor": 2},
    "HRA": {"r": 4},
    "Road": {"variant": "road_4", "group_size": 4},
    "IA3": {"feedforward_modules": ["tall"]},
    "Lora": {"r": 4, "lora_alpha": 6, "use_dora": True},
    "Hira": {"r": 4},
    "LoHa": {"r": 3, "alpha": 5},
    "Glora": {"r": 4},
}
TURNING = ("OFT", "BOFT", "HRA", "Road", "IA3")
"""Those that multiply the weight."""


def peft_config(name: str) -> Any:
    import peft

    return getattr(peft, f"{name}Config")(target_modules=LINEAR, **TRAINED[name])


def peft_pair(name: str, folder: Path) -> list[Path]:
    """Two trained adapters of a method, as PEFT saves them."""
    for seed in range(2):
        _, tuned = train(peft_config(name), 0.3 - 0.1 * seed)
        with torch.no_grad():  # not the first one on another scale
            for parameter_name, p in tuned.named_parameters():
                if p.requires_grad and seed:
                    p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(parameter_name))))
        save_peft(tuned, folder / f"{seed}")
    return [folder / "0", folder / "1"]


def layers() -> Layers:
    """The model that `train` starts from."""
    torch.manual_seed(11)
    return Layers()


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore")  # PEFT has much to say of second adapters
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("name", TRAINED)
def test_compose_is_what_peft_merges_one_after_the_other(name: str, order: tuple[int, int], tmp_path: Path) -> None:
    from peft import PeftModel

    folders = [peft_pair(name, tmp_path)[n] for n in order]
    ours = lora_merge.merge_state_dict(layers().state_dict(), folders, method="compose", compute_dtype="fp64")
    model: Any = layers()
    for folder in folders:
        model = PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    for key, value in model.state_dict().items():
        assert_close(ours[key], value, key)
    if name in TURNING:  # DoRA's norms are those of the untouched weight when PEFT merges several at once
        model = PeftModel.from_pretrained(layers(), str(folders[0]), adapter_name="first")
        model.load_adapter(str(folders[1]), adapter_name="second")
        both = ["first", "second"]
        model.base_model.set_adapter(both[::-1] if name == "OFT" else both)  # its forward pass turns the order round
        model.eval()
        assert_same_function(layers(), model, ours, LINEAR)
        for key, value in model.merge_and_unload(adapter_names=both).state_dict().items():
            assert_close(ours[key], value, f"at once: {key}")


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["OFT", "BOFT", "HRA", "Road"])
def test_order_is_that_of_the_arguments(name: str, tmp_path: Path) -> None:
    folders, state = peft_pair(name, tmp_path), layers().state_dict()
    one, two = (lora_merge.merge_state_dict(state, some, method="compose") for some in (folders, folders[::-1]))
    assert any(not torch.allclose(one[key], two[key]) for key in state)


WHOLE: dict[str, dict[str, Any]] = {
    "Lora": {"target_modules": ["wide"], "modules_to_save": ["square", "norm"], "bias": "lora_only"},
    "HRA": {"target_modules": ["square", "wide"], "r": 4, "modules_to_save": ["norm", "tall"]},
    "Glora": {"target_modules": ["wide", "square"], "r": 4, "bias": "all"},
    "LoHa": {"target_modules": ["tall"], "r": 3, "modules_to_save": ["square"]},
}
"""Adapters that replace what another of them replaces or changes."""


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("names", list(permutations(WHOLE, 2)))
def test_replaced_tensors_are_composed_in_the_order_of_the_arguments(names: tuple[str, str], tmp_path: Path) -> None:
    import peft

    folders = [tmp_path / name for name in names]
    for number, name in enumerate(names):
        save_peft(train(getattr(peft, f"{name}Config")(**WHOLE[name]), 0.3 - 0.1 * number)[1], tmp_path / name)
    base = save({k: v.contiguous() for k, v in layers().state_dict().items()}, tmp_path / "base.safetensors")
    out = tmp_path / "out.safetensors"
    lora_merge.merge(base, folders, out, method="compose", device="cpu")
    assert prove(out, full=True)["proven"]
    held, again = load(out), lora_merge.merge_state_dict(load(base), folders, method="compose")
    model: Any = layers()
    for folder in folders:
        model = peft.PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    for key, value in model.state_dict().items():
        assert_close(held[key], value, key)
        assert torch.equal(held[key], again[key])
    with pytest.raises(FitError, match="replaced as a whole and changed again"):
        lora_merge.merge_state_dict(load(base), folders)


def test_value_is_a_change_only_where_another_adapter_changes_the_weight(tmp_path: Path) -> None:
    """A mean of one change would be the same as the value, but rounded; with another one it is half of it."""
    base = {"a.weight": rand(8, 8) * 1e20, "b.weight": rand(8, 8, seed=1), "c.weight": rand(8, 8)}
    other = {"c.lora_up.weight": rand(8, 2, seed=6), "c.lora_down.weight": rand(2, 8, seed=7)}
    values = {"a.weight": rand(8, 8, seed=2), "b.weight": rand(8, 8, seed=3), **other}
    pair = {"b.lora_up.weight": rand(8, 2, seed=4), "b.lora_down.weight": rand(2, 8, seed=5)}
    files = [save(tensors, tmp_path / f"{n}.safetensors") for n, tensors in enumerate((values, pair))]
    got = lora_merge.merge_state_dict(base, files, method="mean")
    assert torch.equal(got["a.weight"], values["a.weight"])
    change = values["b.weight"] - base["b.weight"] + pair["b.lora_up.weight"] @ pair["b.lora_down.weight"]
    torch.testing.assert_close(got["b.weight"], base["b.weight"] + change / 2)


def test_value_that_comes_last_is_there_without_rounding(tmp_path: Path) -> None:
    """Its difference to what stood there would be rounded in fp32, and to a tensor of whole numbers there is none."""
    base = {"a.weight": rand(8, 8, seed=0) * 1e4, "b.weight": rand(8, 8, seed=9), "a.positions": torch.arange(8)}
    first = {"a.lora_up.weight": rand(8, 2, seed=1), "a.lora_down.weight": rand(2, 8, seed=2)}
    other = {"b.lora_up.weight": rand(8, 2, seed=5), "b.lora_down.weight": rand(2, 8, seed=6)}
    values = [{"a.positions": torch.arange(8) + n, "a.weight": rand(8, 8, seed=3 + n) * 1e-4, **other} for n in (1, 2)]
    files = [save(tensors, tmp_path / f"{n}.safetensors") for n, tensors in enumerate((base, first, *values))]
    lora_merge.merge(files[0], files[1:], tmp_path / "out.safetensors", method="compose", device="cpu")
    assert prove(tmp_path / "out.safetensors", full=True)["account"]["unused"] == 1
    got = load(tmp_path / "out.safetensors")
    assert torch.equal(got["a.weight"], values[1]["a.weight"])
    assert torch.equal(got["a.positions"], values[1]["a.positions"])
    got = lora_merge.merge_state_dict(base, [values[0], first], method="compose", compute_dtype="fp64")
    change = first["a.lora_up.weight"].double() @ first["a.lora_down.weight"].double()
    assert torch.equal(got["a.weight"], (values[0]["a.weight"].double() + change).float())


def made(folder: Path, kinds: Sequence[str], *, fused: bool = False, **options: Any) -> Path:
    """A merge of an adapter of one part with such adapters of all three, as files `0`, `1` …."""
    base = save({k: v.float() for k, v in flux(fused=fused).items()}, folder / "base.safetensors")
    some = [module("lora", list(MODULES)[2], seed=90), *(module(kind, FUSED, seed=n) for n, kind in enumerate(kinds))]
    adapters = [
        (save({k: v.float() for k, v in tensors.items()}, folder / f"{n}.safetensors"), 0.7)
        for n, tensors in enumerate(some)
    ]
    lora_merge.merge(base, adapters, folder / "out.safetensors", **options)
    return folder / "out.safetensors"


@pytest.mark.few(2)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kinds", [("boft", "dora in"), ("glora", "diag-oft", "dora out"), ("ia3", "ia3", "boft")])
def test_composed_file_is_proven_and_reproduced(kinds: Sequence[str], fused: bool, tmp_path: Path) -> None:  # noqa: FBT001
    out = made(tmp_path, kinds, fused=fused, method="compose")
    assert json.loads(metadata(out)[KEY])["method"] == "compose"
    for full in (False, True):
        proof = prove(out, full=full)
        assert proof["proven"] and 0 < proof["tensors"] <= proof["changed"]
    assert proof["tensors"] == proof["changed"]
    again = run(plan_again(out, tmp_path / "again.safetensors"))
    assert again.method == "compose"
    assert (tmp_path / "again.safetensors").read_bytes() == out.read_bytes()


@pytest.mark.parametrize("made_by", BOTH)
def test_file_of_the_other_method_is_not_proven(made_by: str, tmp_path: Path) -> None:
    out = made(tmp_path, ("boft", "diag-oft"), method=made_by)
    plain = save(load(out), tmp_path / "plain.safetensors")
    named = {
        "base": tmp_path / "base.safetensors",
        "adapters": [(tmp_path / f"{n}.safetensors", 0.7) for n in range(3)],
    }
    assert prove(plain, **named, options={"method": made_by})["proven"]
    other = next(m for m in BOTH if m != made_by)
    with pytest.raises(VerificationFailed):
        prove(plain, **named, options={"method": other})


def test_recipe_without_a_method_is_that_of_a_sum(tmp_path: Path) -> None:
    out = made(tmp_path, ("boft", "diag-oft"))
    assert "method" not in json.loads(metadata(out)[KEY])
    assert prove(out, full=True)["proven"]


def notes(base: Tensors, adapters: Sequence[tuple[str, Tensors]], folder: Path, **options: Any) -> dict[str, list[str]]:
    """Adapter → its notes, by a dry run."""
    weights = save(base, folder / "base.safetensors")
    files = [save(tensors, folder / name) for name, tensors in adapters]
    plan = lora_merge.plan(weights, files, folder / "o.safetensors", **options)
    return {m.adapter.path.name: [n for n in m.notes if "--method" in n] for m in plan.adapters}


@pytest.mark.slow
@settings(max_examples=examples(25), deadline=None)
@given(chosen=st.lists(ONE, min_size=2, max_size=3), fused=st.booleans())
def test_note_appears_whenever_the_methods_differ_and_only_then(
    chosen: list[Any],
    fused: bool,  # noqa: FBT001
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    base = flux(fused=fused)
    adapters = [(f"{n}.safetensors", module(kind, name, seed=10 * n)) for n, (kind, name, _) in enumerate(chosen)]
    folder = tmp_path_factory.mktemp("notes")
    told = notes(base, adapters, folder)
    for n in range(1, len(chosen)):
        some = [tensors for _, tensors in adapters[: n + 1]]
        by = [lora_merge.merge_state_dict(base, some, method=m, compute_dtype="fp64") for m in BOTH]
        before = [lora_merge.merge_state_dict(base, some[:-1], method=m, compute_dtype="fp64") for m in BOTH]
        own = [{k: by[m][k] - before[m][k] for k in base} for m in range(2)]  # what the last one does
        differ = any(not torch.allclose(own[0][k], own[1][k], atol=1e-9) for k in base)
        assert bool(told[f"{n}.safetensors"]) == differ, chosen
    assert not any(notes(base, adapters, folder, method="compose").values())


def test_note_names_modules_and_adapters(tmp_path: Path) -> None:
    adapters = [("first.safetensors", module("boft", FUSED, 0)), ("second.safetensors", module("diag-oft", FUSED, 1))]
    told = notes(flux(fused=False), adapters, tmp_path)
    assert told["first.safetensors"] == []
    (note,) = told["second.safetensors"]
    assert FUSED in note and "first.safetensors" in note and "--method compose" in note


def test_jobs_of_both_methods_share_one_read_and_are_distinguished(tmp_path: Path) -> None:
    """Each gives what it gives by itself; an output of the other method is none of its own."""
    kinds = ("boft", "diag-oft", "dora in")
    single = {m: made(tmp_path, kinds, method=m, overwrite=True).read_bytes() for m in BOTH}
    assert single["sum"] != single["compose"]
    adapters = [{"path": f"{n}.safetensors", "strength": 0.7} for n in range(4)]
    job = {"base": "base.safetensors", "adapters": adapters}
    jobs = [{**job, "method": m, "output": f"{m}.safetensors"} for m in BOTH]
    jobs.append({**job, "output": "default.safetensors"})
    path = tmp_path / "jobs.yaml"
    path.write_text(json.dumps({"version": 1, "jobs": jobs}))
    for status in ("merged", "skipped"):
        assert [report.status for report in lora_merge.run_batch(path)] == [status] * 3
    for name, method in (("sum", "sum"), ("compose", "compose"), ("default", "sum")):
        assert (tmp_path / f"{name}.safetensors").read_bytes() == single[method]
    jobs[1]["method"] = "sum"
    path.write_text(json.dumps({"version": 1, "defaults": {"method": "compose"}, "jobs": jobs}))
    told = {report.number: report.error for report in lora_merge.run_batch(path)}
    assert told.pop(1) is None
    assert all("another recipe" in str(error) for error in told.values()) and len(told) == 2


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float16), (torch.float64, torch.bfloat16)]
)
def test_any_mixture_of_dtypes_is_composed_in_the_compute_dtype(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    base = {key: value.to(dtypes[0]) for key, value in flux(fused=False).items()}
    kinds = ("lora", "boft", "dora in", "glora")
    adapters = [
        ({k: v.to(dtypes[n % 2]) for k, v in module(kind, FUSED, n).items()}, 0.7) for n, kind in enumerate(kinds)
    ]
    wide = [({k: v.double() for k, v in tensors.items()}, s) for tensors, s in adapters]
    got = lora_merge.merge_state_dict(base, adapters, method="compose")
    for key, exact in in_steps({key: value.double() for key, value in base.items()}, wide).items():
        assert got[key].dtype == dtypes[0]
        bound = 2e-2 if dtypes[0] == torch.bfloat16 else 2e-5
        torch.testing.assert_close(got[key].double(), exact, rtol=bound, atol=bound, msg=key)
        before = base[key].double()
        assert torch.equal(before, exact) == torch.equal(got[key], base[key])


@pytest.mark.parametrize("order", list(permutations(range(1, 4), 2)))
def test_neighbouring_rows_are_not_the_same_rows(order: tuple[int, int], tmp_path: Path) -> None:
    """q, k and v of one tensor: adapters of two of them do not meet."""
    names = [list(MODULES)[n] for n in order]
    some = [(f"{n}.safetensors", module("boft", name, n)) for n, name in enumerate(names)]
    assert not any(notes(flux(fused=True), some, tmp_path).values())


def test_note_speaks_of_what_is_merged_alone(tmp_path: Path) -> None:
    """Not of modules that have no place and are skipped, nor of those that strength 0 leaves out; in every report."""
    stray = {key.replace("qkv", "elsewhere"): value for key, value in module("diag-oft", FUSED, 1).items()}
    some = [module("boft", FUSED, 0) | stray, module("diag-oft", FUSED, 1) | stray]
    base = save(flux(fused=True), tmp_path / "base.safetensors")
    words = [base, *(save(tensors, tmp_path / f"{n}.safetensors") for n, tensors in enumerate(some))]
    for method, factor in (("sum", "1"), ("sum", "0"), ("compose", "1")):
        parts = {"re:img_attn": float(factor)}
        options = {"method": method, "unmatched": "skip", "strength_for": parts, "overwrite": True}
        plan = lora_merge.plan(base, words[1:], tmp_path / "o.safetensors", **options)
        report = lora_merge.merge(base, words[1:], tmp_path / "o.safetensors", **options)
        assert worded(coverage(plan)) == report.coverage
        told = [note for one in report.coverage.values() for note in one["notes"] if "method=" in note]
        assert len(told) == (method == "sum" and factor == "1")
        assert not told or (FUSED in told[0] and "elsewhere" not in told[0] and "0.safetensors" in told[0])
        assert all(len(one["skipped"]) == 1 for one in report.coverage.values())
    dry = command_line.run(*words, "--unmatched", "skip", "--dry-run", "--json", "-o", tmp_path / "p.safetensors")
    assert sum("--method" in note for one in json.loads(dry.out)["coverage"].values() for note in one["notes"]) == 1


def test_every_method_has_a_rule_and_is_an_option_everywhere() -> None:
    assert {*FOLD_RULES} == {name for name, row in METHODS.items() if not row.combines} == {*BOTH}
    assert get_args(MethodName) == tuple(METHODS)
    (field,) = [a for a in get_args(Options.model_fields["method"].annotation) if get_args(a)]
    assert get_args(get_args(field)[0]) == tuple(METHODS)


def test_command_line_takes_it(tmp_path: Path) -> None:
    made(tmp_path, ("boft", "diag-oft"), method="compose")
    words = [tmp_path / "base.safetensors", *(f"{tmp_path}/{n}.safetensors:0.7" for n in range(3))]
    done = command_line.run(*words, "-o", tmp_path / "b.safetensors", "--method", "compose", "--json")
    assert done.code == 0 and json.loads(done.out)["method"] == "compose"
    assert (tmp_path / "b.safetensors").read_bytes() == (tmp_path / "out.safetensors").read_bytes()
    for wrong, fix in (("tie", "did you mean ties"), ("", "use one of sum, compose")):
        code, _, told = command_line.run(*words, "-o", tmp_path / "c.safetensors", "--method", wrong)
        assert code == 2 and fix in told
    with pytest.raises(MergeError, match="method"):
        lora_merge.merge_state_dict(flux(fused=True), module("boft", FUSED, 0), method=None)  # type: ignore[typeddict-item]

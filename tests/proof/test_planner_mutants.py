"""A planner that is wrong in one of many ways, each of which the proof finds: exit 6, and no file gets its name.

Each mutant breaks functions or tables of the planning code alone. What the reference formulas recompute follows the
plan, so that only a second reading of the adapter can notice most of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pytest import MonkeyPatch

import lora_merge
from lora_merge.adapters import kohya_args as network_args
from lora_merge.adapters import suffixes as conventions
from lora_merge.adapters.peft import config as peft_config
from lora_merge.adapters.peft import rules as peft
from lora_merge.algorithms import lora_sparse
from lora_merge.errors import VerificationFailed
from lora_merge.matching import formula
from lora_merge.matching import weight_finder as matching
from lora_merge.matching.conflicts import DuplicateCheck
from lora_merge.matching.formula import Candidate
from lora_merge.matching.orientation import Orientation
from lora_merge.matching.patch import Match, PatchPart
from lora_merge.models.names import Names
from lora_merge.models.part_factors import Strengths
from lora_merge.models.weights import RowSlice, WeightView, rows_of, transposed
from lora_merge.planning import changes
from lora_merge.planning import checkpoint_cache as opened
from lora_merge.planning import make_plan as planning
from lora_merge.proof import verify
from lora_merge.proof.second_reading.comparison import Confirmation
from lora_merge.recipes.replay import prove
from tests.kit.planner_scenes import SCENES, WIDTH, Scene

Break = Callable[[MonkeyPatch], None]


@dataclass(frozen=True)
class Mutant:
    scene: str
    does: str
    break_it: Break


def around(owner: Any, name: str, change: Callable[..., Any]) -> Break:
    """`change(original, *arguments)` in the place of a function or method."""

    def apply(patch: MonkeyPatch) -> None:
        original = getattr(owner, name)
        patch.setattr(owner, name, lambda *a, **k: change(original, *a, **k))

    return apply


def renamed(pattern: str, put: Callable[[re.Match[str]], str]) -> Break:
    """Modules are looked up under other names."""
    return around(
        Names, "find", lambda find, self, name, parameter="weight": find(self, re.sub(pattern, put, name), parameter)
    )


def swapped(one: str, two: str) -> Break:
    return renamed(f"{re.escape(one)}|{re.escape(two)}", lambda m: two if m[0] == one else one)


def seen_as(change: Callable[[str, WeightView], WeightView]) -> Break:
    """Places of names are others."""

    def find(original: Any, self: Names, name: str, parameter: str = "weight") -> WeightView | None:
        view = original(self, name, parameter)
        return view if view is None else change(name, view)

    return around(Names, "find", find)


def moved(by: int) -> Break:
    """Rows that are a part of a tensor lie elsewhere in it, where no other module's are."""

    def change(name: str, view: WeightView) -> WeightView:
        (p,) = view.row_slices
        if not ("single" in name and name.endswith("to_v")):
            return view
        return WeightView((RowSlice(p.key, p.start + by, p.stop + by, p.cols, p.transposed),), view.shape)

    return seen_as(change)


def matched(change: Callable[[Match], Match]) -> Break:
    """What matching found is changed."""
    return around(changes, "match_adapter", lambda original, *arguments: change(original(*arguments)))


def uses(change: Callable[[str, PatchPart], PatchPart | None]) -> Break:
    """Single uses are changed, or dropped."""

    def every(result: Match) -> Match:
        kept = {key: [new for use in found if (new := change(key, use)) is not None]
                for key, found in result.uses.items()}  # fmt: skip
        return replace(result, uses={key: found for key, found in kept.items() if found})

    return matched(every)


def after(name: str, change: Callable[[Candidate], None]) -> Break:
    """What a filter of formulas has decided is changed."""

    def apply(patch: MonkeyPatch) -> None:
        def changed(decide: Callable[[Candidate], None], candidate: Candidate) -> None:
            decide(candidate)
            change(candidate)

        rows = ((row, partial(changed, decide) if row == name else decide) for row, decide in formula.FILTERS)
        patch.setattr(formula, "FILTERS", tuple(rows))

    return apply


def numbers(change: Callable[[dict[str, float], Any], None]) -> Break:
    """The numbers of a formula are others; `change` sees them and the module."""

    def of(candidate: Candidate) -> None:
        candidate.scalars = dict(candidate.scalars)
        change(candidate.scalars, candidate.module)

    return after("scale", of)


def scaled(factor: Callable[[Any], float]) -> Break:
    def change(found: dict[str, float], module: Any) -> None:
        found.update({k: v * factor(module) for k, v in found.items() if k in ("scale", "rs_scale")})

    return numbers(change)


def unread(slot: str) -> Break:
    """A number beside the factors is not there."""
    return around(Candidate, "_number", lambda read, self, name: None if name == slot else read(self, name))


def suffix(ending: str, **changed: Any) -> Break:
    """A key ending means something else."""

    def apply(patch: MonkeyPatch) -> None:
        conventions._longest.cache_clear()
        row = conventions._BY_ENDING[ending]
        patch.setitem(conventions._BY_ENDING, ending, row._replace(**changed))

    return apply


def both(*breaks: Break) -> Break:
    def apply(patch: MonkeyPatch) -> None:
        for one in breaks:
            one(patch)

    return apply


def slots_swapped(*pairs: tuple[str, str]) -> Break:
    rows = conventions._BY_ENDING
    return both(*(suffix(a, slot=rows[b].slot) for one, two in pairs for a, b in ((one, two), (two, one))))


def field(kind: str, name: str, value: Any) -> Break:
    """A field of the configuration is not read, and its default counts."""
    return around(
        peft_config.PeftConfig,
        kind,
        lambda read, self, asked, *a, **k: value if asked == name else read(self, asked, *a, **k),
    )


def grouped(keep: Callable[[Any], bool]) -> Break:
    """Modules get lost before matching."""

    def group(original: Any, index: Any) -> Any:
        found = original(index)
        return replace(found, modules=tuple(m for m in found.modules if keep(m)))

    return around(opened, "group", group)


def without_slots(*slots: str, algorithms: tuple[str, ...]) -> Break:
    def group(original: Any, index: Any) -> Any:
        found = original(index)
        cut = tuple(
            replace(m, slots={s: i for s, i in m.slots.items() if s not in slots}, algorithms=algorithms)
            if slots[0] in m.slots else m for m in found.modules
        )  # fmt: skip
        return replace(found, modules=cut)

    return around(opened, "group", group)


def targets(change: Callable[[Any, dict[str, Any]], Any]) -> Break:
    """What is written of single tensors is changed; `change` sees the target and the base."""

    def outputs(original: Any, matched: Any, *rest: Any) -> Iterator[tuple[Path, Any]]:
        for path, target in original(matched, *rest):
            yield path, change(target, matched.inputs.base.tensors)

    return around(planning, "outputs", outputs)


def exchanged(one: str, two: str) -> Break:
    """Two tensors of one shape change places in their modules."""

    def group(original: Any, index: Any) -> Any:
        found = original(index)
        modules = [
            replace(m, slots={**m.slots, one: m.slots[two], two: m.slots[one]})
            if {one, two} <= m.slots.keys() and m.shapes[one] == m.shapes[two] else m for m in found.modules
        ]  # fmt: skip
        return replace(found, modules=tuple(modules))

    return around(opened, "group", group)


def starts_swapped(patch: MonkeyPatch) -> None:
    other = {0: WIDTH, WIDTH: 0}
    uses(lambda _, use: use._replace(start=other.get(use.start, use.start)))(patch)


def lost(name: str) -> Break:
    return uses(lambda _, use: None if name in use.patch.module.name else use)


def strength(change: Callable[[Any, Strengths, str, str], float]) -> Break:
    return around(Strengths, "factor", change)


def magnitude(change: Callable[[Any, Any], Any]) -> Break:
    def of(candidate: Candidate) -> None:
        candidate.magnitude = change(candidate.magnitude, candidate.module)

    return after("magnitude", of)


def other_axis(found: Any, _: Any) -> Any:
    if found is None:
        return None
    axis, shape = found
    return ("in" if axis == "out" else "out"), shape[::-1]


def turned_over(name: str, view: WeightView) -> WeightView:
    p = view.row_slices[0]
    square = len(view.shape) == 2 and view.shape[0] == view.shape[1] and len(view.row_slices) == 1
    whole = p.start == 0 and p.stop == p.cols and not p.transposed
    return transposed(view) if square and whole and name.endswith(("q_proj", "to_q", "a")) else view


def of_other(target: Any, base: dict[str, Any]) -> Any:
    """The values of another tensor of the same shape and dtype, where there is one."""
    like = [i for n, i in base.items() if (i.dtype, i.shape) == (target.dtype, target.shape) and n != target.name]
    return target if target.uses or not like else target._replace(weight=target.weight._replace(stored=like[0]))


def part_moved(by: int) -> Break:
    def place(original: Any, view: WeightView, number: int, parts: Any, fused: Any) -> WeightView:
        height = original(view, number, parts, fused).shape[0]
        start = (number + by) % 3 * height
        return rows_of(view, start, start + height)

    return around(matching, "rows_of_part", place)


def squeezed(original: Any, *arguments: Any) -> Any:
    """W2 of old: a part that is missing has no height, and those after it move up."""
    view, number, parts, _ = arguments
    start = sum(parts.heights.get(k, 0) for k in range(number))
    return rows_of(view, start, start + parts.heights[number])


BLOCK = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1"

MUTANTS = (
    # names → places
    Mutant("kohya", "q and k change places", swapped("attn1_to_q", "attn1_to_k")),
    Mutant("kohya", "the next block", swapped("attentions_0", "attentions_1")),
    Mutant("kohya", "the next layer of the encoder", swapped("layers_0", "layers_1")),
    Mutant("kohya", "the other attention of the block", swapped("attn1_to_out", "attn2_to_out")),
    Mutant("kohya", "all layers of the encoder are the first", renamed("layers_1", lambda _: "layers_0")),
    Mutant("encoders", "the other encoder", swapped("lora_te1_", "lora_te2_")),
    Mutant("encoders", "q and v of the fused encoder", swapped("self_attn_q", "self_attn_v")),
    Mutant("flux", "q and v of a fused tensor", swapped("attn.to_q", "attn.to_v")),
    Mutant("flux", "the image's stream for the text's", swapped("attn.to_k", "attn.add_k_proj")),
    Mutant("flux", "the other block", swapped("transformer_blocks.0", "transformer_blocks.1")),
    Mutant("flux", "rows of a fused tensor, one too early", moved(-1)),
    Mutant("flux", "rows of a fused tensor, a part too early", moved(-WIDTH)),
    Mutant("flux", "parts: a missing one has no height", around(matching, "rows_of_part", squeezed)),
    Mutant("flux", "parts: each in the place of the next", part_moved(1)),
    Mutant("flux", "parts: in the reverse order", both(part_moved(0), around(
        matching, "rows_of_part",
        lambda place, view, number, parts, fused: place(
            view, 2 - number, replace(parts, heights={2 - n: h for n, h in parts.heights.items()}), fused)))),
    Mutant("phi3", "gate and up change places", swapped("gate_proj", "up_proj")),
    Mutant("phi3", "k and v change places", swapped("k_proj", "v_proj")),
    Mutant("phi3", "the next layer", swapped("layers.0", "layers.1")),
    Mutant("peft", "square weights are turned over", seen_as(turned_over)),
    Mutant("peft", "square factors are those of [in, out]", around(Orientation, "ways", lambda _, self, module, row, view: (
        (transposed(view) if view.shape[0] == view.shape[-1] else view,), False))),
    Mutant("peft", "the other layer of one method alone", swapped("layers.0.mlp", "layers.1.mlp")),
    Mutant("parted", "q and k of a fused module", starts_swapped),
    Mutant("parted", "all parts of a fused module are its first", uses(lambda _, use: use._replace(start=0))),
    Mutant("parted", "one part of a fused module is left out", uses(lambda key, use: None if "to_k" in key else use)),
    Mutant("families", "square weights are turned over", seen_as(turned_over)),
    # what the tensors are
    Mutant("kohya", "up and down of square factors", exchanged("up", "down")),
    Mutant("families", "both halves of LoHa, first factors", slots_swapped((".hada_w1_a", ".hada_w2_a"))),
    Mutant("families", "both factors of LoKr", exchanged("w1", "w2")),
    Mutant("families", "A and B of GLoRA", slots_swapped((".a1.weight", ".b1.weight"), (".a2.weight", ".b2.weight"))),
    Mutant("families", "a difference is a value", suffix(".diff", algorithms=("set",))),
    Mutant("families", "weight and bias of norms", both(suffix(".w_norm", parameter="bias"), suffix(".b_norm", parameter="weight"))),
    Mutant("families", "a sparse remainder is dropped", without_slots("indices", "values", "size", algorithms=("lora",))),
    Mutant("families", "sparse indices are one too high", around(lora_sparse, "_flat_places", lambda places, *a: places(*a) + 1)),
    # numbers
    Mutant("kohya", "α is not read", unread("alpha")),
    Mutant("kohya", "a scale beside α is not read", unread("scale_override")),
    Mutant("kohya", "the rank is that of the other axis", scaled(lambda m: m.shapes["down"][0] / m.shapes["down"][1])),
    Mutant("kohya", "√r for r", scaled(lambda m: m.shapes["down"][0] ** 0.5)),
    Mutant("kohya", "α is that of another module", around(Candidate, "_number", lambda read, self, slot: read(
        Candidate(self.site._replace(module=self.context.adapter.modules[-1]), self.formula, self.view, set(), alone=True) if slot == "alpha" and "to_out" in self.module.name
        else self, slot))),
    Mutant("kohya", "α counts twice", scaled(lambda m: 2.0 if "conv1" in m.name else 1.0)),
    Mutant("families", "α of LoHa is not read", unread("alpha")),
    Mutant("families", "whole factors of LoKr are scaled", scaled(lambda m: 0.5 if {"w1", "w2"} <= m.slots.keys() else 1.0)),
    Mutant("families", "the scale of GLoRA is squared", scaled(lambda m: 0.5 if "a1" in m.slots else 1.0)),
    Mutant("peft", "rs-LoRA is not read", field("flag", "use_rslora", value=False)),
    Mutant("peft", "alpha_pattern is not read", around(peft_config.PeftConfig, "pattern", lambda read, self, name, module, default: (
        default if name == "alpha_pattern" else read(self, name, module, default)))),
    Mutant("peft", "rank_pattern is not read", around(peft_config.PeftConfig, "pattern", lambda read, self, name, module, default: (
        default if name == "rank_pattern" else read(self, name, module, default)))),
    Mutant("peft", "lora_alpha has its default", field("number", "lora_alpha", value=8.0)),
    Mutant("phi3", "the configured rank is taken for the tensors'", scaled(lambda m: 0.5 if "up" in m.slots else 1.0)),
    Mutant("flux", "the header's configuration is not read", lambda patch: patch.setattr(peft, "ADAPTER_METADATA", "nothing")),
    Mutant("flux", "the header's configuration holds for the other file", scaled(lambda m: 2.0 if "/" in m.name else 1.0)),
    Mutant("kohya", "DyLoRA's blocks are counted in", around(network_args, "_factor", lambda *_: 4.0)),
    # DoRA
    Mutant("kohya", "DoRA's magnitude is not read", magnitude(lambda found, _: None)),
    Mutant("kohya", "DoRA's norm is over the other axis", magnitude(other_axis)),
    # strengths
    Mutant("kohya", "all adapters have the first one's strength", strength(lambda f, self, k, c: f(self, k, c) * 0.7 / self.strength)),
    Mutant("kohya", "--strength-for is not read", strength(lambda f, self, k, c: self.strength)),
    Mutant("kohya", "--strength-for te holds for the UNet", strength(lambda f, self, k, c: f(self, k, "te" if c == "unet" else c))),
    Mutant("kohya", "a pattern of --strength-for fits all", strength(lambda f, self, k, c: f(self, f"{k}.attn2", c))),
    Mutant("encoders", "the strength of te2 is te1's", strength(lambda f, self, k, c: f(self, k, {"te1": "te2", "te2": "te1"}.get(c, c)))),
    Mutant("kohya", "the strength is squared", uses(lambda _, use: use._replace(strength=use.strength**2))),
    Mutant("kohya", "a module counts twice", matched(lambda r: replace(
        r, uses={**r.uses, **{k: [*v, v[0]] for k, v in list(r.uses.items())[:1]}}))),
    # lost
    Mutant("kohya", "one module is dropped", lost(f"{BLOCK}_to_q")),
    Mutant("kohya", "an encoder's modules are dropped", grouped(lambda m: not m.name.startswith("lora_te"))),
    Mutant("kohya", "the last module is lost", grouped(lambda m: "layers_1_self_attn_out_proj" not in m.name)),
    Mutant("kohya", "every module is a copy of another", around(DuplicateCheck, "repeats", lambda *_: True)),
    Mutant("kohya", "where two meet, the second is dropped", targets(lambda t, _: t._replace(uses=t.uses[:1]))),
    Mutant("families", "changes of biases are dropped", grouped(lambda m: m.parameter == "weight")),
    Mutant("flux", "a part of a fused tensor is dropped", lost("1.attn.to_v")),
    Mutant("phi3", "one of several on a tensor is dropped", targets(lambda t, _: t._replace(uses=t.uses[1:]))),
    # what nobody changes
    Mutant("kohya", "an untouched tensor is another's", targets(of_other)),
)  # fmt: skip


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Scene]:
    made: dict[str, Scene] = {}

    def scene(name: str) -> Scene:
        if name not in made:
            made[name] = SCENES[name](tmp_path_factory.mktemp(name))
        return made[name]

    return scene


@pytest.fixture(autouse=True)
def _no_cached_rows() -> Iterator[None]:
    yield
    conventions._longest.cache_clear()


@pytest.mark.few(2)
@pytest.mark.parametrize("name", SCENES)
def test_sound_planner_passes_both_proofs(scenes: Callable[[str], Scene], name: str, tmp_path: Path) -> None:
    scene, out = scenes(name), tmp_path / "out.safetensors"
    report = lora_merge.merge(scene.base, scene.adapters, out, **scene.options)
    assert report.verified is not None
    assert report.verified["matching"]["alone"] == []
    for full in (False, True):
        proof = prove(out, search=[scene.base.parent], full=full)
        assert proof["matching"] == report.verified["matching"]


def test_mutants_are_fifty_and_no_two_are_one() -> None:
    assert len({(m.scene, m.does) for m in MUTANTS}) == len(MUTANTS) >= 50


@pytest.mark.few(2)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.scene}: {m.does}")
def test_wrong_planner_is_detected(
    scenes: Callable[[str], Scene], mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, out = scenes(mutant.scene), tmp_path / "out.safetensors"
    monkeypatch.setattr(changes, "check_effect", lambda _: None)  # finds some of them before the proof
    mutant.break_it(monkeypatch)
    with pytest.raises(VerificationFailed) as failed:
        lora_merge.merge(scene.base, scene.adapters, out, **scene.options)
        prove(out, search=[scene.base.parent], full=True)
    assert failed.value.exit_code == 6
    assert not out.exists() or "second reading" not in str(failed.value)


@pytest.mark.slow
def test_mutants_mostly_pass_without_the_second_reading(
    scenes: Callable[[str], Scene], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is this that finds them, not the recomputation, which takes the plan's word."""
    monkeypatch.setattr(verify, "read_again", lambda *_: Confirmation())
    passed = 0
    for n, mutant in enumerate(MUTANTS[::6]):
        with monkeypatch.context() as patch:
            patch.setattr(changes, "check_effect", lambda _: None)
            mutant.break_it(patch)
            scene, out = scenes(mutant.scene), tmp_path / f"{n}.safetensors"
            try:
                lora_merge.merge(scene.base, scene.adapters, out, **scene.options)
            except VerificationFailed:
                continue
            finally:
                conventions._longest.cache_clear()
            passed += 1
    assert passed >= 8

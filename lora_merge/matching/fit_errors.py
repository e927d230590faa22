"""Errors for an adapter that does not fit its base: one error for all problems of one kind, with the likely reason.

The reason is one sentence that names both models, or says why a convolution does not fit. No torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

from ..adapters.modules import weight_shapes
from ..adapters.peft.rules import PeftRules
from ..adapters.training_metadata import stated_model
from ..dtypes import Shape, flat
from ..errors import FitError, MergeError, NoChange, ShapeMismatch, UnmatchedModules
from ..files.checkpoint import Index
from ..files.file_signatures import CHECKPOINT_WITH, foreign, instead
from ..files.folder_layouts import PEFT_PREFIX
from ..models.adapter_architecture import architectures, described, modules_of, variants
from ..models.architectures import Architecture
from ..models.inferred_base import has_words, names_all
from ..models.names import UNKNOWN_TITLE, Names, encoders_of, named_as, of_the_denoiser, reads_with
from ..models.network import Component
from ..models.part_factors import or_strength_zero
from ..models.prefixes import innermost
from ..options import Unmatched
from ..text import NUMBER, Note, by_pattern, counted, listed, plural, with_article
from .patch import Match, Patch

_BLOCK: Final = re.compile(r"(?:^|[._])(?:[a-z]{1,12}_){0,3}(?:(?:res)?blocks|layers|h)[._](\d{1,9})(?=[._])")

TASK: Final = re.compile(r"(?:^|\.)(?:score|classifier|qa_outputs|pre_classifier|classification_head)(?:\.|$)")
TASK_CLASS: Final = re.compile(r"\wFor[A-Z]\w*$")
"""The end of the class of a transformers model for a task: LlamaForCausalLM."""

T5_EMBEDDINGS: Final = re.compile(r"(?:^|\.)shared$")

TRAINED_BASE: Final = "use the base the adapter was trained on"

GROUPED: Final = (
    "; if this is that checkpoint, the layer may be a convolution in {groups} groups: the adapter joins channels of "
    "different groups, which such a weight cannot hold, so it can only be applied when the model runs"
)

UNET: Final = ("lora_unet_", "unet.")
"""Prefixes of names in a U-Net of Stable Diffusion; kohya's scripts also write the first one for other denoisers."""

KOHYA_PREFIX: Final = re.compile(r"lora_(?:unet|te[1-4]?)_")
"""The beginnings of names in adapters for image and video models, of the denoiser and of text encoders."""

COMPARED_NAMES: Final = 1000  # of names of the base that are compared with a module's; a comparison takes 0.1 ms
COMPARED_LETTERS: Final = 120  # letters at the end of a name that are compared
MAP_ROWS: Final = 12  # of a map in a message
SHOWN_NAMES: Final = 2  # nearest names in a message
LETTERS: Final = "ijklmn"
"""The numbers in a row of a map, in order."""

PART_TITLES: Final = {
    "te": "the text encoder",
    "te1": "the first text encoder",
    "te2": "the second text encoder",
    "te3": "the third text encoder",
    "te4": "the fourth text encoder",
    "vae": "the autoencoder",
    "denoiser": "the denoiser",
    "transformer_2": "the second transformer (low noise)",
}


MisfitKind: TypeAlias = Literal["model", "architecture", "variant", "network", "size", "layer", "name"]
"""What is wrong: the adapter is for another model by its metadata or names, or by the shapes of its layers; for another
variant; for a network, a block or a layer that the base lacks; or its names differ from the base's."""

COMPONENT: Final = re.compile("encoder|VAE")
"""Words of the title of a component, which has no name of its own."""

WITHOUT: Final = "or, to merge without it, leave it out or give it strength 0"
LISTED_PATTERNS: Final = 1  # patterns of names that an error lists; the advice after them must stay in view
STRANGE: Final = "unknown tensor"
ZERO_OF_INTEGERS: Final = "a change of 0 to a tensor of whole numbers"


class Misfit(NamedTuple):
    """The likely reason why an adapter does not match a base."""

    kind: MisfitKind
    reason: str  # "" if the advice says all
    advice: str
    adapter: str = ""  # the model that the adapter is for, if that is the reason
    base: str = ""  # the model of the base, if the reason names it

    @property
    def text(self) -> str:
        """The reason and the advice in one sentence."""
        return "; ".join(filter(None, (self.reason, self.advice)))


NO_MODULES: Final = Misfit("layer", "", "use another save of the adapter: this one contains no modules")


def explain(names: Names, unmatched: Sequence[str], shapes: Mapping[str, Shape], adapter: Index) -> Misfit | None:
    """Return the likely reason why modules match nothing in the base.

    `shapes`: module → shape of the weight that it changes, as `weight_shapes` returns them. Without `unmatched` names
    (if shapes differ) None if nothing looks wrong. `adapter`: its metadata count if names and shapes show no other
    model.
    """
    # A network that the base does not have, another model, another kind of model.
    if names.second and any(m.startswith("transformer.") for m in unmatched):
        return missing_networks(["transformer"], ["transformer_2"])
    networks = Counter(names.network_of(m) for m in unmatched)
    labels = {part.label for part in names.parts}
    known, modules = names.known, of_the_denoiser({m: () for m in unmatched} | dict(shapes))
    title = names.what
    by_shapes = known and names.parts[0].label in networks and other_model(modules, known, names.weights(), title)
    is_other = not known and title != names.architecture and not title.startswith(CHECKPOINT_WITH)
    strange = _of_no_model(modules, names, title) if unmatched and is_other else None
    if why := _outer_level(names) or by_shapes or _stated_other(adapter, known, title) or strange:
        return why
    if other := _for_pictures(names, unmatched, shapes):
        return _for_another("model", other, names.architecture)
    if absent := sorted(set(networks) - labels):
        by_names = _for_other_encoders(known, {m: () for m in unmatched} | dict(shapes))
        return by_names or missing_networks(absent, sorted(labels))
    # The network that most of these modules are for.
    part = max(names.parts, key=lambda p: (networks[p.label], p is names.parts[0]), default=None)
    if part is None or part is names.parts[0]:
        return _likely_reason(names, part, {m: shapes.get(m, ()) for m in unmatched}, modules)
    return _likely_reason(
        names, part, {m: shapes.get(m, ()) for m in unmatched if names.network_of(m) == part.label}, {}
    )


def _outer_level(names: Names) -> Misfit | None:
    """Return the misfit of a base whose names are those of a known model but for their common beginning; else None."""
    if not (level := names.outer_level):
        return None
    advice = f"leave that out of each name: name.removeprefix({level!r})"
    count = len(names.parts[0].keys)
    some = "all" if count == len(names.shapes) else str(count)
    return Misfit("name", f"{some} names of the base begin with {level!r}", advice, base=names.what)


def _of_no_model(modules: Mapping[str, Shape], names: Names, title: str) -> Misfit:
    """Return the misfit of a base that is a file of another kind, `title`."""
    of_another = other_model(modules, None, names.weights(), title)
    return of_another or Misfit("model", f"the base is {kind_of_model(title)}", TRAINED_BASE, base=title)


def _stated_other(adapter: Index, base: Architecture | None, title: str) -> Misfit | None:
    """Return the misfit if the metadata of an adapter names another model; else None. `title`: what the base is."""
    stated, _ = stated_model(adapter)
    if base is None or not stated or stated in base.title or base.title in stated:
        return None
    return _for_another("model", f"{stated} (by its metadata)", title)


def _for_another(kind: MisfitKind, model: str, base: str) -> Misfit:
    """Return the misfit of an adapter for another model."""
    trained = f"is for {model}" if kind == "model" else f"looks made for {kind_of_model(model)}"
    return Misfit(kind, f"the adapter {trained}, the base is {kind_of_model(base)}", TRAINED_BASE, model, base)


def _for_pictures(names: Names, unmatched: Sequence[str], shapes: Mapping[str, Shape]) -> str:
    """Return what an adapter is for, by its names, where the base is not a model of images or videos; else "".

    A base that neither a table nor its class knows is none if it has no weight of these shapes.
    """
    sizes = {flat(shape) for shape in names.weights().values()}
    for_task = TASK_CLASS.search(names.architecture) is not None
    if (
        not names.known
        and any(m.startswith(UNET) for m in unmatched)
        and not any(names.knows(m) or (not for_task and shapes.get(m) in sizes) for m in unmatched)
    ):
        return f"the denoiser of an image or video model ({UNET[0]}…)"
    if names.known and names.known.component == "model" and unmatched and all(map(KOHYA_PREFIX.match, unmatched)):
        return f"an image or video model ({unmatched[0]} …)"
    return ""


def variant_doubt(names: Names, shapes: Callable[[], Mapping[str, Shape]]) -> Misfit | None:
    """Return the misfit if the adapter looks made for another variant of the base, else None.

    The names may fit all the same, as those of a text-to-video adapter on a Wan 2.1 image-to-video base. `shapes`
    returns the shapes for `explain`, and is called only if the base has variants.
    """
    known = names.known
    if known is None or not known.variants:
        return None
    return other_variant(of_the_denoiser(shapes()), known, names.weights())


def missing_networks(absent: Sequence[str], present_labels: Sequence[str]) -> Misfit:
    """Return the misfit of modules for networks that the base lacks."""
    missing, present = (listed(map(_part, labels)) for labels in (absent, present_labels))
    holds = "is a single network without one" if list(present_labels) == ["model"] else f"contains only {present}"
    return Misfit("network", f"some modules are for {missing}, the base {holds}",
                  f"use a checkpoint or folder that contains {missing}, too")  # fmt: skip


def _for_other_encoders(base: Architecture | None, modules: Mapping[str, Shape]) -> Misfit | None:
    """Return the misfit if an adapter's names are those of a model with its text encoders, and not of the base's; else
    None."""
    others = named_as(modules)
    if base is None or reads_with(base, encoders_of(modules)) or not others:
        return None
    return _for_another("architecture", described(others, modules_of({})), base.title)


def _part(label: str) -> str:
    return f"the text encoder {label[1:]}" if label[0] == "=" else PART_TITLES.get(label, f"the {label}")


def _likely_reason(
    names: Names, part: Component | None, lost: Mapping[str, Shape], modules: Mapping[str, Shape]
) -> Misfit | None:
    """Return the likely reason, None if nothing is unmatched and nothing looks wrong.

    `lost`: the unmatched modules, with the shapes of the weights that they change, () if their tensors do not show
    them. `modules`: the adapter's modules without their prefixes.
    """
    base, stored = part.architecture if part else None, names.weights(part)
    title = base.title if base else (part and part.title) or names.what
    return (
        other_model(modules, base, stored, title)
        or other_variant(modules, base, stored)
        or _other_size([m for m in lost if names.knows(m)], stored)
        or _other_names(lost, title, stored)
    )


def other_variant(
    modules: Mapping[str, Shape], base: Architecture | None, stored: Mapping[str, Shape]
) -> Misfit | None:
    """Return the misfit if the adapter is for another variant of this architecture; else None."""
    in_adapter, in_base = modules_of(modules), modules_of(stored)
    if base is None or base not in architectures(in_adapter):
        return None
    if not set(variants(base, in_adapter)) - set(variants(base, in_base)):
        return None
    return _for_another("variant", described([base], in_adapter), described([base], in_base))


def other_model(
    modules: Mapping[str, Shape], base: Architecture | None, stored: Mapping[str, Shape], title: str
) -> Misfit | None:
    """Return the misfit if the adapter is for another architecture; else None. `title`: what the base is, if its
    architecture is unknown."""
    in_adapter, in_base = modules_of(modules), modules_of(stored)
    of_adapter, of_base = architectures(in_adapter), (base,) if base else architectures(in_base)
    if not of_adapter or any(a in of_adapter for a in of_base):
        return None
    if not all(names_all(a, modules) for a in of_adapter if has_words(a)):
        return None  # a guess that the adapter's own names do not confirm
    if base is None and {shape for shape in modules.values() if shape} <= {flat(shape) for shape in stored.values()}:
        return None  # the base may have the same layers by other names
    ours = described(of_base, in_base) if of_base else title
    return _for_another("architecture", described(of_adapter, in_adapter), ours)


def kind_of_model(model: str) -> str:
    """Return "a transformers language model" for a kind of model, "a VAE" for a component, the name of a model as it
    is."""
    if model.startswith(("a ", "an ")):
        return model
    if model in ("", UNKNOWN_TITLE):
        return "a model unknown to lora-merge"
    return with_article(model) if model[0].islower() or COMPONENT.search(model) else model


def _other_size(deeper: Sequence[str], stored: Mapping[str, Shape]) -> Misfit | None:
    """Return the misfit of a base with fewer blocks than the adapter changes; else None."""
    highest = max((int(n) for m in deeper for n in _BLOCK.findall(m)), default=-1)
    last = max((int(n) for m in stored for n in _BLOCK.findall(m)), default=-1)
    if highest <= last or last < 0:
        return None
    why = f"the adapter changes block {highest}, the base ends with block {last}: it is a smaller or pruned model"
    return Misfit("size", why, TRAINED_BASE)


def _other_names(unmatched: Mapping[str, Shape], title: str, stored: Mapping[str, Shape]) -> Misfit | None:
    """Return the misfit of names that the base lacks; None without names."""
    if not unmatched:
        return None
    # Heads and embeddings that the base does not store.
    tied = any("embed" in name or "wte" in name for name in stored)
    names = [name.removesuffix(".weight").removesuffix(".bias") for name in unmatched]
    if all(TASK.search(name) for name in names):
        head = names[0].removeprefix(PEFT_PREFIX)
        return Misfit("layer", f"{head} is a head of models for a task (…ForSequenceClassification …)",
                      "load the base as such a model, save it, and merge into that")  # fmt: skip
    if all(name.endswith("embed_tokens") for name in names) and any(T5_EMBEDDINGS.search(name) for name in stored):
        return Misfit("layer", "encoder, decoder and head of the base share one tensor, but the adapter was trained "
                      "with separate ones", TRAINED_BASE)  # fmt: skip
    if tied and all(name.endswith("lm_head") for name in names):
        return Misfit("layer", "the base has no lm_head: it uses its input embeddings (tie_word_embeddings), but the "
                      "adapter was trained with a separate lm_head", "save the base untied first")  # fmt: skip
    # The nearest names, and the rows of a map if these are the same layers.
    base = f"the base is {kind_of_model(title)}"
    name, shape = next(((n, s) for n, s in unmatched.items() if s), (next(iter(unmatched)), ()))
    alike = {key: size for key, size in stored.items() if not shape or flat(size) == shape}
    if not alike:
        return Misfit(
            "name", f"{base}, in which no weight is {list(shape)} as {name} needs it", TRAINED_BASE, base=title
        )
    near = nearest(innermost(name)[1], alike)
    of_shape, are = f"of {list(shape)} " if shape else "", "are" if len(near) > 1 else "is"
    why = f"{base}, with no such name as {name}: the nearest {of_shape}{are} {' and '.join(near)}"
    groups = [*by_pattern(unmatched).values()][:MAP_ROWS]
    rows = [*filter(None, (_row(modules, unmatched, stored) for modules in groups))]
    every = "" if rows else ", with a row for every such name"
    rows = rows or [f'"{innermost(name)[1]}": "{near[0]}"']
    fix = f"if they are the same, write `spellings: {{{', '.join(rows)}}}` to names.yaml and give it with --map"
    advice = f"{fix}{every}, else write the right names, or use a base that has these layers"
    return Misfit("name", why, advice, base=title)


def nearest(name: str, stored: Iterable[str]) -> list[str]:
    """Return the modules of the base, up to two, whose names are most like a module's; one of each pattern."""
    patterns = by_pattern(stored)
    body = NUMBER.sub("{i}", name)
    ratios = {p: SequenceMatcher(None, _words(p), _words(body)).ratio() for p in [*patterns][:COMPARED_NAMES]}
    near = sorted(ratios, key=lambda p: (-ratios[p], p))[:SHOWN_NAMES]
    numbers = NUMBER.findall(name)
    return [next((k for k in patterns[p] if NUMBER.findall(k) == numbers), patterns[p][0]) for p in near]


def _words(name: str) -> list[str]:
    """Return the last words of a name, in which modules of one kind are alike."""
    return re.findall("[a-z]+|[0-9]+|{i}", name[-COMPARED_LETTERS:].lower())


def _row(modules: Sequence[str], unmatched: Mapping[str, Shape], stored: Mapping[str, Shape]) -> str:
    """Return the row of a map with which all modules of one pattern match the base's of another; "" if none does that.

    The nearest names of their shape are tried.
    """
    shape, body = unmatched[modules[0]], innermost(modules[0])[1]
    count = len(NUMBER.findall(body))
    for key in nearest(body, (key for key, size in stored.items() if not shape or flat(size) == shape)):
        if len(NUMBER.findall(key)) != count or count > len(LETTERS):
            continue
        targets = [(_numbered(key, NUMBER.findall(innermost(m)[1])), unmatched[m]) for m in modules]
        if all(target in stored and (not size or flat(stored[target]) == size) for target, size in targets):
            letters = [f"{{{letter}}}" for letter in LETTERS]
            return f'"{_numbered(body, letters)}": "{_numbered(key, letters)}"'
    return ""


def _numbered(name: str, numbers: Sequence[str]) -> str:
    """Return a name with other texts in the place of its numbers."""
    remaining = iter(numbers)
    return NUMBER.sub(lambda _: next(remaining), name)


def advice_for_groups(down: Shape, weight: Shape) -> str:
    """Return the advice for a convolution in groups whose `down` reads the channels of all groups; else "".

    Trainers that add a branch to the layer give this branch all channels (PEFT, kohya's scripts).
    """
    if len(weight) < 3 or len(down) != len(weight) or down[2:] != weight[2:] or not weight[1]:
        return ""
    groups, rest = divmod(down[1], weight[1])
    return "" if rest or groups < 2 or weight[0] % groups else GROUPED.format(groups=groups)


def raise_problems(
    result: Match, names: Names, failures: Sequence[MergeError], unfit: Sequence[Sequence[str]], unmatched: Unmatched
) -> None:
    """Raise the worst problem: modules that do not fit, no module that matches, or some that do not.

    `unfit`: for each module that has another shape, the weights of the base that it changes.
    """
    if result.modules and not (failures or result.unmatched):
        return
    path, index, shapes = result.adapter.path, result.adapter.index, weight_shapes(result.adapter.modules)
    # Modules that do not fit: the first kind of error, with all modules of this kind.
    if failures:
        worst = failures[0]
        same = [e.where.removeprefix(f"{path}: ") for e in failures if type(e) is type(worst)]
        misfit = explain(names, [], shapes, index) if isinstance(worst, ShapeMismatch) else None
        why = misfit.reason if misfit else ""
        if (
            isinstance(worst, ShapeMismatch) and not why and result.unmatched
        ):  # the names may give the reason if the shapes do not
            misfit = explain(names, list(result.unmatched), shapes, index)
            why = misfit.reason if misfit else ""
            if misfit and misfit.kind == "name":
                no_match = f"{plural(len(result.unmatched), 'module')} of the adapter match nothing there"
                why = f"the base is {kind_of_model(names.what)}, and {no_match}"
            why = why if misfit and misfit.adapter else f"{worst.what}: {why}"
        fix = misfit.advice if misfit else worst.fix.written
        if not why and result.modules > len(failures) == len(unfit):
            fix = or_strength_zero(fix, (key for keys in unfit for key in keys))
        modules = result.adapter.modules
        lost = len(failures) + len(result.unmatched.keys() & {m.where for m in modules})
        count = f"{lost} of {len(modules)} modules do not fit, such as " if lost > 1 else ""
        raise type(worst)(why or worst.what, f"{path}: {count}{same[0]}", fix)
    # Modules that match nothing: a file of another kind, no module at all, unknown tensors, or some modules.
    left = counted(by_pattern(result.unmatched), LISTED_PATTERNS)
    if result.modules == 0 and (what := foreign(result.adapter.index.tensors)):
        raise UnmatchedModules(f"this file is {what}", f"{path}: {left}", instead(what))
    misfit = explain(names, list(result.unmatched), shapes, index) or NO_MODULES
    why, fix = misfit.reason, misfit.advice
    where = f"{path}: {left}" + ("" if misfit.base else f"; the base is {kind_of_model(names.what)}")
    if result.modules == 0:
        raise UnmatchedModules(
            f"no module of the adapter is in the base (0 of {result.total}){why and ': '}{why}",
            where,
            fix,
        )
    if unmatched == "error" and set(result.unmatched.values()) == {STRANGE}:
        # their names are not names of layers, which could be compared with the base's
        advice = "correct their names" if misfit.kind == "name" else misfit.text
        raise UnmatchedModules(
            f"the meaning of {len(result.unmatched)} of the adapter's tensors is unknown",
            f"{path}: {left}: neither a parameter of the base nor a tensor of any known method",
            f"{advice}; or leave them out with `--unmatched skip`",
        ).instead(str(path), str(path), "--unmatched", "skip")
    if result.unmatched and unmatched == "error":
        raise _some_unmatched(result, why, where, fix, for_another=misfit.kind == "model")


def _some_unmatched(result: Match, why: str, where: str, fix: str, *, for_another: bool) -> MergeError:
    """Return the error for some modules without a match. Of an adapter for another model, the rest is of no use."""
    path = str(result.adapter.path)
    what = f"{len(result.unmatched)} of {result.total} adapter modules match nothing in the base{why and ': '}{why}"
    if for_another:
        return UnmatchedModules(what, where, fix)
    error = UnmatchedModules(what, where, f"{fix}; or leave them out with `--unmatched skip`")
    return error.instead(path, path, "--unmatched", "skip")


def check_scales(patches: Iterable[Patch], path: Path, rules: PeftRules) -> None:
    """Raise NoChange if the scale of all patches of an adapter is 0, which its configuration or alpha gives."""
    scale = None
    for patch in patches:
        scale = patch.scalars.get("scale")
        if scale != 0 or patch.reads_base:
            return
    if scale == 0:
        zero = rules.zero_alpha
        why = f"its configuration says {zero} = 0" if zero else "the scale of all its modules is 0"
        fix = "state the alpha of the training: `--setting lora_alpha=VALUE`" if zero else "correct its configuration"
        raise NoChange(f"the adapter changes nothing: {why}", str(path), f"{fix}; {WITHOUT}")


def check_variant(result: Match, names: Names, unmatched: Unmatched) -> Note | None:
    """Return the sentence on an adapter that looks made for another variant; FitError unless `unmatched` is "skip"."""
    if result.grown:  # the adapter resizes the base to the variant that it was made for
        return None
    misfit = variant_doubt(names, lambda: weight_shapes(result.adapter.modules))
    if misfit and unmatched == "error":
        what = "the adapter looks made for another variant of the model"
        fix = "use the base it was trained on, or merge all the same with `--unmatched skip`"
        raise FitError(what, f"{result.adapter.path}: {misfit.text}", fix)
    return Note(misfit.text) if misfit else None

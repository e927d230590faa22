"""Reconstructs what an adapter shows of its base: the networks that it changes, names and shapes of weights. No torch.

Names with underscores are read with the names of the parameters that each architecture has (module_forms.json). What
cannot be known from the adapter alone is refused: the architecture, where several fit; the last block, where that
block has other rows; the rows of a part of a fused weight that the adapter leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Final, NamedTuple, TypeAlias

from ..dtypes import Shape
from ..errors import AmbiguousName
from ..grouping import by_key
from .adapter_architecture import architectures, modules_of
from .architectures import Architecture, shipped
from .architectures.notation import RowTable, fill
from .components import ENCODER_IDS, labelled
from .name_table import FlatForms, filled, form, numbers_in, other_names, parameter_forms
from .names import Names, of_the_denoiser, written
from .network import NO_TABLE, Component
from .prefixes import DENOISERS, innermost, prefixed

CANONICAL: Final = ""
SECOND: Final = "transformer_2"
OF_KIND: Final = {"clip_l": "clip", "clip_g": "clip", "clip_h": "clip", "t5": "t5_encoder"}
"""Kind of a text encoder → its architecture file."""

ONLY_ENCODER: Final = {"te": "te1"}
"""Network that kohya's names mean if a model has one text encoder → what others call it."""

Name: TypeAlias = tuple[str, str]
"""(network, name in it)."""

Forms: TypeAlias = Mapping[str, str]
"""Form of a name that adapters use, with its parameter → form of the tensor's own name."""


class InferredParameter(NamedTuple):
    """A parameter that an adapter changes: the module by the adapter's name, `weight` or `bias`, its shape."""

    module: str
    parameter: str
    shape: Shape


class UnknownBaseError(ValueError):
    """A fact about the base that the adapter does not show; the message says which."""


class OtherModel(UnknownBaseError):
    """A name that the architecture lacks."""


def candidates(changes: Sequence[InferredParameter]) -> Sequence[Architecture]:
    """Return the architectures that an adapter's names and widths fit; UnknownBaseError if there is none."""
    bodies = of_the_denoiser({c.module: c.shape for c in changes if c.parameter == "weight"})
    if not (fitting := architectures(modules_of(bodies))):
        raise UnknownBaseError("its module names match no known model")
    return fitting


def has_words(architecture: Architecture) -> bool:
    """Return whether the names of an architecture's parameters are listed: programs spell them differently."""
    return architecture.file.stem in parameter_forms()


def canonical_names(modules: Mapping[str, Shape]) -> tuple[Architecture | None, dict[str, str]]:
    """Return the architecture of an adapter's denoiser, None if unknown, and module → name of its weight in canonical
    words, of those modules whose names it contains. `modules`: name without prefixes → shape, () if unknown."""
    some = [InferredParameter(module, "weight", shape) for module, shape in modules.items()]
    best: tuple[Architecture | None, dict[str, str]] = (None, {})
    for architecture in architectures(modules_of(modules)):
        for layout in (CANONICAL, *architecture.spellings) if has_words(architecture) else ():
            stored = _in_layout(architecture, layout, some)
            if len(stored) > len(best[1]):
                table = architecture.spellings[layout] if layout else NO_TABLE
                best = architecture, {c.module: _canonical(table, name) for c, name in stored.items()}
            if len(stored) == len(some):
                return best
    return best


def _canonical(table: RowTable, name: str) -> str:
    """Return the canonical name of a tensor; of fused rows, that of the first part."""
    hit = table.canonical(tuple(name.split(".")))
    return name if hit is None else ".".join(fill(hit.row.parts[0].path, hit.bound) + hit.tail)


def names_all(architecture: Architecture, modules: Iterable[str]) -> bool:
    """Return whether all modules have names of an architecture, in one of its layouts."""
    some = [InferredParameter(module, "weight", ()) for module in modules]
    layouts = (CANONICAL, *architecture.spellings)
    return any(len(_in_layout(architecture, layout, some)) == len(some) for layout in layouts)


def inferred_base(changes: Sequence[InferredParameter], architecture: Architecture) -> list[Component]:
    """Return the networks that an adapter changes, with those of their tensors that it changes, the denoiser first.

    The tensors' keys are those of a base in the adapter's own words. UnknownBaseError if it does not show them.
    """
    by_network = by_key((_network(innermost(c.module)[0], architecture, c.module), c) for c in changes)
    networks = [_component(network, architecture, some) for network, some in by_network.items()]
    shapes = {key: shape for c in networks for key, shape in c.shapes.items()}
    return labelled(replace(c, shapes=shapes) for c in networks)


def complete(component: Component, layout: str) -> Component:
    """Return the network with the parts of fused weights of a layout that the adapter leaves out; UnknownBaseError if
    their rows are unknown."""
    architecture = component.architecture
    tables = architecture.spellings if architecture else {}
    if layout not in tables or layout == component.layout:
        return component
    canonical_shapes = {name: view.shape for name, view in component.views(CANONICAL).items()}
    table, added = tables[layout].settled(canonical_shapes), dict[str, Shape]()
    for name, shape_of_name in canonical_shapes.items():
        hits = table.spelled(tuple(name.split(".")))
        if not hits and any(table.spellings_of(tuple(form(name).split(".")))):
            raise OtherModel(f"{name} has numbers that the layout {layout} lacks")
        for hit in hits:
            if hit.row.stack:
                raise UnknownBaseError("the number of experts is not in its file")
            parts = [(".".join(fill(part.path, hit.bound) + hit.tail), part.sized) for part in hit.row.parts]
            equal = next((canonical_shapes[n][0] for n, sized in parts if n in canonical_shapes and not sized), 0)
            for lacking, sized in ((n, sized) for n, sized in parts if n not in canonical_shapes):
                if component.layout != CANONICAL or not (sized or equal):
                    raise UnknownBaseError(f"it leaves out {lacking}, whose rows it does not show")
                added[lacking] = (shape_of_name[1] if sized else equal, *shape_of_name[1:])
    keys = {name: component.prefix + name for name in added}
    shapes = {component.prefix + name: shape for name, shape in added.items()}
    return replace(component, keys={**component.keys, **keys}, shapes={**component.shapes, **shapes})


def _network(hint: str, architecture: Architecture, module: str) -> str:
    """Return the network of a module: the denoiser, the second one, or the kind of a text encoder."""
    if hint in ("any", *DENOISERS):
        return SECOND if hint == SECOND else "denoiser"
    kind = ENCODER_IDS.get(hint[1:], hint[1:]) if hint[0] == "=" else architecture.text_encoders.get(hint, hint)
    if kind not in OF_KIND:
        raise UnknownBaseError(f"{module} belongs to a network whose names are not known without it")
    return kind


def _component(network: str, denoiser: Architecture, some: Sequence[InferredParameter]) -> Component:
    """Return a network with the keys of the changed tensors, in the layout in which all names are known."""
    kind = network if network in OF_KIND else ""
    model = next(a for a in shipped() if a.file.stem == OF_KIND[kind]) if kind else denoiser
    prefix = f"{kind or network}." if kind or network == SECOND else ""
    # The layouts that know all of its names; they must agree on the names of the architecture's file.
    read = {layout: _in_layout(model, layout, some) for layout in (CANONICAL, *model.spellings)}
    ways = {layout: names for layout, names in read.items() if len(names) == len(some)}
    if not ways:
        known = max(read.values(), key=len)
        lacking = next(change.module for change in some if change not in known)
        raise OtherModel(f"{lacking} is no known name in {model.title}")
    layout, names = next(iter(ways.items()))
    if any({*others.values()} != {*names.values()} for others in ways.values()) or (
        not layout and any(_renames(model.spellings[other], names.values()) for other in ways if other)
    ):
        raise UnknownBaseError(f"its names fit {model.title} in two ways")
    component = Component(
        "te" if kind else "denoiser", SECOND if network == SECOND else model.component, prefix, model, layout,
        kind=kind,
        keys={name: prefix + name for name in names.values()},
        shapes={prefix + names[change]: change.shape for change in some},
    )  # fmt: skip
    # The names must be some that the model has, up to its last block.
    if layout:
        table = model.spellings[layout]
        for name in names.values():
            if table.canonical(tuple(name.split("."))) is None and any(table.names_of(tuple(form(name).split(".")))):
                raise OtherModel(f"{name} has numbers that {model.title} lacks")
        _check_last(component, table)
    else:
        for table in model.spellings.values():
            _check_last(component, table)
    return component


def _in_layout(
    architecture: Architecture, layout: str, some: Iterable[InferredParameter]
) -> dict[InferredParameter, str]:
    """Return the tensors' own names in a layout, of those changes whose names it knows."""
    forms, flat = forms_of(architecture.file.stem, layout)
    stored: dict[InferredParameter, str] = {}
    for change in some:
        readings = (text for _, body in prefixed(change.module) for text in written(body))
        names = next(filter(None, (_names(text, forms, flat) for text in readings)), set())
        if len(names) == 1:
            name = names.pop()
            stored[change] = f"{name.removesuffix('.weight')}.bias" if change.parameter == "bias" else name
    return stored


def _names(body: str, forms: Forms, flat: FlatForms) -> set[str]:
    name = f"{body}.weight"
    if of := forms.get(form(name)):
        return {filled(of, numbers_in(name))}
    return {filled(forms[of], numbers_in(path)) for path, of in flat.paths(name) or ()}


@cache
def forms_of(stem: str, layout: str) -> tuple[Forms, FlatForms]:
    """Return the forms of the names of an architecture's parameters in the words of one layout."""
    architecture = next(a for a in shipped() if a.file.stem == stem)
    table = architecture.spellings.get(layout) if layout else None
    forms: dict[str, str] = {}
    for of in parameter_forms().get(stem, ()):
        path = tuple(of.split("."))
        spelled = [".".join(name) for _, name in table.spellings_of(path)] if table else []
        for name in spelled or [of]:
            forms[name] = name
    for name in [*forms]:
        for other in other_names(name, ()):
            forms.setdefault(other, name)
    return forms, FlatForms(forms)


def _renames(table: RowTable, names: Iterable[str]) -> bool:
    """Return whether a table gives one of these names, read as its own, another canonical name."""
    for name in names:
        path = tuple(name.split("."))
        hit = table.canonical(path)
        if hit is not None and (len(hit.row.parts) > 1 or fill(hit.row.parts[0].path, hit.bound) + hit.tail != path):
            return True
    return False


def _check_last(component: Component, table: RowTable) -> None:
    """Raise UnknownBaseError if a row is for the last block alone, and the shapes do not show which block that is.

    The last block has a row of its own because its layer has other rows than that of the others.
    """
    for row in table.last_rows(component.keys):
        for start in (".".join(path) + "." for path in (row.name, *(part.path for part in row.parts))):
            for name in (n for n in component.keys if n.startswith(start)):
                path = tuple(name.split("."))
                if table.closed.canonical(path) is None and not table.closed.spelled(path):
                    continue  # only the last block has this name
                alike = {component.shapes[k] for n, k in component.keys.items() if form(n) == form(name) and n != name}
                if component.shapes[component.keys[name]] in alike or not alike:
                    raise UnknownBaseError(f"it does not show which block is the last one, for {name}")


def common_names(a: Mapping[str, Shape], b: Mapping[str, Shape]) -> tuple[Mapping[str, Name], Mapping[str, Name]]:
    """Return for each adapter module → name, so that modules of one weight have one name. `a`, `b`: module → the shape
    of its weight, () if it is not known.

    The names are the adapters' own, flat and without prefixes, if that pairs all modules. Otherwise they are those of
    the model that both adapters are made for, if it is known and more modules pair by them.
    """
    plain_names = {name: plain(name) for name in a}, {name: plain(name) for name in b}
    if {*plain_names[0].values()} == {*plain_names[1].values()}:
        return plain_names
    of_model = _of_model(a), _of_model(b)
    return max(plain_names, of_model, key=lambda both: len({*both[0].values()} & {*both[1].values()}))


def plain(name: str) -> Name:
    """Return the network and the name in it as all dialects of one layout spell it: flat, without prefixes."""
    hint, body = prefixed(name)[-1]
    network = "" if hint in ("any", *DENOISERS) else ONLY_ENCODER.get(hint, hint)
    return network, body.lower().replace(".", "_")


def _of_model(modules: Mapping[str, Shape]) -> dict[str, Name]:
    """Return module → name in the words of the architecture's file; {} if the model is unknown."""
    parameters = [InferredParameter(name, "weight", shape) for name, shape in modules.items()]
    if not all(modules.values()):
        return {}
    try:
        for architecture in candidates(parameters):
            if (named := _named(parameters, architecture)) is not None:
                return named
    except (UnknownBaseError, AmbiguousName):
        return {}
    return {}


def _named(parameters: Sequence[InferredParameter], architecture: Architecture) -> dict[str, Name] | None:
    """Return module → name in the words of an architecture; None if it is another one."""
    try:
        parts = inferred_base(parameters, architecture)
    except OtherModel:
        return None
    names = Names(parts, {key: shape for part in parts for key, shape in part.shapes.items()})
    views = {view: (part.label, name) for part in parts for name, view in part.views(CANONICAL).items()}
    placed = ((change.module, names.find(change.module)) for change in parameters)
    return {module: views[view] for module, view in placed if view in views}

"""What joins the modules of several adapters where no base was given: their names without prefixes. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final, TypeAlias

from ...adapters.file import AdapterFile, Module
from ...algorithms import ALGORITHMS
from ...errors import FitError, InputError, UsageError
from ...models.assumed import Change, NotTold, assumed, candidates
from ...models.guess import architectures, seen
from ...models.names import of_the_denoiser
from ...models.prefixes import prefixed
from ...shapes import Shape
from ..job import GIVE_BASE

SAME: Final = {"transformer": "denoiser", "prior": "denoiser", "te": "te1"}


def body_of(name: str) -> str:
    """Return a name that all dialects with the same words share: its network, and its path with underscores."""
    network, body = prefixed(name)[-1]
    return f"{SAME.get(network, network)}/{body.replace('.', '_')}"


def shape_of(module: Module) -> Shape | None:
    """Return the shape of the parameter that a module changes, where its tensors show it."""
    shown = (ALGORITHMS[name].shown_shape(module.shapes) for name in module.complete)
    return next((shape for shape in shown if shape is not None), None)


Joined: TypeAlias = Mapping[tuple[str, str], Sequence[tuple[int, Module]]]
"""Name without its prefix, and parameter → the modules that change it, each with the number of its adapter."""


def joined(files: Sequence[AdapterFile]) -> Joined:
    """Return the modules of adapters, joined by their names alone; UsageError where these do not say which modules are
    the same, FitError for different models."""
    found: dict[tuple[str, str], list[tuple[int, Module]]] = {}
    for number, file in enumerate(files):
        for module in file.modules:
            found.setdefault((body_of(module.name), module.parameter), []).append((number, module))
    _check(found, files)
    return found


def _check(joined: Joined, files: Sequence[AdapterFile]) -> None:
    for members in joined.values():
        twice = [n for n, _ in members]
        if len(twice) != len(set(twice)):
            raise InputError("two modules of one adapter have one name without prefixes",
                             f"{files[twice[0]].path}: {members[0][1].name}", GIVE_BASE)  # fmt: skip
    known = [(f, frozenset(a.title for a in architectures(seen(of_the_denoiser(_shapes(f)))))) for f in files]
    (first, its), *others = [(f, titles) for f, titles in known if titles] or [(files[0], frozenset())]
    if other := next(((f, titles) for f, titles in others if not titles & its), None):
        raise FitError(
            f"two adapters are for different models: {' or '.join(sorted(its))}, and {' or '.join(sorted(other[1]))}",
            f"{first.path} and {other[0].path}", "combine adapters of one model",
        )  # fmt: skip
    if any({n for n, _ in members} != {*range(len(files))} for members in joined.values()):
        expect_one_layout([(f.path.name, _changes(f)) for f in files])
    styles = [frozenset(_styles(f)) for f in files]
    for number in range(1, len(files)):
        if styles[number] & styles[0]:
            continue
        if not any({0, number} <= {n for n, _ in members} for members in joined.values()):
            raise UsageError("two adapters in different dialects share no module by name",
                             f"{files[0].path.name} and {files[number].path.name}", GIVE_BASE)  # fmt: skip
    for members in joined.values():
        number, module = members[0]
        if number and not styles_of(module.name) & styles[0]:
            raise UsageError("a module that the first adapter lacks has a name in another dialect",
                             f"{files[number].path}: {module.name}", GIVE_BASE)  # fmt: skip


def expect_one_layout(adapters: Sequence[tuple[str, Sequence[Change]]]) -> None:
    """Raise UsageError where adapters have names of one model in the words of two layouts, such as its authors' and
    diffusers': a weight would have two names. `adapters`: the name of each, and its changes."""
    if _is_told([change for _, changes in adapters for change in changes]):
        return
    (first, its), *others = adapters
    if not _is_told(its):
        return
    for name, changes in others:
        if _is_told(changes) and not _is_told([*its, *changes]):
            raise UsageError("two adapters name the weights of the model in different words", f"{first} and {name}",
                             GIVE_BASE)  # fmt: skip


def _is_told(changes: Sequence[Change]) -> bool:
    """Return whether one layout of a known model has all names."""
    changes = [*{(c.module, c.parameter): c for c in changes}.values()]
    try:
        known = candidates(changes)
    except NotTold:
        return False
    for architecture in known:
        with suppress(NotTold):
            return bool(assumed(changes, architecture))
    return False


def _changes(file: AdapterFile) -> list[Change]:
    """Return the changes of weights whose shapes an adapter shows."""
    return [Change(m.name, m.parameter, shape) for m in file.modules if (shape := shape_of(m)) is not None]


def _styles(file: AdapterFile) -> Iterator[str]:
    for module in file.modules:
        yield from styles_of(module.name)


def styles_of(name: str) -> frozenset[str]:
    """Return the prefix of a name, and whether the rest has dots."""
    _, body = prefixed(name)[-1]
    return frozenset({f"{name[: len(name) - len(body)].partition('.')[0].rstrip('_0123456789')[:5]}/{'.' in body}"})


def _shapes(file: AdapterFile) -> dict[str, Shape]:
    return {m.name: shape_of(m) or () for m in file.modules if m.parameter == "weight"}

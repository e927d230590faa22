"""What a comparison means, in one sentence: equal, equal but for rounding, one in the other, independent, different.

A verdict has a `kind` for programs, a `level` (good, warning, bad) and a `text`. Whether two models are equal but for
rounding is known of every number; what two adapters have in common follows from the inner products of their changes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any, Final

from ..facts import share_of
from ..survival import spoken
from ..text import listed, plural, with_article

SAME_CHANGE: Final = 0.005
"""‖ΔB − ΔA‖ / ‖ΔA‖ of one change that is stored twice: a bf16 number is rounded by at most 1/256 of itself."""

STRENGTH_SPREAD: Final = 0.05
"""How much the strength at which one adapter is in the other may vary over the modules. Of two trainings on the same
pictures it varies by more than a half."""

INDEPENDENT: Final = 0.1
"""The cosine below which two changes are independent: those of unrelated trainings are within a few hundredths of 0."""

UNRELATED: Final = 0.8
"""‖B − A‖ / ‖A‖ of models that were trained apart, which is about √2; that of fine-tunes is below a half."""

TAKEN_OUT: Final = re.compile(r":0(?=,|$)")
"""The strength of an adapter that a later merge has taken out again."""

LEAST_MODULES: Final = 3  # modules from which a strength is concluded


def signed(cosine: float) -> str:
    """Return a cosine with its sign; 0.000 has none."""
    text = f"{cosine:+.3f}"
    return text if float(text) else "0.000"


def model_verdict(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the verdict about two models, from their comparison."""
    compared, different, rounded = result["compared"], result["different"], sum(result["rounded"].values())
    only_a, only_b = len(result["only_a"]), len(result["only_b"])
    first, other = result["architectures"]
    alone = [f"{plural(count, 'tensor')} only in {side}" for side, count in (("A", only_a), ("B", only_b)) if count]
    if result["other_shapes"]:
        alone.append(f"{plural(len(result['other_shapes']), 'tensor')} of other shapes")
    if not compared or len(result["other_shapes"]) > compared:
        models = f": A is {first}, B is {other}" if first != other else ""
        return _verdict("different models", "bad", f"Different models{models}; {compared} tensors can be compared.")
    return _different(result, f"; {listed(alone)}" if alone else "") if different or rounded else _equal(result, alone)


def _different(result: Mapping[str, Any], extra: str) -> dict[str, Any]:
    """Return the verdict about two models with common tensors that are not all equal. `extra`: what only one has."""
    compared, different, rounded = result["compared"], result["different"], sum(result["rounded"].values())
    first, other = result["architectures"]
    merged = next((side for side, adapters in zip("AB", result["merges"], strict=True) if adapters), "")
    if not different and not merged:
        of = next(iter(result["rounded"]))
        same = f"The same model: {of}, and nothing else differs" if of else _rounded_anew(rounded, compared)
        return _verdict("rounding", "good", f"{same}{extra}.")
    share = result["total"]["relative"]
    if different and (share is None or share >= UNRELATED):
        if first != other:
            return _verdict("different models", "bad", f"Different models: A is {first}, B is {other}.")
        text = "Different weights: the models have the same layers, and nothing in common in them"
        return _verdict("different weights", "bad", f"{text}{extra}.")
    changes = _changes(result, different, rounded)
    if merged:
        base, every = "A" if merged == "B" else "B", result["merges"]["AB".index(merged)]
        if not (left := [adapter for adapter in every if not TAKEN_OUT.search(adapter)]):
            names = listed((TAKEN_OUT.sub("", adapter) for adapter in every), 3)
            text = f"{merged} is {base} again, with {names} merged and taken out, by the recipe in {merged}: {changes}"
            return {**_verdict("rounding", "good", f"{text}{extra}."), "inner": base}
        text = f"{merged} is {base} with {listed(left, 3)} merged, by the recipe in {merged}: {changes}"
        return {**_verdict("merged", "good", f"{text}{extra}."), "inner": base}
    return _verdict("changed", "good", f"B is A with changes: {changes}{extra}.")


def _rounded_anew(rounded: int, compared: int) -> str:
    return f"The same but for rounding: {rounded} of {compared} tensors differ, by at most one step of their dtype"


def _changes(result: Mapping[str, Any], different: int, rounded: int) -> str:
    """Return which tensors are changed and by how much, and which are only rounded."""
    compared, share = result["compared"], result["change"]["relative"]
    parts = dict.fromkeys(name.partition(" ")[0] for name, d in result["blocks"].items() if d["different"])
    moved = f", by {share_of(share, 'their weights')}" if share is not None else ""
    changed = f"{different} of {plural(compared, 'tensor')} changed in {listed(parts)}{moved}"
    of = next(iter(result["rounded"]), "")
    rest = f"the rest differs by rounding alone ({of})" if of else f"{rounded} more differ by rounding alone"
    if not different:
        return f"no tensor changed by more than rounding{f' ({of})' if of else ''}"
    return f"{changed}; {rest}" if rounded else changed


def _equal(result: Mapping[str, Any], alone: Sequence[str]) -> dict[str, Any]:
    """Return the verdict about two models whose common tensors are equal. `alone`: what only one of them has."""
    compared, more = result["compared"], len(result["only_a"]) + len(result["only_b"])
    if not alone:
        stored = f" ({next(iter(result['dtypes']))})" if result["dtypes"] else ""
        return _verdict("equal", "good", f"Equal: all {compared} tensors have the same values{stored}.")
    if len(alone) == 1 and more:
        inner, outer = ("A", "B") if result["only_b"] else ("B", "A")
        text = f"{outer} contains {inner} unchanged ({plural(compared, 'tensor')}), and {more} more."
        return _verdict("contains", "good", text)
    return _verdict("equal in common", "good", f"Equal in the common tensors ({compared}); {listed(alone)}.")


def adapter_verdict(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the verdict about two adapters, from their comparison."""
    total, rows = result["total"], result["modules"].values()
    whole = result.get("whole", {})
    if not rows and not whole:
        a, b = result["made_for"]
        if a == b:
            text = (
                "No module has the same name in both. If they are for the same model, compare them with --base MODEL."
            )
            return _verdict("unknown", "warning", text)
        first, other = map(_with_article, (a, b))
        text = f"Different models: A is for {first}, B for {other}; no module is in both."
        return _verdict("different models", "bad", text)
    if result.get("identical"):
        return _verdict("equal", "good", "Equal: both have the same tensors.")
    if total["cosine"] is None:
        return _verdict("unknown", "warning", "Too little can be compared for a verdict.")
    return _contained(result) or _common(result)


def _with_article(model: str) -> str:
    """Return "a transformers language model" for a kind of model, the name of a model as it is."""
    if model == "unknown":
        return "an unknown model"
    return with_article(model) if model[:1].islower() else model


def _contained(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the verdict about two adapters if one is in the other, or equal to it; else None."""
    total, rows = result["total"], result["modules"].values()
    a, b, cosine = total["a"], total["b"], total["cosine"]
    lone = {side: len(result[f"only_{side}"]) for side in ("a", "b")}
    apart = sqrt(max(a * a + b * b - 2 * cosine * a * b, 0.0))
    if not any(lone.values()) and apart <= SAME_CHANGE * a:
        return _verdict("rounding", "good", "The same change but for rounding: merge only one of them.")
    contained = []  # how much the strength varies, inner, outer, strength
    for inner, outer, (mine, theirs) in (("A", "B", ("a", "b")), ("B", "A", ("b", "a"))):
        pairs = [(row[mine], row[theirs], row["cosine"]) for row in rows if row["cosine"] is not None]
        strength, spread = _steady(pairs)
        if strength and not lone[mine] and len(rows) >= LEAST_MODULES:
            contained.append((spread, inner, outer, strength))
    if not contained:
        return None
    same = abs(cosine) > 1 - SAME_CHANGE and not any(lone.values())
    _, inner, outer, strength = contained[0] if same else min(contained)  # what is more is at right angles to the inner
    if strength < 0:
        text = f"Opposite: {outer} contains {strength:.3g} × {inner}. Merged together, they cancel."
    elif same and abs(strength - 1) < STRENGTH_SPREAD:
        text = f"The same change but for rounding ({spoken(strength)} of A's change is in B): merge only one of them."
        return _verdict("rounding", "good", text)
    elif same:
        text = f"The same change at another strength: {outer} is {strength:.3g} × {inner}. Merge only one."
    else:
        sizes = (a, b) if inner == "A" else (b, a)
        part = spoken((strength * sizes[0] / sizes[1]) ** 2)
        text = f"{outer} contains {inner} at strength {strength:.3g} ({part} of {outer}'s change): do not merge both."
    return {**_verdict("contains", "warning", text), "strength": strength, "inner": inner}


def _common(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the verdict about two adapters by the cosine of their changes."""
    a, b, cosine = (result["total"][name] for name in ("a", "b", "cosine"))
    if result["fight"]:
        blocks = sorted(result["fight"], key=lambda name: result["blocks"][name]["cosine"])
        opposed = f"{plural(len(blocks), 'block')} in opposite directions ({listed(blocks, 3)})"
        text = f"Opposed: they change {opposed}; lower one of their strengths there (--strength-for)."
        return _verdict("opposed", "warning", text)
    if abs(cosine) < INDEPENDENT:
        return _verdict("independent", "good", "Independent: both can be merged at full strength.")
    half = sqrt(a * a + b * b) / sqrt(a * a + b * b + 2 * cosine * a * b)
    text = f"Alike (cosine {signed(cosine)}): together they are too strong; try {half:.2g} of each."
    return _verdict("alike", "warning", text)


def _steady(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return the strength at which the first change is in the second, if it is the same in all modules, and by which
    share of itself it varies; else 0, and 0.

    `rows`: ‖ΔA‖, ‖ΔB‖ and cosine of each module. s = ⟨ΔA, ΔB⟩ / ‖ΔA‖².
    """
    weights = sum(a * a for a, _, _ in rows)
    if not weights:
        return 0.0, 0.0
    strength = sum(cosine * a * b for a, b, cosine in rows) / weights
    spread = sum(a * a * (cosine * b / a - strength) ** 2 for a, b, cosine in rows if a) / weights
    steady = abs(strength) >= INDEPENDENT and sqrt(spread) <= STRENGTH_SPREAD * abs(strength)
    return (strength, sqrt(spread) / abs(strength)) if steady else (0.0, 0.0)


def _verdict(kind: str, level: str, text: str) -> dict[str, Any]:
    return {"kind": kind, "level": level, "text": text}

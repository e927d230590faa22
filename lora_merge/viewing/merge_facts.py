"""What a merge did and what was proven of it, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from ..text import listed, plural, size
from .facts import Fact, line, percent

MOST: Final = 1.1
"""A share up to which rounding adds to a change, or takes from nothing, by chance alone."""

ENLARGED: Final = "A share above 100% is no mistake: the steps of the output's dtype are larger than the change there."


def saturated(counts: Mapping[str, int]) -> str:
    """Return how many numbers were cut, by tensor."""
    most = sorted(counts, key=lambda name: (-counts[name], name))
    return f"{plural(sum(counts.values()), 'number')} too large for the output's dtype: " + listed(
        [f"{counts[name]} of {name}" for name in most]
    )


def recomputed(proof: Mapping[str, Any]) -> list[str]:
    """Return how much of a merge was computed again, and how far the output is from the exact numbers."""
    if not proof["changed"]:
        return ["all tensors were copied, from the base or an adapter; none had to be computed again"]
    rows = "every row" if proof["full"] else plural(proof["rows"], "row")
    return [
        f"{proof['tensors']} of {plural(proof['changed'], 'merged tensor')} computed again in fp64, {rows}",
        f"at most {proof['worst_ulp']:.2f} ulp from the exact numbers (perfect rounding has 0.50), judged by the bound "
        f"of {proof['bound']['compute_dtype']}",
    ]


def unchanged(same: Mapping[str, int]) -> str:
    """Return how much of the unchanged tensors was compared with the base."""
    share = "every byte" if same["bytes"] == same["of"] else f"a sample of {size(same['bytes'])} of {size(same['of'])}"
    return f"unchanged tensors are those of the base: {share}"


def effect(numbers: Mapping[str, Any]) -> str:
    """Return how large a change is beside the weights, and in how many of them the output's precision loses it."""
    every = numbers["all"]
    if every["ratio"] is None:
        said = "the changed weights were zero"
    else:
        said = f"{percent(every['ratio'])} of the weights (‖ΔW‖ / ‖W‖), {every['changed']:.1%} of their numbers differ"
    if numbers["below"]:
        said += f"; less than 90% of it is in {plural(numbers['below'], 'weight')}, least in {numbers['worst']}"
    return said


def of_a_sample(proof: Mapping[str, Any]) -> str:
    """Return that numbers are those of the rows that a proof has read, unless a merge has counted all (`counted`)."""
    counted = proof["full"] or proof.get("counted", False)
    return "" if counted else f", in the {plural(proof['rows'], 'row')} that were read"


def retained(share: float | None) -> str:
    """Return the share of a change that is in the output. Rounding may add to it where its steps are larger than the
    change, or leave nothing of it."""
    if share is None:
        return "?"
    if share > MOST:
        return f"{share:.0%} (rounding is larger than the change)"
    return f"{share:.1%}" if share >= 1 - MOST else "none (rounding is larger than the change)"


def unused(account: Mapping[str, Any]) -> str:
    """Return how many tensors of the adapters change nothing, and why the first of them do not."""
    first = [f"{name} ({why})" for name, why in [*account["reasons"].items()][:3]]
    more = account["unused"] - len(first)
    names = ", ".join(first) + (f" and {more} more" if more else "")
    return f"{account['unused']} of {account['tensors']} adapter tensors change nothing: {names}"


def matched(matching: Mapping[str, Any]) -> str:
    """Return for how many modules a second reading of the adapters found the plan's place and numbers."""
    left, first = matching["modules"] - matching["proven"], matching["alone"][:3]
    names = ", ".join(first) + (f" and {left - len(first)} more" if left > len(first) else "")
    unknown = " and ".join(f"{what} ({count})" for what, count in matching.get("why", {}).items())
    more = f"; {left} checked by numbers but not by place: {names}; the second reading does not know {unknown}"
    more = more if left else ""
    return f"proven a second way for {matching['proven']} of {plural(matching['modules'], 'module')}{more}"


def proof_rows(proof: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield what a proof found."""
    yield line("proven", proof["output"])
    how = f"{proof['tensors']} of {plural(proof['changed'], 'merged tensor')}, {plural(proof['rows'], 'row')}"
    by = f"judged by the bound of {proof['bound']['compute_dtype']}"
    yield line("recomputed", f"{how}: at most {proof['worst_ulp']:.2f} ulp from the exact numbers, {by}")
    yield line("unchanged", f"{size(proof['untouched']['bytes'])} of {size(proof['untouched']['of'])} compared")
    for row in proof["retained"]:
        yield line("retained", f"{row['adapter']}: {retained(row['retained'])}")
    yield from (line("warning", warning) for warning in proof["warnings"])


def proof_of_adapter(proof: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield what the proof of a written adapter found."""
    yield line("proven", proof["output"])
    layers = f"{proof['recomputed']} of {plural(proof['layers'], 'layer')}"
    yield line("recomputed", f"{layers}; its inputs give the same bytes")

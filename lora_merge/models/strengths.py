"""The strength of an adapter for each tensor: the adapter's own, times the factor of every part with that tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Final

from ..errors import UsageError
from ..job import BLOCK_PATH, PARTS, Adapter
from ..limits import STEPS_A_NAME, Refused, Steps
from ..options import BLOCK_LIST, REGEX
from ..text import listed
from .blocks import Blocks, blocks
from .names import Names

NEAR: Final = 300  # most tensor names compared with an unknown part, and most characters; a comparison takes 0.3 ms


class Strengths:
    """One adapter's strength on one base, tensor by tensor."""

    def __init__(self, adapter: Adapter, names: Names, steps: Steps) -> None:
        """Prepare the parts of one adapter. `steps`: how long all regular expressions of the job may search."""
        self.path, self.strength = adapter.path, adapter.strength
        self._parts, self._steps = adapter.parts, steps
        named = [part for part, _ in self._parts if _is_block(part)]
        self._blocks: Blocks | None = blocks(names) if named else None
        self._weights = {part: self._weighted(part, self._blocks) for part in named if self._blocks}

    def factor(self, key: str, component: str) -> float:
        """Return the strength for one tensor of the base. `key`: its name in the base; `component`: its network."""
        found = self.strength
        self._steps.left += STEPS_A_NAME
        block = self._blocks.of(key) if self._blocks else ""
        for part, value in self._parts:
            if part in self._weights:
                weights = self._weights[part]
                found *= value * weights[block] if block in weights else 1.0
            elif self._covers(part, key, component):
                found *= value
        return found

    def check(self, components: Mapping[str, str]) -> None:
        """Raise UsageError for a part that covers no tensor of the base. `components`: key → component."""
        self._steps.left += STEPS_A_NAME * len(components)
        for part, _ in self._parts:
            if part in self._weights or any(self._covers(part, key, of) for key, of in components.items()):
                continue
            likely = [*components][:NEAR]
            written = part.removeprefix(REGEX)
            near = get_close_matches(written[:NEAR], likely, 2, 0.0) if written != part else []
            known = listed(near or sorted(set(components.values())), 6)
            raise UsageError("the base has no such part", f"--strength-for {part}",
                             f"correct it; {'similar names are' if near else 'the base has'} {known}; "
                             "lora-merge parts BASE lists its parts and blocks")  # fmt: skip

    def _weighted(self, part: str, base: Blocks) -> Mapping[str, float]:
        """Return block → factor for a part that names blocks; UsageError if the base lacks such a block."""
        where = f"--strength-for {part[:80]}"
        if part.startswith(BLOCK_LIST):
            return base.weights(part.removeprefix(BLOCK_LIST), where)
        chosen = base.chosen(part)
        if not chosen:
            fix = f"this base has {listed(base.order, 12)}; `lora-merge parts BASE` lists all"
            raise UsageError("the base has no such block", where, fix)
        return dict.fromkeys(chosen, 1.0)

    def _covers(self, part: str, key: str, component: str) -> bool:
        """Return whether a part that names no blocks covers a tensor of the base.

        `te` covers every text encoder; `transformer` and `unet` both name the denoiser.
        """
        if part.startswith(REGEX):
            return self._matches(part.removeprefix(REGEX), key)
        if path := BLOCK_PATH.fullmatch(part):
            found = re.search(rf"(?:^|\.){re.escape(path['path'])}\.([0-9]{{1,9}})\.", key)
            return found is not None and int(path["first"]) <= int(found[1]) <= int(path["last"] or path["first"])
        if part == "te":
            return component.startswith("te")
        denoiser = {"unet", "transformer"}
        return part == component or (part in denoiser and component in denoiser)

    def _matches(self, expression: str, key: str) -> bool:
        try:
            return self._steps.pattern(expression).matches(key, self._steps, anywhere=True)
        except Refused as e:
            where = f"--strength-for re:{expression[:80]}, at {key[:80]!r}"
            raise UsageError(f"a regular expression that is {e}", where, "use a plain part, or a simpler one") from e


def _is_block(part: str) -> bool:
    return part not in PARTS and not part.startswith(REGEX) and not BLOCK_PATH.fullmatch(part)

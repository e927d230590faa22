"""Lists of block weights against the tables of the programs that they come from, on the layouts of real models.

Facts: `get_lbw_block_index` and the tables of sd-scripts' networks/svd_merge_lora.py, and BLOCKID12 … BLOCKIDFLUX with the
presets of sd-webui-lora-block-weight's lora_block_weight.py.
"""

from __future__ import annotations

import re

import pytest

from tests.kit.blocks import blocks_of, shapes_of

INPUTS, OUTPUTS = [f"IN{n:02d}" for n in range(12)], [f"OUT{n:02d}" for n in range(12)]
TABLE26 = ["BASE", *INPUTS, "M00", *OUTPUTS]
LISTS = {
    26: ("sd15", TABLE26),
    17: ("sd15", ["BASE", "IN01", "IN02", "IN04", "IN05", "IN07", "IN08", "M00", *OUTPUTS[3:]]),
    20: ("sdxl", ["BASE", *INPUTS[:9], "M00", *OUTPUTS[:9]]),
    12: ("sdxl", ["BASE", "IN04", "IN05", "IN07", "IN08", "M00", *OUTPUTS[:6]]),
    61: ("flux-dev", ["CLIP", "T5", "IN", *(f"D{n:02d}" for n in range(19)), *(f"S{n:02d}" for n in range(38)), "OUT"]),
}
PRESETS17 = {
    "INS": "1,1,1,1,0,0,0,0,0,0,0,0,0,0,0,0,0",
    "IND": "1,0,0,0,1,1,1,0,0,0,0,0,0,0,0,0,0",
    "INALL": "1,1,1,1,1,1,1,0,0,0,0,0,0,0,0,0,0",
    "MIDD": "1,0,0,0,1,1,1,1,1,1,1,1,0,0,0,0,0",
    "OUTD": "1,0,0,0,0,0,0,0,1,1,1,1,0,0,0,0,0",
    "OUTS": "1,0,0,0,0,0,0,0,0,0,0,0,1,1,1,1,1",
    "OUTALL": "1,0,0,0,0,0,0,0,1,1,1,1,1,1,1,1,1",
}


@pytest.mark.parametrize("count", LISTS)
@pytest.mark.parametrize("layout", ["native", "diffusers"])
def test_numbers_of_a_list_are_those_of_webuis_blocks(layout: str, count: int) -> None:
    """Blocks that a short list does not name get 0, as webui's own conversion to 26 numbers has it."""
    model, names = LISTS[count]
    found = blocks_of(f"{layout}/{model}")
    weights = found.weights(",".join(str(n + 1) for n in range(count)), "lbw")
    assert {block: weight for block, weight in weights.items() if weight} == {n: i + 1 for i, n in enumerate(names)}
    assert {*weights} == {*found.order}


@pytest.mark.parametrize("preset", PRESETS17)
def test_preset_is_webuis_list_of_17_where_that_names_a_block(preset: str) -> None:
    found = blocks_of("native/sd15")
    by_name, by_list = found.weights(preset, "lbw"), found.weights(PRESETS17[preset], "lbw")
    assert all(by_name[block] == by_list[block] for block in LISTS[17][1])


def of_sd1(name: str) -> int:
    """Return the row of a module of diffusers in sd-scripts' table of 26; 0 for one that it does not know."""
    found = re.search(r"(up|down)_blocks\.(\d+)\.(resnets|upsamplers|downsamplers|attentions)\.(\d+)\.", name)
    if found is None:
        return 13 if name.startswith("mid_block.") else 0
    level, layer, sampler = int(found[2]), int(found[4]), found[3].endswith("samplers")
    if found[1] == "down":
        return 1 + (3 * (level + 1) if sampler else 3 * level + layer + 1)
    return 14 + 3 * level + (2 if sampler else layer)


def of_sdxl(name: str) -> int:
    """Return the same for a module in the authors' layout."""
    kind, _, rest = name.partition(".")
    start = {"input_blocks": 1, "output_blocks": 14}.get(kind)
    return 13 if kind == "middle_block" else 0 if start is None else start + int(rest.split(".")[0])


@pytest.mark.parametrize(("name", "row"), [("diffusers/sd15", of_sd1), ("diffusers/sd21", of_sd1), ("native/sdxl", of_sdxl),
                                           ("native/sd15", of_sdxl), ("native/sdxl-refiner", of_sdxl)])  # fmt: skip
def test_every_module_is_in_the_row_that_sd_scripts_gives_it(name: str, row: object) -> None:
    """But for the ends, which no list of sd-scripts has: its conv_in and out are not trained there."""
    assert callable(row)
    found, seen = blocks_of(name), set()
    for key in shapes_of(name):
        if number := row(key):
            assert found.of(key) == TABLE26[number], key
            seen.add(number)
    assert len(seen) == len(found.order) - 1 - ("diffusers" in name)  # all but BASE, and conv_in alone is IN00 there

"""The endings of keys in adapter files: key ending → slot of an algorithm. Tables; no torch.

`split` cuts a key into the path of a module and one row of `SUFFIXES`. The longest ending wins, so
`.lora_A.weight` is never taken for a module `lora_A` with a `.weight`. Spellings that also change
the module's path are first rewritten (`KEY_REWRITES`) to one that SUFFIXES knows. `models/names.py` decides
which weight of the base a path names.

Two marks in the paths that `split` returns:

* `path/2` is part 2 of the module `path`: parts 0, 1, … write consecutive row ranges, those of the layers that
  the base has fused in `path` (matching/split_layers.py). Shared rows (alpha …) of `path` hold for all of its parts.
* `.set_weight` and `.diff` may follow a parameter instead of a module
  (`….query_norm.scale.set_weight`); the path is then the name of a tensor of the base.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from types import MappingProxyType
from typing import Final, NamedTuple

from ..algorithms import ALGORITHMS
from .peft.methods import PEFT_METHODS, STACKED_ROWS

ANY_ALGORITHM: Final = ("*",)
MOST_ENDING_PARTS: Final = 3  # parts of an ending, with the name of an adapter in it
SPARSE_ROWS: Final = ("lora_sparse", "lora_sparse_tucker")
LORA_ROWS: Final = ("lora", *SPARSE_ROWS)
BARE_LORA: Final = (*LORA_ROWS, "lora_fused", *STACKED_ROWS, "bora")
PEFT_LORA: Final = (*LORA_ROWS, "lora_experts", *STACKED_ROWS, "kasa")
OFT: Final = ("diag_oft", "boft")

SHARED_SLOTS: Final = MappingProxyType(
    {
        "alpha": "a number: scale · rank for most, a norm limit for OFT; see Algorithm.scalars_from",
        "scale_override": "a number that replaces α / rank",
        "magnitude": "DoRA's magnitude; see algorithms/dora.py",
        "reshape": "integers: the shape to which the base is padded with zeros first",
    }
)
"""Slots that may accompany any algorithm and are not a field of its tensors."""

_PAIR: Final = r"\.(up|down)\.weight"

KEY_REWRITES: Final = (
    # old diffusers attached the LoRA to the attention processor, not to the layer
    (r"_lora\.", rf"(.*\.self_attn)\.to_out_lora{_PAIR}", r"\1.out_proj.lora.\2.weight"),
    (r"_lora\.", rf"(.*\.self_attn)\.to_([qkv])_lora{_PAIR}", r"\1.\2_proj.lora.\3.weight"),
    # XLabs Flux; on single blocks the LoRA covers q, k, v only: the first rows of linear1
    (r"_lora\.", rf"(.*single_blocks\.\d+)\.processor\.qkv_lora{_PAIR}", r"\1.linear1_qkv.lora.\2.weight"),
    (r"_lora\.", rf"(.*single_blocks\.\d+)\.processor\.proj_lora{_PAIR}", r"\1.linear2.lora.\2.weight"),
    (r"_lora1\.", rf"(.*double_blocks\.\d+)\.processor\.(qkv|proj)_lora1{_PAIR}", r"\1.img_attn.\2.lora.\3.weight"),
    (r"_lora2\.", rf"(.*double_blocks\.\d+)\.processor\.(qkv|proj)_lora2{_PAIR}", r"\1.txt_attn.\2.lora.\3.weight"),
    (r"_lora\.", r"(.*)\.processor\.to_out_lora\.(.*)", r"\1.to_out.0.lora.\2"),
    (r"_lora\.", r"(.*)\.processor\.(\w+)_lora\.(.*)", r"\1.\2.lora.\3"),
    (r"_lora\.", r"(.*)\.to_out_lora\.(.*)", r"\1.to_out.0.lora.\2"),
    (r"_lora\.", r"(.*)_lora\.((?:up|down)\.weight|alpha)", r"\1.lora.\2"),
    # Custom Diffusion's processors hold whole layers, which are used in place of the attention's own
    (
        "_custom_diff",
        r"(.*)\.processor\.(to_\w+)_custom_diffusion((?:\.0)?\.(?:weight|bias))",
        r"\1.\2\3.set_weight",
    ),
    # one module whose rows were trained in parts (musubi-tuner, kohya Flux split_qkv and OFT)
    (r"\.lora_(?:up|down)\.\d", r"(.*)\.lora_(up|down)\.(\d+)\.weight", r"\1/\3.lora_\2.weight"),
    (r"\.oft_blocks\.", r"(.*)\.oft_blocks\.(\d+)", r"\1/\2.oft_blocks"),
    # LongCat-Video: one `up` for each layer in a fused one, one `down` below the other
    (r"\.lora_up\.blocks\.", r"(.*)\.lora_up\.blocks\.(\d)\.weight", r"\1.lora_up_\2.weight"),
    # torch's parametrize puts what changes a weight below it (Stable Audio 3, minLoRA)
    (r"\.parametrizations\.", r"(.*)\.parametrizations\.weight\.\d+\.(.*)", r"\1.\2"),
    # LLMs-from-scratch wraps the layer and keeps it as `linear`
    (r"\.lora\.", r"(.*)\.lora\.([AB])", r"\1.linear.lora.\2"),
    # Tinker's name of the head (thinking-machines-lab/tinker-cookbook tinker_cookbook/weights/_merge_utils.py)
    ("unembed_tokens", r"(.*?)(?:(?<=model\.)model\.)?unembed_tokens\.(.*)", r"\1lm_head.\2"),
    # MiniMax-H3: the adapter's name states the order of the rows (architectures/minimax_h3.yaml)
    (r"\.default", r"(.*\bblocks\.\d+\.attn\.qkv_proj)\.(lora_\w+)\.default(.*)", r"\1.default.\2\3"),
    # Flux control LoRAs carry whole norm scales under the base's own names
    (r"_norm\.scale", r"(.*\.(?:query|key)_norm\.scale)", r"\1.set_weight"),
    ("_alpha", r"(.*)(?<!\.lora)(?<!\.road)_alpha", r"\1.alpha"),
)
"""(pattern of a text in the key, pattern of the whole key, the key in a known spelling); the first match is applied."""

_BY_SIGN: Final = {sign: [row[1:] for row in KEY_REWRITES if row[0] == sign] for sign, *_ in KEY_REWRITES}
_SIGNS: Final = re.compile("|".join(_BY_SIGN))
PART_DIGITS: Final = 4  # of the number of a part; the most parts that a trainer writes are the 4 of Flux' single blocks


class Suffix(NamedTuple):
    """One spelling of one slot."""

    ending: str
    """End of the key, from a dot on."""
    slot: str
    """Field of the algorithm's tensors, or one of SHARED_SLOTS if `algorithms` is ANY."""
    algorithms: tuple[str, ...]
    """Names in ALGORITHMS that have this slot."""
    parameter: str = "weight"
    """The parameter of the module that the tensor changes."""
    named: bool = False
    """Whether the key may contain an adapter's name: `.lora_A.default.weight`, `.ia3_l.default`."""


def _of_peft() -> Iterator[Suffix]:
    """Yield the spellings that only PEFT's methods use."""
    for method in PEFT_METHODS.values():
        for ending, meaning in method.suffixes.items():
            slot, *rows = (meaning,) if isinstance(meaning, str) else meaning
            names = tuple(rows) or method.algorithms
            named = ending.count(".") < MOST_ENDING_PARTS
            yield Suffix(ending, slot, names, ALGORITHMS[names[0]].parameter, named)


SUFFIXES: Final[tuple[Suffix, ...]] = (
    Suffix(".alpha", "alpha", ANY_ALGORITHM),
    Suffix(".lora_alpha", "alpha", ANY_ALGORITHM),  # SimpleTuner
    Suffix(".lora.alpha", "alpha", ANY_ALGORITHM),
    Suffix(".scale", "scale_override", ANY_ALGORITHM),  # webui
    Suffix(".alpha_scale", "scale_override", ANY_ALGORITHM),  # LongCat-Video, longcat_video/modules/lora_utils.py
    Suffix(".dora_scale", "magnitude", ANY_ALGORITHM),  # LyCORIS, kohya, OneTrainer; the axis is in the shape
    Suffix(".lora_magnitude_vector", "magnitude", ANY_ALGORITHM, named=True),  # PEFT; always the output axis
    Suffix(".lora_magnitude_vector.weight", "magnitude", ANY_ALGORITHM, named=True),  # diffusers
    Suffix(".magnitude", "magnitude", ANY_ALGORITHM),  # ai-toolkit, torchtune
    Suffix(".reshape_weight", "reshape", ANY_ALGORITHM),
    # LoRA, LoCon, DyLoRA
    Suffix(".lora_up.weight", "up", LORA_ROWS),
    Suffix(".lora_down.weight", "down", (*LORA_ROWS, "full_rank", "lora_blocks")),
    *(Suffix(f".lora_up_{n}.weight", f"up_{n}", ("lora_blocks",)) for n in range(4)),
    Suffix(".lora_mid.weight", "mid", ("lora", "lora_sparse_tucker")),
    Suffix(".lora_B.weight", "up", PEFT_LORA, named=True),
    Suffix(".lora_A.weight", "down", (*PEFT_LORA, "full_rank"), named=True),
    Suffix(".lora_B", "up", (*BARE_LORA, "adalora"), named=True),  # Mochi, litgpt
    Suffix(".lora_A", "down", (*BARE_LORA, "adalora"), named=True),
    Suffix(".lora_B.bias", "diff", ("lora_bias",), "bias", named=True),  # PEFT lora_bias, Flux control
    Suffix(".lora_up.bias", "diff", ("lora_bias",), "bias"),  # ai-toolkit
    Suffix(".lora.up.weight", "up", LORA_ROWS),
    Suffix(".lora.down.weight", "down", LORA_ROWS),
    Suffix(".lora_linear_layer.up.weight", "up", LORA_ROWS),
    Suffix(".lora_linear_layer.down.weight", "down", LORA_ROWS),
    Suffix(".lora_b.weight", "up", LORA_ROWS),  # torchtune
    Suffix(".lora_a.weight", "down", LORA_ROWS),
    Suffix(".lora.A.weight", "down", LORA_ROWS),  # minimind, model/model_lora.py
    Suffix(".lora.B.weight", "up", LORA_ROWS),
    # A [in, rank] and B [rank, out], in place of [rank, in] and [out, rank]
    Suffix(".A", "down", ("lora_transposed",)),  # mlx-vlm, mlx_vlm/trainer/lora.py (LoRaLayer)
    Suffix(".B", "up", ("lora_transposed",)),
    Suffix(".lora.B", "up", ("lora_transposed",)),  # LLMs-from-scratch
    Suffix(".lora.A", "down", ("lora_transposed",)),
    Suffix(".lora_b", "up", ("lora_transposed", "lora_switch")),  # mlx-lm
    Suffix(".lora_a", "down", ("lora_transposed", "lora_switch")),
    Suffix(".m", "magnitude", ANY_ALGORITHM),
    # Stable Audio 3, stable_audio_3/models/lora/model.py
    Suffix(".magnitude_r", "rows", ("bora",)),
    Suffix(".magnitude_c", "columns", ("bora",)),
    Suffix(".U", "left", ("lora_xs",)),
    Suffix(".V", "right", ("lora_xs",)),
    Suffix(".M_xs", "core", ("lora_xs",)),
    Suffix(".bias_indices", "indices", SPARSE_ROWS),  # of the weight, whatever the name says
    Suffix(".bias_values", "values", SPARSE_ROWS),
    Suffix(".bias_size", "size", SPARSE_ROWS),
    # Whole tensors
    Suffix(".diff", "diff", ("full",)),
    Suffix(".diff_b", "diff", ("full",), "bias"),
    Suffix(".diff_m", "diff", ("full",), "modulation"),  # LightX2V
    Suffix(".w_norm", "diff", ("full",)),
    Suffix(".b_norm", "diff", ("full",), "bias"),
    Suffix(".set_weight", "diff", ("set",)),
    # LyCORIS
    *(Suffix(f".hada_{slot}", slot, ("loha",)) for slot in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")),
    *(Suffix(f".lokr_{slot}", slot, ("lokr",)) for slot in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")),
    *(Suffix(f".{slot}.weight", slot, ("glora", "glora_old")) for slot in ("a1", "a2", "b1", "b2")),
    Suffix(".bm.weight", "bm", ("glora", "glora_old")),
    Suffix(".weight", "diff", ("ia3",)),  # only with on_input
    Suffix(".on_input", "on_input", ("ia3",)),
    Suffix(".oft_blocks", "blocks", OFT),  # also kohya's OFT
    Suffix(".rescale", "rescale", OFT),
    Suffix(".oft_diag", "blocks", ("oft_diag",)),
    Suffix(".q_layer.weight", "q", ("tlora",)),
    Suffix(".p_layer.weight", "p", ("tlora",)),
    Suffix(".lambda_layer", "lambdas", ("tlora",)),
    # OneTrainer
    Suffix(".oft_R.weight", "skew", ("onetrainer_oft", "onetrainer_oft_conv", "peft_oft"), named=True),
    Suffix(".oft_R.scaled_oft", "scaled", ("onetrainer_oft", "onetrainer_oft_conv")),
    *_of_peft(),
)
"""Every known spelling; no ending has two rows."""


_BY_ENDING: Final = {row.ending: row for row in SUFFIXES}
_FIRST: Final = {ending.split(".")[1] for ending in _BY_ENDING}
"""The first part of every ending."""


def split(key: str) -> tuple[str, Suffix] | None:
    """Return ("unet.q", row) for "unet.q.lora_up.weight"; None if no row fits, which matching reports."""
    if _SIGNS.search(key):
        key = _rewritten(key)
    head, *tail = key.rsplit(".", MOST_ENDING_PARTS)
    for first in range(0 if head else 1, len(tail)):
        if tail[first] in _FIRST:
            longest = _longest(tuple(tail[first:]))
            return (key[: -longest[0]], longest[1]) if longest else None
    return None


def _rewritten(key: str) -> str:
    for pattern, template in [row for sign, rows in _BY_SIGN.items() if re.search(sign, key) for row in rows]:
        if match := re.fullmatch(pattern, key, re.DOTALL):
            return match.expand(template)
    return key


def split_row_part(path: str) -> tuple[str, int | None]:
    """Return ("unet.qkv", 2) for "unet.qkv/2"; (path, None) for a whole module and for longer numbers."""
    module, mark, number = path.rpartition("/")
    return (module, int(number)) if mark and number.isdecimal() and len(number) <= PART_DIGITS else (path, None)


@lru_cache(maxsize=10_000)  # a file has thousands of keys with a few endings
def _longest(tail: tuple[str, ...]) -> tuple[int, Suffix] | None:
    """Return (length, row) of the longest known ending of a key with these last parts; None if there is none."""
    for parts in (tail[n:] for n in range(len(tail))):
        ending = "".join(f".{part}" for part in parts)
        if row := _BY_ENDING.get(ending) or _without_name(parts):
            return len(ending), row
    return None


def _without_name(parts: tuple[str, ...]) -> Suffix | None:
    """Return the row for `.lora_A.default.weight` or `.ia3_l.default`, without the adapter's name in it."""
    stem, tail = parts[0], parts[-1]
    if len(parts) == 3 and (tail in ("weight", "bias") or f".{stem}.{tail}" in _BY_ENDING):
        row = _BY_ENDING.get(f".{stem}.{tail}")
    elif len(parts) > 1 and tail not in ("weight", "bias"):
        row = _BY_ENDING.get("." + ".".join(parts[:-1]))
    else:
        return None
    return row if row and row.named else None


def split_parameter(name: str) -> tuple[str, str]:
    """Return ("unet.q", "weight") for "unet.q.weight"."""
    module, _, parameter = name.rpartition(".")
    return module, parameter

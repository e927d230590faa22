"""How adapter files spell their tensors: key ending → slot of an algorithm. Tables; no torch.

`split` cuts a key into the path of a module and one row of `SUFFIXES`. The longest ending wins, so
`.lora_A.weight` is never taken for a module `lora_A` with a `.weight`. Spellings that also change
the module's path are first rewritten (`REWRITES`) to one that SUFFIXES knows. What the *path*
means, in which base, is decided elsewhere.

Two marks in paths that come back:

* `path/2` is part 2 of the module `path`: parts 0, 1, … write consecutive row ranges, those of the layers that
  the base has fused in `path` (row_parts.py). Shared rows (alpha …) of `path` hold for all of its parts.
* `.set_weight` and `.diff` may stand behind a parameter instead of a module
  (`….query_norm.scale.set_weight`); the path then is the name of a tensor of the base.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Final

ANY: Final = ("*",)
SPARSE: Final = ("lora_sparse", "lora_sparse_tucker")
LORA: Final = ("lora", *SPARSE)
BARE_LORA: Final = (*LORA, "lora_fused")
PEFT_LORA: Final = (*LORA, "lora_experts", "kasa")
OFT: Final = ("diag_oft", "boft")
LETTER: Final = {"X": "", "zeros": "", "Xd": "_up", "Xu": "_down"}
"""How PEFT's GLoRA ends the tensors of a letter → what that adds to the letter's slot."""


@dataclass(frozen=True)
class Suffix:
    """One spelling of one slot."""

    ending: str
    """The key ends with it; starts with a dot."""
    slot: str
    """Field of the algorithm's tensors dataclass, or one of SHARED where `algorithms` is ANY."""
    algorithms: tuple[str, ...]
    """Names in ALGORITHMS that may own it."""
    parameter: str = "weight"
    """The parameter of the module that it changes."""
    named: bool = False
    """Whether an adapter's name may stand inside: `.lora_A.default.weight`, `.ia3_l.default`."""


SHARED: Final = MappingProxyType(
    {
        "alpha": "a number: scale · rank for most, a norm limit for OFT; see Algorithm.numbers",
        "scale_override": "a number that replaces α / rank",
        "magnitude": "DoRA's magnitude; see algorithms/dora.py",
        "reshape": "integers: the shape to which the base is padded with zeros first",
    }
)
"""Slots that may accompany any algorithm and are no field of its dataclass."""

PEFT: Final[tuple[tuple[tuple[str, ...], dict[str, str]], ...]] = (
    (("lora_embedding",), {".lora_embedding_A": "down", ".lora_embedding_B": "up"}),
    (("kasa",), {".lora_diag": "values"}),
    (("adalora",), {".lora_E": "values"}),
    (("peft_ia3_out", "peft_ia3_in"), {".ia3_l": "factor"}),
    (("peft_oft_embedding",), {".oft_embedding_R.weight": "skew"}),
    (("peft_oft2", "peft_oft1"), {".oft_r": "blocks"}),
    (("peft_oft2",), {".oft_s": "rows"}),
    (("peft_boft",), {".boft_R": "blocks", ".boft_s": "rows"}),
    (("vera",), {".vera_lambda_b": "out_scale", ".vera_lambda_d": "rank_scale"}),
    (("vera",), {".vera_A": "down", ".vera_B": "up"}),
    (("pvera",), {".pvera_lambda_b": "out_scale", ".pvera_lambda_d": "rank_scale"}),
    (("pvera",), {".pvera_A": "down", ".pvera_B": "up"}),
    (("randlora",), {".randlora_lambda": "rank_scale", ".randlora_gamma": "side_scale"}),
    (("randlora",), {".randlora_A": "down", ".randlora_B": "up"}),
    (("fourierft",), {".fourierft_spectrum": "spectrum"}),
    (("waveft",), {".waveft_spectrum": "spectrum"}),
    (("peanut",), {".peanut_A.weight": "down", ".peanut_B.weight": "up"}),
    (("hra",), {".hra_u": "vectors"}),
    (("miss", "miss_bat", "miss_mini"), {".miss_block": "block", ".bone_block": "block"}),
    (("shira",), {".shira_weight": "values", ".shira_indices": "places"}),
    (("c3a",), {".c3a_kernel": "kernel"}),
    (("road",), {".road_theta": "theta", ".road_alpha": "stretch"}),
    (("delora",), {".delora_A": "down", ".delora_B": "up", ".delora_lambda": "length", ".delora_w_norm": "norms"}),
    (("gralora",), {".gralora_A": "inputs", ".gralora_B": "outputs"}),
    (("gralora",), {".gralora_A_general.weight": "down", ".gralora_B_general.weight": "up"}),
    (("hira",), {".hira_A": "down", ".hira_B": "up"}),
    (("hira_embedding",), {".hira_embedding_A": "down", ".hira_embedding_B": "up"}),
    (("vblora",), {".vblora_logits_A": "down", ".vblora_logits_B": "up"}),
    (("vblora_top",), {".vblora_logits_A_topk_indices": "down_choice", ".vblora_logits_A_topk_weights": "down_weight"}),
    (("vblora_top",), {".vblora_logits_B_topk_indices": "up_choice", ".vblora_logits_B_topk_weights": "up_weight"}),
    (("vblora", "vblora_top"), {".vblora_vector_bank": "bank"}),
    (("unilora",), {".unilora_indices_A": "down_choice", ".unilora_scales_A": "down_weight"}),
    (("unilora",), {".unilora_indices_B": "up_choice", ".unilora_scales_B": "up_weight"}),
    (("unilora",), {".unilora_theta_d": "bank"}),
    (("deft",), {".deft_P": "subspace", ".deft_R": "content"}),
    (("supertuning",), {".supertuning_values": "values", ".supertuning_indices": "places"}),
    (("supertuning",), {".supertuning_lora_A.weight": "down", ".supertuning_lora_B.weight": "up"}),
    *((("peft_glora",), {f".glora_{x}.{name}": x.lower() + slot for name, slot in LETTER.items()}) for x in "AB"),
    (("psoft",), {".psoft_R.weight": "turn", ".psoft_R.vector_b": "rows", ".psoft_R.vector_a": "columns"}),
    (("adamss",), {".adamss_newB": "space"}),
    (("adamss",), {f".adamss_{x}.{i}": f"{of}_{i}" for x, of in (("A", "down"), ("B", "up")) for i in range(32)}),
    (("tinylora",), {".tinylora_A": "down", ".tinylora_B": "up", ".tinylora_P": "mixed"}),
    (("frod",), {".frod_lambda_l": "diagonal", ".frod_lambda_s_values": "values"}),
    (("osf",), {".osf_svd_params.U_low": "left", ".osf_svd_params.S_low": "values", ".osf_svd_params.V_low": "right"}),
)
"""(algorithms, {ending: slot}) of PEFT's newer methods; an adapter's name may stand in all of them."""

SUFFIXES: Final[tuple[Suffix, ...]] = (
    Suffix(".alpha", "alpha", ANY),
    Suffix(".lora_alpha", "alpha", ANY),  # SimpleTuner
    Suffix(".lora.alpha", "alpha", ANY),
    Suffix(".scale", "scale_override", ANY),  # webui
    Suffix(".dora_scale", "magnitude", ANY),  # LyCORIS, kohya, OneTrainer; the axis is in the shape
    Suffix(".lora_magnitude_vector", "magnitude", ANY, named=True),  # PEFT; always the output axis
    Suffix(".lora_magnitude_vector.weight", "magnitude", ANY, named=True),  # diffusers
    Suffix(".magnitude", "magnitude", ANY),  # ai-toolkit, torchtune
    Suffix(".reshape_weight", "reshape", ANY),
    # LoRA, LoCon, DyLoRA
    Suffix(".lora_up.weight", "up", LORA),
    Suffix(".lora_down.weight", "down", (*LORA, "full_rank")),
    Suffix(".lora_mid.weight", "mid", ("lora", "lora_sparse_tucker")),
    Suffix(".lora_B.weight", "up", PEFT_LORA, named=True),
    Suffix(".lora_A.weight", "down", (*PEFT_LORA, "full_rank"), named=True),
    Suffix(".lora_B", "up", (*BARE_LORA, "adalora"), named=True),  # Mochi, litgpt
    Suffix(".lora_A", "down", (*BARE_LORA, "adalora"), named=True),
    Suffix(".lora_B.bias", "diff", ("lora_bias",), "bias", named=True),  # PEFT lora_bias, Flux control
    Suffix(".lora_up.bias", "diff", ("lora_bias",), "bias"),  # ai-toolkit
    Suffix(".lora.up.weight", "up", LORA),
    Suffix(".lora.down.weight", "down", LORA),
    Suffix(".lora_linear_layer.up.weight", "up", LORA),
    Suffix(".lora_linear_layer.down.weight", "down", LORA),
    Suffix(".lora_b.weight", "up", LORA),  # torchtune
    Suffix(".lora_a.weight", "down", LORA),
    Suffix(".lora.B", "up", ("lora_transposed",)),  # LLMs-from-scratch
    Suffix(".lora.A", "down", ("lora_transposed",)),
    Suffix(".lora_b", "up", ("lora_transposed", "lora_switch")),  # mlx-lm
    Suffix(".lora_a", "down", ("lora_transposed", "lora_switch")),
    Suffix(".m", "magnitude", ANY),
    Suffix(".bias_indices", "indices", SPARSE),  # of the weight, whatever the name says
    Suffix(".bias_values", "values", SPARSE),
    Suffix(".bias_size", "size", SPARSE),
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
    Suffix(".weight", "diff", ("ia3",)),  # only beside on_input
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
    # PEFT
    *(Suffix(ending, slot, names, named=True) for names, endings in PEFT for ending, slot in endings.items()),
    *(Suffix(f".peanut_{s}s.{i}.weight", f"{s}_{i}", ("peanut",)) for s in ("encoder", "decoder") for i in range(4)),
    Suffix(".beft_bias", "diff", ("lora_bias",), "bias", named=True),
    *(Suffix(f".glora_C.{x}", f"c{slot}", ("peft_glora_bias",), "bias", named=True) for x, slot in LETTER.items()),
    *(
        Suffix(f".glora_{x}.{of}", x.lower(), ("peft_glora_bias",), "bias", named=True)
        for x in "DE"
        for of in ("X", "zeros")
    ),
)
"""Every known spelling; rows of one ending do not repeat."""

_PAIR: Final = r"\.(up|down)\.weight"

REWRITES: Final[tuple[tuple[str, re.Pattern[str], str], ...]] = tuple(
    (contains, re.compile(pattern, re.DOTALL), template)
    for contains, pattern, template in (
        # diffusers' attention processors: the LoRA hung on the processor, not on the layer
        ("_lora.", rf"(.*\.self_attn)\.to_out_lora{_PAIR}", r"\1.out_proj.lora.\2.weight"),
        ("_lora.", rf"(.*\.self_attn)\.to_([qkv])_lora{_PAIR}", r"\1.\2_proj.lora.\3.weight"),
        # XLabs Flux; on single blocks the LoRA covers q, k, v only: the first rows of linear1
        ("_lora.", rf"(.*single_blocks\.\d+)\.processor\.qkv_lora{_PAIR}", r"\1.linear1_qkv.lora.\2.weight"),
        ("_lora.", rf"(.*single_blocks\.\d+)\.processor\.proj_lora{_PAIR}", r"\1.linear2.lora.\2.weight"),
        ("_lora1.", rf"(.*double_blocks\.\d+)\.processor\.(qkv|proj)_lora1{_PAIR}", r"\1.img_attn.\2.lora.\3.weight"),
        ("_lora2.", rf"(.*double_blocks\.\d+)\.processor\.(qkv|proj)_lora2{_PAIR}", r"\1.txt_attn.\2.lora.\3.weight"),
        ("_lora.", r"(.*)\.processor\.to_out_lora\.(.*)", r"\1.to_out.0.lora.\2"),
        ("_lora.", r"(.*)\.processor\.(\w+)_lora\.(.*)", r"\1.\2.lora.\3"),
        ("_lora.", r"(.*)\.to_out_lora\.(.*)", r"\1.to_out.0.lora.\2"),
        ("_lora.", r"(.*)_lora\.((?:up|down)\.weight|alpha)", r"\1.lora.\2"),
        # Custom Diffusion's processors hold whole layers, which are used in place of the attention's own
        (
            "_custom_diff",
            r"(.*)\.processor\.(to_\w+)_custom_diffusion((?:\.0)?\.(?:weight|bias))",
            r"\1.\2\3.set_weight",
        ),
        # one module whose rows were trained in parts (musubi-tuner, kohya Flux split_qkv and OFT)
        (".lora_", r"(.*)\.lora_(up|down)\.(\d+)\.weight", r"\1/\3.lora_\2.weight"),
        (".oft_blocks.", r"(.*)\.oft_blocks\.(\d+)", r"\1/\2.oft_blocks"),
        # LLMs-from-scratch wraps the layer and keeps it as `linear`
        (".lora.", r"(.*)\.lora\.([AB])", r"\1.linear.lora.\2"),
        # MiniMax-H3: the adapter's name tells the order of the rows (architectures/minimax_h3.yaml)
        (".default", r"(.*\bblocks\.\d+\.attn\.qkv_proj)\.(lora_\w+)\.default(.*)", r"\1.default.\2\3"),
        # Flux control LoRAs carry whole norm scales under the base's own names
        ("_norm.scale", r"(.*\.(?:query|key)_norm\.scale)", r"\1.set_weight"),
        ("_alpha", r"(.*)(?<!\.lora)(?<!\.road)_alpha", r"\1.alpha"),
    )
)
"""(a literal that the key contains, the whole key, the key it stands for); the first that matches is applied."""

_BY_MARK: Final = {mark: [row[1:] for row in REWRITES if row[0] == mark] for mark, *_ in REWRITES}

_BY_ENDING: Final = {row.ending: row for row in SUFFIXES}
DIGITS: Final = 4  # of the number of a part; the most parts that a trainer writes are the 4 of Flux' single blocks
LONGEST: Final = 3  # parts of an ending, with the name of an adapter in it


def split(key: str) -> tuple[str, Suffix] | None:
    """("unet.q", row) for "unet.q.lora_up.weight"; None when no row fits (the plan reports it)."""
    for pattern, template in [row for mark in _BY_MARK if mark in key for row in _BY_MARK[mark]]:
        if match := pattern.fullmatch(key):
            key = match.expand(template)
            break
    dots = [len(key)]
    while len(dots) <= LONGEST and (dot := key.rfind(".", 0, dots[-1])) > 0:
        dots.append(dot)
    for dot in reversed(dots[1:]):
        if row := _row(key[dot:]):
            return key[:dot], row
    return None


def part(path: str) -> tuple[str, int | None]:
    """("unet.qkv", 2) for "unet.qkv/2"; (path, None) for a whole module, and for numbers that no part has."""
    module, mark, number = path.rpartition("/")
    return (module, int(number)) if mark and number.isdecimal() and len(number) <= DIGITS else (path, None)


@lru_cache(maxsize=10_000)
def _row(ending: str) -> Suffix | None:
    return _BY_ENDING.get(ending) or _without_name(ending[1:].split("."))


def _without_name(parts: list[str]) -> Suffix | None:
    """The row for `.lora_A.default.weight` or `.ia3_l.default`: an adapter's name taken out."""
    stem, tail = parts[0], parts[-1]
    if len(parts) == 3 and (tail in ("weight", "bias") or f".{stem}.{tail}" in _BY_ENDING):
        row = _BY_ENDING.get(f".{stem}.{tail}")
    elif len(parts) > 1 and tail not in ("weight", "bias"):
        row = _BY_ENDING.get("." + ".".join(parts[:-1]))
    else:
        return None
    return row if row and row.named else None


def apart(name: str) -> tuple[str, str]:
    """("unet.q", "weight") for "unet.q.weight"."""
    module, _, parameter = name.rpartition(".")
    return module, parameter

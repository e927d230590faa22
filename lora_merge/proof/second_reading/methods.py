"""Methods other than LoRA and LyCORIS' own, for the second reading: endings of keys, weights that fit, numbers.

One row for each, written from PEFT 0.21.2 (tuners/*/{layer,config}.py), LyCORIS 3.4 and OneTrainer 23df383, not from
the planner's tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf, prod
from types import MappingProxyType
from typing import Any, Final

from .layouts import Shape

Stored = Mapping[str, Shape]

VECTOR: Final = "tinylora_v.0"
"""TinyLoRA's values if all layers share them; of several, the model's code decides which a layer takes."""

LETTER: Final = {"X": "", "zeros": "", "Xd": "_up", "Xu": "_down"}


@dataclass(frozen=True)
class ModuleFacts:
    """The facts about one module on its weight."""

    shapes: Stored  # slot → stored shape
    shape: Shape  # of the weight
    config: Mapping[str, Any]
    alpha: float | None
    stem: str = ""  # name of the module
    of_lycoris: bool = False  # whether the header names sd-scripts or LyCORIS

    def number(self, name: str, default: float) -> float:
        """Return a number of the configuration; a whole one stays whole, as seeds may be too large for a float."""
        value = self.config.get(name)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else default

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return a switch of the configuration."""
        return bool(self.config.get(name, default))


@dataclass(frozen=True)
class MethodRow:
    """A family of modules, as a row."""

    type: str  # peft_type; "" of trainers that write no configuration
    endings: Mapping[str, str]  # how keys end → slot
    fits: Callable[[Stored, Shape], bool]  # whether these tensors have the sizes that a weight of this shape needs
    may: frozenset[str] = frozenset()  # slots that a file may lack
    kind: Callable[[Stored, Shape], str] | None = None  # row of ALGORITHMS, where the family has several
    shared: Mapping[str, str] = field(default_factory=dict)  # slot → key of a tensor for all layers, where it is there
    scale: Callable[[ModuleFacts], float] = lambda _: 1.0
    settings: Callable[[ModuleFacts], Mapping[str, Any]] = lambda _: {}  # further numbers and settings
    plain: Callable[[Stored, Shape], str] | None = None  # row of ALGORITHMS for files without a configuration
    bias: bool = False  # whether it changes the bias of its layer too
    has_scale: bool = False  # whether α is a scale
    parameter: str = "weight"

    def shared_keys(self, stem: str) -> Mapping[str, str]:
        """Return slot → key of a tensor that this module may share with other layers."""
        *above, last = stem.split(".")
        kind = last if not above or above[-1].isdigit() else f"{above[-1]}_{last}"
        kind = "attention_output" if [*above[-2:], last] == ["attention", "output", "dense"] else kind
        return {slot: f"base_model.{key.format(kind=kind)}" for slot, key in self.shared.items()}


def _any(_: Stored, shape: Shape) -> bool:
    return len(shape) == 2


def _rows(slot: str, axis: int = 0) -> Callable[[Stored, Shape], bool]:
    """Return a check: the slot has as many entries as the weight has outputs."""
    return lambda s, shape: len(shape) > 1 and s[slot][axis : axis + 1] == shape[:1]


def _pair(up: str = "up", down: str = "down") -> Callable[[Stored, Shape], bool]:
    """Return a check: the factors have the sizes of the outputs and of the inputs with their kernels."""
    return lambda s, shape: (
        len(shape) > 1 and s[up][:1] == shape[:1] and len(s[down]) > 1 and prod(s[down][1:]) == prod(shape[1:])
    )


def _bias(s: Stored, shape: Shape) -> bool:
    return len(shape) == 1 and prod(s["diff"]) == shape[0]


def table(s: Stored, shape: Shape) -> bool:
    """Return whether the factors are those of an embedding, whose product is transposed."""
    return len(shape) == 2 and shape == (*s["down"][1:], s["up"][0])


def _transposed(s: Stored, shape: Shape) -> bool:
    """Check LLMs-from-scratch: both factors are the transposes of the usual ones."""
    return len(shape) == len(s["up"]) == 2 and (s["up"][1], *s["down"][:1]) == shape and s["up"][:1] == s["down"][1:]


def _mlx(s: Stored, shape: Shape) -> bool:
    """Check mlx-lm: the same, or the usual factors of stacked experts."""
    if len(shape) == 3:
        rank = s["up"][-1]
        return s["up"] == (*shape[:2], rank) and s["down"] == (shape[0], rank, shape[2])
    return _transposed(s, shape)


def _mlx_scale(k: ModuleFacts) -> Mapping[str, Any]:
    """Return mlx-lm's scale if no alpha next to it makes it uncertain; it is not divided by the rank."""
    table = k.config.get("lora_parameters")
    if not isinstance(table, dict) or "scale" not in table or "alpha" in table:
        return {}
    return {"lora_alpha": table["scale"], "over_rank": False}


def _blocks_of_inputs(s: Stored, shape: Shape) -> bool:
    """Check PEFT's OFT: triangles of skew blocks, as many as fill the inputs, or one for all of them."""
    count, numbers = s["skew"] if len(s["skew"]) == 2 else (0, 0)
    size = next((n for n in range(2, 2 + numbers) if n * (n - 1) // 2 == numbers), 0)
    inputs = prod(shape[1:])
    return len(shape) > 1 and size > 0 and (count * size == inputs or (count == 1 and inputs % size == 0))


def _blocks_of_outputs(s: Stored, shape: Shape) -> bool:
    """Check LyCORIS' OFT and BOFT: square blocks of outputs, those of BOFT in stages."""
    return len(shape) > 1 and len(s["blocks"]) in (3, 4) and prod(s["blocks"][-3:-1]) == shape[0]


def _letters(s: Stored, shape: Shape) -> bool:
    """Check PEFT's GLoRA: A and B, each a whole matrix, two factors, one number per output or one number."""
    for letter in "ab":
        if letter in s:
            sizes = prod(s[letter])
            if sizes not in (1, shape[0], prod(shape)):
                return False
        elif s.get(f"{letter}_up", ())[:1] != shape[:1] or s.get(f"{letter}_down", ())[1:] != shape[1:]:
            return False
    return len(shape) == 2


def _bias_letters(s: Stored, shape: Shape) -> bool:
    """Check D and E of PEFT's GLoRA: a number for each output, or one for all."""
    return len(shape) == 1 and all(prod(s[letter]) in (1, shape[0]) for letter in "de")


def _shards(s: Stored, shape: Shape) -> bool:
    """Check MiSS: a block as wide as the outputs, one that is tiled over them, or one per group of them."""
    block = s["block"]
    if len(block) == 3:
        return prod(block[:2]) == shape[0] and len(shape) == 2
    return len(shape) == 2 and len(block) == 2 and block[1] > 0 and shape[0] % block[1] == 0


def _miss(s: Stored, shape: Shape) -> str:
    return "miss_bat" if len(s["block"]) == 3 else "miss" if s["block"][1] == shape[0] else "miss_mini"


def _adamss(s: Stored, shape: Shape) -> bool:
    heights = sum(size[0] for slot, size in s.items() if slot.startswith("up_"))
    return len(shape) == 2 and heights == shape[0] and s["space"][1] - shape[1] in (0, 1)


def _constraint(k: ModuleFacts) -> Mapping[str, Any]:
    """Return the limit of LyCORIS' rotations, which is α times the number of outputs, and of ComfyUI's, which is α."""
    of_comfy = (
        k.alpha == 1 and k.stem.startswith("diffusion_model.") and len(k.shapes["blocks"]) == 3 and not k.of_lycoris
    )
    return {"limit": k.alpha * (1 if of_comfy else k.shape[0]) if k.alpha and k.alpha > 0 else inf}


def _cayley(k: ModuleFacts) -> Mapping[str, Any]:
    version = [int(part) for part in str(k.config.get("peft_version", "0.17")).split(".")[:2] if part.isdecimal()]
    terms = k.number("num_cayley_neumann_terms", 5) if k.flag("use_cayley_neumann", default=True) else 0
    return {"terms": int(terms), "doubled_last": version < [0, 18], **_bounded(k)}


def _bounded(k: ModuleFacts) -> Mapping[str, Any]:
    return {"limit": k.number("eps", 6e-5) if k.flag("coft") else 0.0, "shared": k.flag("block_share")}


def _subspace(k: ModuleFacts) -> Mapping[str, Any]:
    """Return how PSOFT finds its triples, and the series for its rotation."""
    series = k.flag("use_cayley_neumann")
    return {
        "orthogonal": k.flag("psoft_orth", default=True),
        "balanced": k.config.get("ab_svd_init") == "pissa_init",
        "low_rank": k.config.get("psoft_svd") == "lowrank",
        "rounds": int(k.number("psoft_svd_lowrank_niter", 10)),
        "seed": int(k.number("random_seed", 0)),
        "terms": int(k.number("num_cayley_neumann_terms", 5)) if series else 0,
        "limit": k.number("cayley_neumann_eps", 0) if series else 0.0,
    }


def _per_rank(name: str, default: float, rank: Callable[[Stored], int]) -> Callable[[ModuleFacts], float]:
    """Return a scale: a number of the configuration divided by a rank; 1 without a rank."""

    def scale(k: ModuleFacts) -> float:
        r = rank(k.shapes)
        return k.number(name, default) / r if r else 1.0

    return scale


def _adalora_scale(k: ModuleFacts) -> float:
    start = k.number("init_r", 12)
    alpha = k.number("lora_alpha", 8)
    return (alpha if alpha > 0 else start) / (start + 1e-5)


def _deft_scale(k: ModuleFacts) -> float:
    return k.number("alpha", 1) / k.shapes["subspace"][1] if k.config.get("alpha") else 1.0


def _supra_scale(k: ModuleFacts) -> float:
    rank = k.shapes.get("down", (0,))[0]
    return k.number("lora_alpha", rank) / rank if rank else 1.0


def _seeded(name: str, default: int) -> Callable[[ModuleFacts], Mapping[str, Any]]:
    return lambda k: {"seed": int(k.number(name, default))}


METHOD_ROWS: Final[Mapping[str, MethodRow]] = MappingProxyType({
    "adalora": MethodRow("ADALORA", {"lora_A": "down", "lora_B": "up", "lora_E": "values"}, _pair(),
        scale=_adalora_scale),
    "vera": MethodRow("VERA", {"vera_lambda_b": "out_scale", "vera_lambda_d": "rank_scale"}, _rows("out_scale"),
        shared={"down": "vera_A", "up": "vera_B"}, settings=_seeded("projection_prng_key", 0)),
    "pvera": MethodRow("PVERA", {"pvera_lambda_b": "out_scale", "pvera_lambda_d": "rank_scale"}, _rows("out_scale"),
        shared={"down": "pvera_A", "up": "pvera_B"}, settings=_seeded("projection_prng_key", 0)),
    "randlora": MethodRow("RANDLORA",
        {"randlora_lambda": "rank_scale", "randlora_gamma": "side_scale", "randlora_A": "down", "randlora_B": "up"},
        lambda s, shape: len(shape) == 2 and s["side_scale"][-1] == min(shape), may=frozenset({"down", "up"}),
        shared={"down": "randlora_A", "up": "randlora_B"},
        scale=_per_rank("randlora_alpha", 640, lambda s: s["rank_scale"][0]),
        settings=_seeded("projection_prng_key", 0)),
    "fourierft": MethodRow("FOURIERFT", {"fourierft_spectrum": "spectrum"}, _any,
        scale=lambda k: k.number("scaling", 150), settings=_seeded("random_loc_seed", 777)),
    "waveft": MethodRow("WAVEFT", {"waveft_spectrum": "spectrum"}, _any, scale=lambda k: k.number("scaling", 25),
        settings=lambda k: {"seed": int(k.number("random_loc_seed", 777)),
            "family": k.config.get("wavelet_family", "db1"), "transform": k.flag("use_idwt", default=True)}),
    "hra": MethodRow("HRA", {"hra_u": "vectors"},
        lambda s, shape: len(shape) > 1 and s["vectors"][0] == prod(shape[1:]),
        settings=lambda k: {"orthogonal": k.flag("apply_GS")}),
    "miss": MethodRow("MISS", {"miss_block": "block", "bone_block": "block"}, _shards, kind=_miss),
    "shira": MethodRow("SHIRA", {"shira_weight": "values", "shira_indices": "places"}, _any),
    "c3a": MethodRow("C3A", {"c3a_kernel": "kernel"},
        lambda s, shape: shape == tuple(n * s["kernel"][2] for n in s["kernel"][:2])),
    "road": MethodRow("ROAD", {"road_theta": "theta", "road_alpha": "stretch"},
        lambda s, shape: len(shape) > 1 and 2 * prod(s["theta"]) in (shape[0], 2 * shape[0], 4 * shape[0]),
        settings=lambda k: {"group": int(k.number("group_size", 64))}, bias=True),
    "delora": MethodRow("DELORA",
        {"delora_A": "down", "delora_B": "up", "delora_lambda": "length", "delora_w_norm": "norms"}, _pair()),
    "gralora": MethodRow("GRALORA",
        {"gralora_A": "inputs", "gralora_B": "outputs", "gralora_A_general.weight": "down",
            "gralora_B_general.weight": "up"},
        lambda s, shape: shape == (s["outputs"][0] * s["outputs"][2], s["inputs"][0] * s["inputs"][1]),
        may=frozenset({"down", "up"}), scale=_per_rank("alpha", 64, lambda s: s["inputs"][2] + s.get("down", (0,))[0])),
    "hira": MethodRow("HIRA", {"hira_A": "down", "hira_B": "up"}, _pair()),
    "hira_embedding": MethodRow("HIRA", {"hira_embedding_A": "down", "hira_embedding_B": "up"}, table),
    "vblora": MethodRow("VBLORA", {"vblora_logits_A": "down", "vblora_logits_B": "up"},
        lambda s, shape: len(shape) == 2 and shape[0] * s["down"][1] == shape[1] * s["up"][0],
        shared={"bank": "vblora_vector_bank"}, settings=lambda k: {"top": int(k.number("topk", 2))}),
    "vblora_top": MethodRow("VBLORA",
        {f"vblora_logits_{x}_topk_{n}": f"{side}_{slot}" for x, side in (("A", "down"), ("B", "up"))
            for n, slot in (("indices", "choice"), ("weights", "weight"))},
        lambda s, shape: len(shape) == 2 and shape[0] * s["down_choice"][1] == shape[1] * s["up_choice"][0],
        shared={"bank": "vblora_vector_bank"}),
    "unilora": MethodRow("UNILORA",
        {f"unilora_{n}_{x}": f"{side}_{slot}" for x, side in (("A", "down"), ("B", "up"))
            for n, slot in (("indices", "choice"), ("scales", "weight"))}, _pair("up_choice", "down_choice"),
        shared={"bank": "unilora_theta_d"}),
    "deft": MethodRow("DEFT", {"deft_P": "subspace", "deft_R": "content"}, _rows("subspace"),
        may=frozenset({"content"}), scale=_deft_scale,
        settings=lambda k: {"method": k.config.get("decomposition_method", "relu")}),
    "supertuning": MethodRow("SUPERTUNING",
        {"supertuning_values": "values", "supertuning_indices": "places", "supertuning_lora_A.weight": "down",
            "supertuning_lora_B.weight": "up"}, _any, may=frozenset({"places", "down", "up"}), scale=_supra_scale,
        settings=lambda k: {"top": k.flag("select_top", default=True)}),
    "osf": MethodRow("OSF",
        {"osf_svd_params.U_low": "left", "osf_svd_params.S_low": "values", "osf_svd_params.V_low": "right"},
        _pair("left", "right")),
    "peanut": MethodRow("PEANUT",
        {"peanut_A.weight": "down", "peanut_B.weight": "up",
            **{f"peanut_{s}s.{i}.weight": f"{s}_{i}" for s in ("encoder", "decoder") for i in range(4)}}, _rows("up"),
        may=frozenset(f"{s}_{i}" for s in ("encoder", "decoder") for i in range(4)),
        scale=lambda k: k.number("scaling", 1),
        settings=lambda k: {"depth": int(k.number("depth", 0)), "activation": k.config.get("act_fn", "relu")}),
    "peft_glora": MethodRow("GLORA", {f"glora_{x.upper()}.{n}": x + part for x in "ab" for n, part in LETTER.items()},
        _letters, may=frozenset(x + slot for x in "ab" for slot in LETTER.values())),
    "peft_glora_bias": MethodRow("GLORA",
        {**{f"glora_C.{n}": f"c{part}" for n, part in LETTER.items()},
            **{f"glora_{x}.{n}": x.lower() for x in "DE" for n in ("X", "zeros")}}, _bias_letters,
        may=frozenset({"c", "c_up", "c_down"}), parameter="bias"),
    "tinylora": MethodRow("TINYLORA", {"tinylora_A": "down", "tinylora_B": "up", "tinylora_P": "mixed"}, _pair(),
        shared={"vector": VECTOR}),
    "psoft": MethodRow("PSOFT", {"psoft_R.weight": "turn", "psoft_R.vector_b": "rows", "psoft_R.vector_a": "columns"},
        _any, may=frozenset({"rows", "columns"}), settings=_subspace),
    "adamss": MethodRow("ADAMSS",
        {"adamss_newB": "space", **{f"adamss_{x}.{i}": f"{side}_{i}" for i in range(32)
            for x, side in (("A", "down"), ("B", "up"))}}, _adamss,
        may=frozenset(f"{side}_{i}" for side in ("down", "up") for i in range(1, 32)),
        settings=_seeded("random_seed", 0), bias=True),
    "peft_oft_embedding": MethodRow("OFT", {"oft_embedding_R.weight": "skew"}, _blocks_of_inputs, settings=_cayley),
    "oft_R": MethodRow("OFT", {"oft_R.weight": "skew", "oft_R.scaled_oft": "scaled"}, _blocks_of_inputs,
        settings=_cayley, may=frozenset({"scaled"}), kind=lambda s, _: "" if "scaled" in s else "peft_oft",
        plain=lambda _, shape: "onetrainer_oft" if len(shape) == 2 else "onetrainer_oft_conv"),
    "oft_r": MethodRow("OFT", {"oft_r": "blocks", "oft_s": "rows"},
        lambda s, shape: len(shape) == 2 and ("rows" not in s or prod(s["rows"]) == shape[0]) and len(s["blocks"]) == 3
            and prod(s["blocks"][:2]) >= shape[1], may=frozenset({"rows"}),
        kind=lambda s, _: "peft_oft2" if "rows" in s else "peft_oft1", settings=_bounded),
    "peft_boft": MethodRow("BOFT", {"boft_R": "blocks", "boft_s": "rows"},
        lambda s, shape: len(shape) > 1 and prod(s["rows"]) == shape[0] and prod(s["blocks"][1:3]) == prod(shape[1:])),
    "lora_bias": MethodRow("LORA", {"lora_B.bias": "diff"}, _bias, parameter="bias"),
    "beft": MethodRow("BEFT", {"beft_bias": "diff"}, _bias, kind=lambda _s, _shape: "lora_bias", parameter="bias"),
    "frod": MethodRow("FROD", {"frod_lambda_l": "diagonal", "frod_lambda_s_values": "values"},
        lambda s, shape: len(shape) == 2 and s["diagonal"] == shape[1:],
        shared={"basis": "frod_V.{kind}", "places": "frod_s_indices.{kind}"}),
    "set": MethodRow("", {"set_weight": "diff"}, lambda s, shape: s["diff"] == shape),
    "oft_blocks": MethodRow("", {"oft_blocks": "blocks", "rescale": "rescale"}, _blocks_of_outputs,
        may=frozenset({"rescale"}), settings=_constraint,
        kind=lambda s, _: "diag_oft" if len(s["blocks"]) == 3 else "boft"),
    "tlora": MethodRow("", {"q_layer.weight": "q", "p_layer.weight": "p", "lambda_layer": "lambdas"}, _pair("p", "q"),
        has_scale=True, scale=lambda k: (k.alpha or k.shapes["q"][0]) / k.shapes["q"][0]),
    "lora_xs": MethodRow("", {"U": "left", "V": "right", "M_xs": "core"},
        lambda s, shape: (*s["left"][:1], *s["right"][:1]) == (shape[0], prod(shape[1:])), has_scale=True,
        scale=lambda k: (k.alpha or k.shapes["core"][0]) / k.shapes["core"][0]),
    "book": MethodRow("", {"lora.A": "down", "lora.B": "up"}, _transposed, kind=lambda *_: "lora_transposed"),
    "mlx": MethodRow("", {"lora_a": "down", "lora_b": "up"}, _mlx, settings=_mlx_scale,
        kind=lambda s, _: "lora_transposed" if len(s["up"]) == 2 else "lora_switch"),
    "oft_diag": MethodRow("", {"oft_diag": "blocks"},
        lambda s, shape: len(shape) > 1 and len(s["blocks"]) == 3 and prod(s["blocks"][:2]) == shape[0]),
})  # fmt: skip
"""Family → its row."""

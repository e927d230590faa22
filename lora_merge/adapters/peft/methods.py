"""One row for every `peft_type` of PEFT, and one for mlx-lm. A table; no torch.

A row holds the method's names of tensors, the rows of ALGORITHMS that can use them, and how its configuration is read.
Source: PEFT 0.21.2, tuners/*/{config,layer,model}.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from ...algorithms import ALGORITHMS, SEED, lora_stacked
from ...errors import InputError
from ...models.weights import WeightView
from ...text import Note
from .config import CONVERT, NEEDS_INPUT, RESAVE, TRAIN_AGAIN, PeftConfig, refuse, refuse_lora
from .numbers import (
    Count,
    Scale,
    adalora,
    deft,
    flag,
    gralora,
    integer,
    limit,
    mlx_scale,
    number,
    other,
    ratio,
    stored_rank,
    supra,
    terms,
    text,
)  # fmt: skip
from .target_parameters import bare, experts_row, parameters

MLX: Final = "MLX"
"""Our name for the adapter_config.json of mlx-lm, which has no peft_type."""

NOT_A_WEIGHT: Final = "it adds trained inputs or layers to the model, not a change of its weights"
NOT_TRANSPOSED: Final = "its start was taken out of weights that are stored [in, out] as if they were [out, in]"

DRAWN: Final = Note("its configuration draws noise in every forward pass; the mean is merged, as PEFT does")

Choose: TypeAlias = Callable[[PeftConfig, str, Sequence[str], WeightView | None, str], str | None]
"""(configuration, module, rows that fit its tensors, its weight, model type of the base) → the row."""


def _one(_: PeftConfig, __: str, rows: Sequence[str], ___: WeightView | None, ____: str) -> str | None:
    return rows[0] if len(rows) == 1 else None


@dataclass(frozen=True)
class Method:
    """One peft_type and how it is read."""

    name: str
    algorithms: tuple[str, ...] = ()
    """Rows of ALGORITHMS that can use its tensors."""
    suffixes: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    """Ending of a key → slot in all rows, or (slot, row, …) for these rows alone. Keys may hold an adapter's name."""
    scale: Scale | None = None
    """The scale in all rows; None where the rows have no scale or compute it themselves."""
    settings: Mapping[str, Callable[[PeftConfig], object]] = field(default_factory=dict)
    """Setting → its reader; rows without the setting ignore it."""
    counts: Mapping[str, Count] = field(default_factory=dict)  # by row
    shared: Mapping[str, str] = field(default_factory=dict)
    """Slot → name, after `base_model.`, of the tensor that all modules share; `{kind}`, `{group}`: one tensor for each
    kind of layer or each group."""
    refuses: tuple[str, str] | None = None
    """Why the method cannot be merged, and what to do instead."""
    check: Callable[[PeftConfig], None] = lambda _: None
    """Raises InputError for configurations that cannot be merged."""
    choose: Choose = _one
    """Chooses the row for a module; None: the first row of ALGORITHMS that fits."""
    conv1d: bool = False
    """Whether the method accepts layers whose weights are [in, out] (conv1d.py)."""
    says_flag: bool = True
    """Whether the method writes a meaningful `fan_in_fan_out`."""
    doubts_rank: bool = False
    """Whether to report a configured rank that the tensors do not have."""
    doubts: Callable[[PeftConfig], Note | None] = lambda _: None
    """A remark on what a configuration makes of the method."""
    counted: bool = False
    """Whether the change depends on the number of the layer in the model."""


def _lora(fields: PeftConfig, module: str, rows: Sequence[str], weight: WeightView | None, model: str) -> str | None:
    if "lora" not in rows:
        return _one(fields, module, rows, weight, model)
    named = parameters(fields, module)
    if named and weight is not None and len(weight.shape) == 3:
        return experts_row(fields, weight.shape[1:], model, separate=len(weight.row_slices) > 1)
    if named and weight is None and not named[0].endswith(".weight"):
        return "lora_experts"
    start = fields.get("init_lora_weights")
    if start == "olora" and weight is not None and any(piece.transposed for piece in weight.row_slices):
        raise refuse("OLoRA", NOT_TRANSPOSED, RESAVE, f"{fields.where}: {module}")
    if isinstance(start, str) and start.lower() in STARTED:
        return start.lower()
    if fields.get("kasa_config") and "kasa" not in rows:
        raise InputError("KaSA without its lora_diag", f"{fields.where}: {module}", "save the adapter again")
    if fields.get("use_bdlora"):
        return "bdlora"
    return "lora" if named else None


def _ia3(fields: PeftConfig, module: str, _: Sequence[str], __: WeightView | None, ___: str) -> str | None:
    names, path = fields.get("feedforward_modules"), bare(module)
    if isinstance(names, str):
        inner = fields.matches(names, path, "feedforward_modules")
    else:
        inner = fields.is_end("feedforward_modules", path)
    return "peft_ia3_in" if inner else "peft_ia3_out"


def _seeded(fields: PeftConfig) -> None:
    if "random_loc_seed" in fields.values and fields.get("random_loc_seed") is None:
        why = "it was trained without a seed, so nobody knows its frequencies"
        raise refuse("FOURIERFT", why, CONVERT, fields.where)


STARTED: Final = tuple(row.name for row in ALGORITHMS.values() if row.starts_in_base)
"""Rows whose initial factors PEFT subtracts from the weight when it wraps a layer."""

STACKED: Final = tuple(row.name for row in lora_stacked.STACKED)

OTHERS: Final = frozenset({"onetrainer_oft", "onetrainer_oft_conv", "full_rank"})
"""Rows of other trainers that spell their tensors as PEFT does."""

_LETTER: Final = {"X": "", "zeros": "", "Xd": "_up", "Xu": "_down"}
"""Ending of GLoRA's tensors of a letter → suffix of the letter's slot."""

_PAIR: Final = {"A": "down", "B": "up"}
_RANDOM: Final = {"seed": integer("projection_prng_key", 0, SEED)}
_FREQUENCIES: Final = Count("spectrum", 0, "n_frequency", "n_frequency_pattern")


def _projected(name: str) -> dict[str, Any]:
    """Return the fields that VeRA and PVeRA have in common, with the method's name in them."""
    shared = {slot: f"{name}_{letter}" for letter, slot in _PAIR.items()}
    own = {f".{name}_lambda_b": "out_scale", f".{name}_lambda_d": "rank_scale"}
    suffixes = own | {f".{name}_{letter}": slot for letter, slot in _PAIR.items()}
    return {"algorithms": (name,), "suffixes": suffixes, "settings": _RANDOM, "shared": shared}


def _bone(name: str) -> Method:
    block = Count("block", 0, "r", "rank_pattern")
    return Method(
        name, ("miss", "miss_mini", "miss_bat"), {f".{name.lower()}_block": "block"},
        counts={"miss": block, "miss_mini": block},
    )  # fmt: skip


ROWS: Final = (
    Method(
        "LORA", ("lora", "lora_bias", "lora_embedding", "lora_experts", "lora_experts_transposed", *STACKED, "bdlora",
                 *STARTED, "lora_sparse"),
        {".lora_embedding_A": ("down", "lora_embedding"), ".lora_embedding_B": ("up", "lora_embedding"),
         ".lora_diag": ("values", "kasa")},
        ratio("lora_alpha", 8, stored_rank), check=refuse_lora, choose=_lora, conv1d=True,
        doubts_rank=True,
    ),
    Method("ADALORA", ("adalora",), {".lora_E": "values"}, adalora, check=refuse_lora, conv1d=True),
    Method("LOHA", ("loha",), scale=ratio("alpha", 8)),
    # PEFT uses this scale also where both factors are full; LyCORIS uses 1 there
    Method("LOKR", ("lokr",), scale=ratio("alpha", 8), settings={"right_aligned": lambda _: True}),
    Method("IA3", ("peft_ia3_out", "peft_ia3_in"), {".ia3_l": "factor"}, choose=_ia3, conv1d=True),
    Method(
        "OFT", ("peft_oft", "peft_oft_embedding", "peft_oft2", "peft_oft1"),
        {".oft_embedding_R.weight": ("skew", "peft_oft_embedding"), ".oft_r": ("blocks", "peft_oft2", "peft_oft1"),
         ".oft_s": ("rows", "peft_oft2")},
        settings={
            "terms": terms(required=True), "doubled_last": lambda fields: fields.version("0.17") < (0, 18),
            "limit": limit("eps", 6e-5, "coft"), "shared": flag("block_share"),
        },
    ),
    Method("BOFT", ("peft_boft",), {".boft_R": "blocks", ".boft_s": "rows"}),
    Method("VERA", **_projected("vera"), counts={"vera": Count("rank_scale", 0, "r")}, conv1d=True),
    Method("PVERA", **_projected("pvera"), conv1d=True,
           doubts=lambda fields: DRAWN if fields.flag("sample_at_inference", default=False) else None),
    Method(
        "RANDLORA", ("randlora",),
        {".randlora_lambda": "rank_scale", ".randlora_gamma": "side_scale", ".randlora_A": "down",
         ".randlora_B": "up"},
        ratio("randlora_alpha", 640, lambda _, shapes: shapes["rank_scale"][0]),
        {**_RANDOM, "sparse": flag("sparse"), "very_sparse": flag("very_sparse")},
        shared={"down": "randlora_A", "up": "randlora_B"}, conv1d=True,
    ),
    Method(
        "FOURIERFT", ("fourierft",), {".fourierft_spectrum": "spectrum"}, number("scaling", 150.0),
        {"seed": integer("random_loc_seed", 777, SEED)}, {"fourierft": _FREQUENCIES}, check=_seeded, conv1d=True,
    ),
    Method("LN_TUNING"),
    Method(
        "HRA", ("hra",), {".hra_u": "vectors"}, settings={"orthogonal": flag("apply_GS")},
        counts={"hra": Count("vectors", 1, "r", "rank_pattern")},
    ),
    _bone("MISS"),
    _bone("BONE"),
    Method("SHIRA", ("shira",), {".shira_weight": "values", ".shira_indices": "places"}),
    Method("C3A", ("c3a",), {".c3a_kernel": "kernel"}),
    Method(
        "ROAD", ("road",), {".road_theta": "theta", ".road_alpha": "stretch"},
        settings={"group": integer("group_size", 64)},
    ),
    Method(
        "DELORA", ("delora",),
        {".delora_A": "down", ".delora_B": "up", ".delora_lambda": "length", ".delora_w_norm": "norms"},
    ),
    Method(
        "GRALORA", ("gralora",),
        {".gralora_A": "inputs", ".gralora_B": "outputs", ".gralora_A_general.weight": "down",
         ".gralora_B_general.weight": "up"},
        gralora, conv1d=True,
    ),
    Method(
        "HIRA", ("hira", "hira_embedding"),
        {f".{name}_{letter}": (slot, name) for name in ("hira", "hira_embedding") for letter, slot in _PAIR.items()},
        conv1d=True, says_flag=False,
    ),
    Method(
        "VBLORA", ("vblora", "vblora_top"),
        {f".vblora_logits_{letter}": (slot, "vblora") for letter, slot in _PAIR.items()}
        | {f".vblora_logits_{letter}_topk_indices": (f"{slot}_choice", "vblora_top") for letter, slot in _PAIR.items()}
        | {f".vblora_logits_{letter}_topk_weights": (f"{slot}_weight", "vblora_top") for letter, slot in _PAIR.items()}
        | {".vblora_vector_bank": "bank"},
        settings={"top": integer("topk", 2)}, shared={"bank": "vblora_vector_bank"}, conv1d=True,
    ),
    Method(
        "UNILORA", ("unilora",),
        {f".unilora_indices_{letter}": f"{slot}_choice" for letter, slot in _PAIR.items()}
        | {f".unilora_scales_{letter}": f"{slot}_weight" for letter, slot in _PAIR.items()}
        | {".unilora_theta_d": "bank"},
        shared={"bank": "unilora_theta_d"}, conv1d=True,
    ),
    Method("BEFT", ("lora_bias",), {".beft_bias": "diff"}),
    Method(
        "DEFT", ("deft",), {".deft_P": "subspace", ".deft_R": "content"}, deft,
        {"method": text("decomposition_method", "relu", "relu", "qr")}, conv1d=True,
    ),
    Method(
        "SUPERTUNING", ("supertuning",),
        {".supertuning_values": "values", ".supertuning_indices": "places"}
        | {f".supertuning_lora_{letter}.weight": slot for letter, slot in _PAIR.items()},
        supra, {"top": flag("select_top", default=True)},
    ),
    Method(
        "OSF", ("osf",),
        {f".osf_svd_params.{end}_low": slot for end, slot in (("U", "left"), ("S", "values"), ("V", "right"))},
    ),
    Method(
        "WAVEFT", ("waveft",), {".waveft_spectrum": "spectrum"}, number("scaling", 25.0),
        {"seed": integer("random_loc_seed", 777, SEED), "family": text("wavelet_family", "db1"),
         "transform": flag("use_idwt", default=True)},
        {"waveft": _FREQUENCIES}, conv1d=True,
    ),
    Method(
        "PEANUT", ("peanut",),
        {f".peanut_{letter}.weight": slot for letter, slot in _PAIR.items()}
        | {f".peanut_{side}s.{i}.weight": f"{side}_{i}" for side in ("encoder", "decoder") for i in range(4)},
        number("scaling", 1.0), {"depth": integer("depth", 0), "activation": text("act_fn", "relu")},
    ),
    Method(
        "GLORA", ("peft_glora", "peft_glora_bias"),
        {f".glora_{x}.{end}": (x.lower() + slot, "peft_glora") for x in "AB" for end, slot in _LETTER.items()}
        | {f".glora_C.{end}": (f"c{slot}", "peft_glora_bias") for end, slot in _LETTER.items()}
        | {f".glora_{x}.{end}": (x.lower(), "peft_glora_bias") for x in "DE" for end in ("X", "zeros")},
    ),
    Method(
        "PSOFT", ("psoft",), {".psoft_R.weight": "turn", ".psoft_R.vector_b": "rows", ".psoft_R.vector_a": "columns"},
        settings={
            "orthogonal": flag("psoft_orth", default=True), "terms": terms(required=False),
            "limit": limit("cayley_neumann_eps", 0.0, "use_cayley_neumann"),
            "balanced": other("ab_svd_init", "psoft_init", "pissa_init"),
            "low_rank": other("psoft_svd", "full", "lowrank"),
            "rounds": integer("psoft_svd_lowrank_niter", 10), "seed": integer("random_seed", 0),
        },
    ),
    Method(
        "ADAMSS", ("adamss",),
        {".adamss_newB": "space"}
        | {f".adamss_{letter}.{i}": f"{slot}_{i}" for letter, slot in _PAIR.items() for i in range(32)},
        settings={"seed": integer("random_seed", 0)},
    ),
    Method(
        "FROD", ("frod",), {".frod_lambda_l": "diagonal", ".frod_lambda_s_values": "values"},
        shared={"basis": "frod_V.{kind}", "places": "frod_s_indices.{kind}"}, conv1d=True,
    ),
    Method(
        "TINYLORA", ("tinylora",), {".tinylora_A": "down", ".tinylora_B": "up", ".tinylora_P": "mixed"},
        counts={"tinylora": Count("vector", 0, "u")}, shared={"vector": "tinylora_v.{group}"}, conv1d=True,
        counted=True,
    ),
    Method("TRAINABLE_TOKENS"),
    Method(
        MLX, ("lora_transposed", "lora_switch"), settings={"over_rank": lambda _: False, "lora_alpha": mlx_scale},
    ),
    *(Method(name, refuses=(NOT_A_WEIGHT, TRAIN_AGAIN))
      for name in ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "ADAPTION_PROMPT", "CPT",
                   "CARTRIDGE")),
    *(Method(name, refuses=(NEEDS_INPUT, TRAIN_AGAIN)) for name in ("XLORA", "POLY", "LILY", "SHADOW")),
)  # fmt: skip

METHODS: Final[Mapping[str, Method]] = MappingProxyType({row.name: row for row in ROWS})

SHARED: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {row: method.shared for method in ROWS for row in method.algorithms if method.shared}
)
"""Row → its method's shared slots, also for a file without configuration."""

"""The methods of PEFT: a table with one row for every `peft_type`, and one for mlx-lm. No torch.

A row has the method's names of tensors, the rows of ALGORITHMS that can use them, and the readers of the numbers and
settings in its configuration. Source: PEFT 0.21.2, tuners/*/{config,layer,model}.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from ...algorithms import ALGORITHMS, COUNT, SEED, Bounds, DoesNotFit, Shapes, lora_stacked
from ...errors import InputError
from ...models.weights import WeightView
from ...text import Note
from .config import CONVERT, NEEDS_INPUT, REPEATED_INIT, RESAVE, RETAKE, TRAIN_AGAIN, PeftConfig, refuse, refuse_lora
from .target_parameters import bare, experts_row, parameters

MHA_OUTPUT: Final = ".base_layer.out_proj"
"""End of the path of MultiheadAttention's output layer, whose change PEFT adds twice (0.21.2)."""

SORTED: Final = Note(
    "several entries of alpha_pattern fit it with different values; the first is used, as PEFT loads it, but it sorts "
    "them when it saves, so it may have been trained with another"
)

Scale: TypeAlias = Callable[[PeftConfig, str, str, Shapes], float]
"""(configuration, module, row of ALGORITHMS, fitted shapes) → the scale of the change."""

MLX: Final = "MLX"
"""Our name for the adapter_config.json of mlx-lm, which has no peft_type."""

NOT_A_WEIGHT: Final = "it adds trained inputs or layers to the model, not a change of its weights"
NOT_TRANSPOSED: Final = "its start was taken out of weights that are stored [in, out] as if they were [out, in]"

NOISE_IS_DRAWN: Final = Note("its configuration draws noise in every forward pass; the mean is merged, as PEFT does")

Choose: TypeAlias = Callable[[PeftConfig, str, Sequence[str], WeightView | None, str], str | None]
"""(configuration, module, rows that fit its tensors, its weight, model type of the base) → the row."""

STACKED_ROWS: Final = tuple(row.name for row in lora_stacked.STACKED)
_LETTER: Final = {"X": "", "zeros": "", "Xd": "_up", "Xu": "_down"}
"""Ending of GLoRA's tensors of a letter → suffix of the letter's slot."""

_PAIR: Final = {"A": "down", "B": "up"}


class Count(NamedTuple):
    """A length of a tensor that only the configuration can confirm."""

    slot: str
    axis: int
    field: str  # of the configuration with the same length
    pattern: str = ""  # field with the lengths of single modules


def flag(name: str, *, default: bool = False) -> Callable[[PeftConfig], bool]:
    """Return a reader of a boolean."""
    return lambda fields: fields.flag(name, default=default)


def integer(name: str, default: int, allowed: Bounds = COUNT) -> Callable[[PeftConfig], int]:
    """Return a reader of a whole number within these bounds."""
    return lambda fields: fields.integer(name, default, allowed)


def text(name: str, default: str, *known: str) -> Callable[[PeftConfig], str]:
    """Return a reader of a string; only the `known` strings are allowed, if there are any."""

    def read(fields: PeftConfig) -> str:
        value = fields.text(name, default)
        if known and value not in known:
            raise fields.wrong_type(name, " or ".join(known))
        return value

    return read


def other(name: str, default: str, other: str) -> Callable[[PeftConfig], bool]:
    """Return a reader of a field with two known values: true if it is not the default."""
    return lambda fields: text(name, default, default, other)(fields) == other


def number(name: str, default: float) -> Scale:
    """Return a reader of a scale that is a field of the configuration."""
    return lambda fields, _module, _row, _shapes: fields.number(name, default)


def _numbers(fields: PeftConfig, name: str, module: str, default: float) -> set[float]:
    """Return the numbers that a pattern field gives to a module, or to each parameter that the module may be."""
    if not fields.get(name):
        return {default}
    return {fields.pattern(name, path, default) for path in parameters(fields, module) or (bare(module),)}


def _by_pattern(fields: PeftConfig, name: str, module: str, default: float) -> float:
    """Return the number that a pattern field gives to a module; DoesNotFit if there are several."""
    numbers = _numbers(fields, name, module, default)
    if len(numbers) > 1:
        raise DoesNotFit(f"{name} has several numbers for the parameters that this may mean")
    return numbers.pop()


def _shares(fields: PeftConfig, module: str) -> bool:
    """Return whether PEFT gives this head the factors of the embeddings; the scale then uses the head's own rank."""
    return module.endswith("lm_head") and fields.flag("ensure_weight_tying", default=False)


def no_rank(_: str, __: Shapes) -> int:
    """Return 0: the scale uses the configured rank."""
    return 0


def stored_rank(row: str, shapes: Shapes) -> int:
    """Return the rank of a row's tensors; 0 if the scale uses the configured rank.

    Factors that start in the base (PiSSA) have at most the rank of the weight, but PEFT scales them by the configured
    rank (0.21.2, `pissa_init`).
    """
    algorithm = ALGORITHMS[row]
    rank = algorithm.rank(shapes) if algorithm.rank else 0
    cut = algorithm.starts_in_base and rank >= min(shapes["up"][0], shapes["down"][1])
    return 0 if cut else rank


def ratio(alpha: str, default: float, rank: Callable[[str, Shapes], int] = no_rank) -> Scale:
    """Return a reader of α / r (α / √r for rs-LoRA); r is the rank of the tensors if `rank` finds one."""

    def scale(fields: PeftConfig, module: str, row: str, shapes: Shapes) -> float:
        a = _by_pattern(fields, "alpha_pattern", module, fields.number(alpha, default))
        stored = 0 if _shares(fields, module) else rank(row, shapes)
        r = stored or _by_pattern(fields, "rank_pattern", module, fields.number("r", 8))
        if r <= 0:
            raise fields.wrong_type("r", "a positive number")
        doubled = 2 if module.endswith(MHA_OUTPUT) else 1
        return doubled * a / (r**0.5 if fields.flag("use_rslora", default=False) else r)

    return scale


def rank_doubt(fields: PeftConfig, row: str, module: str, shapes: Shapes) -> Note | None:
    """Return the remark on tensors whose rank is not the configured one; None if the two are equal."""
    rank = stored_rank(row, shapes)
    if not rank or fields.get("r") is None or _shares(fields, module):
        return None
    configured = _numbers(fields, "rank_pattern", module, fields.number("r", 8))
    if rank in configured:
        return None
    return Note(f"the configuration says rank {min(configured):g}; the tensors have rank {rank}, which is used")


def alpha_doubt(fields: PeftConfig, module: str) -> Note | None:
    """Return the remark on a module to which entries of `alpha_pattern` give different numbers; else None."""
    if not fields.get("alpha_pattern"):
        return None
    paths = parameters(fields, module) or (bare(module),)
    return SORTED if any(fields.is_ambiguous("alpha_pattern", path) for path in paths) else None


def check_count(fields: PeftConfig, count: Count | None, module: str, shapes: Shapes) -> None:
    """Raise DoesNotFit if the configuration states another length than the tensor has."""
    if count is None or fields.get(count.field) is None or fields.get("proportional_parameters"):
        return
    stated = fields.number(count.field, 0)
    stated = fields.pattern(count.pattern, bare(module), stated) if count.pattern else stated
    if shapes[count.slot][count.axis] != stated:
        shape = list(shapes[count.slot])
        raise DoesNotFit(f"{count.slot} is {shape}, the configuration says {count.field} = {stated:g}")


def adalora(fields: PeftConfig, _: str, __: str, ___: Shapes) -> float:
    """Return α over the rank at the start of training, which cuts it."""
    start = fields.number("init_r", 12)
    alpha = fields.number("lora_alpha", 8)
    if start <= 0:
        raise fields.wrong_type("init_r", "a positive number")
    return (alpha if alpha > 0 else start) / (start + 1e-5)


def gralora(fields: PeftConfig, _: str, row: str, shapes: Shapes) -> float:
    """Return α / r; r counts the blocks and the plain pair."""
    return fields.number("alpha", 64) / stored_rank(row, shapes)


def deft(fields: PeftConfig, _: str, __: str, shapes: Shapes) -> float:
    """Return α / r, 1 without an α."""
    return 1.0 if not fields.get("alpha") else fields.number("alpha", 1) / shapes["subspace"][1]


def supra(fields: PeftConfig, _: str, row: str, shapes: Shapes) -> float:
    """Return α / r of the low-rank pair, 1 without a pair."""
    rank = stored_rank(row, shapes)
    return fields.number("lora_alpha", rank) / rank if rank else 1.0


def terms(*, required: bool) -> Callable[[PeftConfig], int]:
    """Return a reader of the number of terms of Cayley's series, 0 for the exact transform. `required`: the
    configuration must hold the switch, because its default has changed."""

    def read(fields: PeftConfig) -> int:
        if required and fields.get("use_cayley_neumann") is None:
            raise InputError("use_cayley_neumann is missing, and no tensor shows it", fields.where, RETAKE)
        if not fields.flag("use_cayley_neumann", default=False):
            return 0
        terms = fields.integer("num_cayley_neumann_terms", 5)
        if not 0 < terms <= 100:
            raise fields.wrong_type("num_cayley_neumann_terms", "between 1 and 100")
        return terms

    return read


def limit(name: str, default: float, switch: str) -> Callable[[PeftConfig], float]:
    """Return a reader of a number that is used if a switch is on; else 0."""
    return lambda fields: fields.number(name, default) if fields.flag(switch, default=False) else 0.0


def mlx_scale(fields: PeftConfig) -> float | None:
    """Return mlx-lm's `scale`; None if `alpha` differs from the rank, so that the user must state the scale. Early
    versions multiplied the scale by alpha / rank, later ones ignore alpha (mlx-lm, tuner/lora.py)."""
    table = fields.get("lora_parameters")
    if not isinstance(table, dict):
        raise fields.wrong_type("lora_parameters", "an object")
    inner = PeftConfig(table, f"{fields.where}: lora_parameters")
    known = inner.get("scale") is not None and inner.get("alpha") in (None, inner.get("rank"))
    return inner.number("scale", 0) if known else None


def _only_row(_: PeftConfig, __: str, rows: Sequence[str], ___: WeightView | None, ____: str) -> str | None:
    return rows[0] if len(rows) == 1 else None


@dataclass(frozen=True)
class PeftMethod:
    """One peft_type and how it is read."""

    name: str
    algorithms: tuple[str, ...] = ()
    """Rows of ALGORITHMS that can use its tensors."""
    suffixes: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    """Ending of a key → slot in all rows, or (slot, row, …) for these rows alone. Keys may hold an adapter's name."""
    scale: Scale | None = None
    """The scale in all rows; None if the rows have no scale or compute it themselves."""
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
    choose: Choose = _only_row
    """Chooses the row for a module; None: the first row of ALGORITHMS that fits."""
    conv1d: bool = False
    """Whether the method accepts layers whose weights are [in, out] (matching/orientation.py)."""
    says_flag: bool = True
    """Whether the method writes a meaningful `fan_in_fan_out`."""
    doubts_rank: bool = False
    """Whether to report a configured rank that the tensors do not have."""
    doubts: Callable[[PeftConfig], Note | None] = lambda _: None
    """A remark on what a configuration makes of the method."""
    switches: Mapping[str, str] = field(default_factory=dict)
    """Flag of the configuration → slot that every pair of factors then has next to them."""
    names_layers: Callable[[PeftConfig], bool] = lambda _: True
    """Whether a file with this configuration names the layers that were trained."""
    one_table: bool = False
    """Whether its models have one tensor for embeddings and a head that are tied."""
    token_field: str = "trainable_token_indices"
    """Field with the row numbers of trained tokens."""
    counted: bool = False
    """Whether the change depends on the number of the layer in the model."""


def _lora(fields: PeftConfig, module: str, rows: Sequence[str], weight: WeightView | None, model: str) -> str | None:
    if "lora" not in rows:
        return _only_row(fields, module, rows, weight, model)
    named = parameters(fields, module)
    if named and weight is not None and len(weight.shape) == 3:
        return experts_row(fields, weight.shape[1:], model, separate=len(weight.row_slices) > 1)
    if named and weight is None and not named[0].endswith(".weight"):
        return "lora_experts"
    start = fields.get("init_lora_weights")
    if start == "olora" and weight is not None and any(piece.transposed for piece in weight.row_slices):
        raise refuse("OLoRA", NOT_TRANSPOSED, RESAVE, f"{fields.where}: {module}")
    if isinstance(start, str) and start.lower() in REPEATED_INIT:
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
        why = "it was trained without a seed, so its frequencies cannot be restored"
        raise refuse("FOURIERFT", why, CONVERT, fields.where)


_RANDOM: Final = {"seed": integer("projection_prng_key", 0, SEED)}
_FREQUENCIES: Final = Count("spectrum", 0, "n_frequency", "n_frequency_pattern")


def _projected(name: str) -> dict[str, Any]:
    """Return the fields that VeRA and PVeRA have in common, with the method's name in them."""
    shared = {slot: f"{name}_{letter}" for letter, slot in _PAIR.items()}
    scales = {f".{name}_lambda_b": "out_scale", f".{name}_lambda_d": "rank_scale"}
    suffixes = scales | {f".{name}_{letter}": slot for letter, slot in _PAIR.items()}
    return {"algorithms": (name,), "suffixes": suffixes, "settings": _RANDOM, "shared": shared}


def _bone(name: str) -> PeftMethod:
    block = Count("block", 0, "r", "rank_pattern")
    return PeftMethod(
        name, ("miss", "miss_mini", "miss_bat"), {f".{name.lower()}_block": "block"},
        counts={"miss": block, "miss_mini": block},
    )  # fmt: skip


PEFT_ROWS: Final = (
    PeftMethod(
        "LORA", ("lora", "lora_bias", "lora_embedding", "lora_experts", "lora_experts_transposed", *STACKED_ROWS,
                 "bdlora", "pissa", "olora", "kasa", "lora_sparse"),
        {".lora_embedding_A": ("down", "lora_embedding"), ".lora_embedding_B": ("up", "lora_embedding"),
         ".lora_diag": ("values", "kasa")},
        ratio("lora_alpha", 8, stored_rank), check=refuse_lora, choose=_lora, conv1d=True,
        doubts_rank=True, switches={"use_dora": "magnitude", "lora_bias": "bias"},
    ),
    PeftMethod("ADALORA", ("adalora",), {".lora_E": "values"}, adalora, check=refuse_lora, conv1d=True),
    PeftMethod("LOHA", ("loha",), scale=ratio("alpha", 8)),
    # PEFT uses this scale also if both factors are full; LyCORIS uses 1 there
    PeftMethod("LOKR", ("lokr",), scale=ratio("alpha", 8), settings={"right_aligned": lambda _: True}),
    PeftMethod("IA3", ("peft_ia3_out", "peft_ia3_in"), {".ia3_l": "factor"}, choose=_ia3, conv1d=True),
    PeftMethod(
        "OFT", ("peft_oft", "peft_oft_embedding", "peft_oft2", "peft_oft1"),
        {".oft_embedding_R.weight": ("skew", "peft_oft_embedding"), ".oft_r": ("blocks", "peft_oft2", "peft_oft1"),
         ".oft_s": ("rows", "peft_oft2")},
        settings={
            "terms": terms(required=True), "doubled_last": lambda fields: fields.version("0.17") < (0, 18),
            "limit": limit("eps", 6e-5, "coft"), "shared": flag("block_share"),
        },
    ),
    PeftMethod("BOFT", ("peft_boft",), {".boft_R": "blocks", ".boft_s": "rows"}),
    PeftMethod("VERA", **_projected("vera"), counts={"vera": Count("rank_scale", 0, "r")}, conv1d=True),
    PeftMethod("PVERA", **_projected("pvera"), conv1d=True,
           doubts=lambda fields: NOISE_IS_DRAWN if fields.flag("sample_at_inference", default=False) else None),
    PeftMethod(
        "RANDLORA", ("randlora",),
        {".randlora_lambda": "rank_scale", ".randlora_gamma": "side_scale", ".randlora_A": "down",
         ".randlora_B": "up"},
        ratio("randlora_alpha", 640, lambda _, shapes: shapes["rank_scale"][0]),
        {**_RANDOM, "sparse": flag("sparse"), "very_sparse": flag("very_sparse")},
        shared={"down": "randlora_A", "up": "randlora_B"}, conv1d=True,
    ),
    PeftMethod(
        "FOURIERFT", ("fourierft",), {".fourierft_spectrum": "spectrum"}, number("scaling", 150.0),
        {"seed": integer("random_loc_seed", 777, SEED)}, {"fourierft": _FREQUENCIES}, check=_seeded, conv1d=True,
    ),
    PeftMethod("LN_TUNING"),
    PeftMethod(
        "HRA", ("hra",), {".hra_u": "vectors"}, settings={"orthogonal": flag("apply_GS")},
        counts={"hra": Count("vectors", 1, "r", "rank_pattern")},
    ),
    _bone("MISS"),
    _bone("BONE"),
    PeftMethod("SHIRA", ("shira",), {".shira_weight": "values", ".shira_indices": "places"}),
    PeftMethod("C3A", ("c3a",), {".c3a_kernel": "kernel"}),
    PeftMethod(
        "ROAD", ("road",), {".road_theta": "theta", ".road_alpha": "stretch"},
        settings={"group": integer("group_size", 64)},
    ),
    PeftMethod(
        "DELORA", ("delora",),
        {".delora_A": "down", ".delora_B": "up", ".delora_lambda": "length", ".delora_w_norm": "norms"},
    ),
    PeftMethod(
        "GRALORA", ("gralora",),
        {".gralora_A": "inputs", ".gralora_B": "outputs", ".gralora_A_general.weight": "down",
         ".gralora_B_general.weight": "up"},
        gralora, conv1d=True,
    ),
    PeftMethod(
        "HIRA", ("hira", "hira_embedding"),
        {f".{name}_{letter}": (slot, name) for name in ("hira", "hira_embedding") for letter, slot in _PAIR.items()},
        conv1d=True, says_flag=False,
    ),
    PeftMethod(
        "VBLORA", ("vblora", "vblora_top"),
        {f".vblora_logits_{letter}": (slot, "vblora") for letter, slot in _PAIR.items()}
        | {f".vblora_logits_{letter}_topk_indices": (f"{slot}_choice", "vblora_top") for letter, slot in _PAIR.items()}
        | {f".vblora_logits_{letter}_topk_weights": (f"{slot}_weight", "vblora_top") for letter, slot in _PAIR.items()}
        | {".vblora_vector_bank": "bank"},
        settings={"top": integer("topk", 2)}, shared={"bank": "vblora_vector_bank"}, conv1d=True,
    ),
    PeftMethod(
        "UNILORA", ("unilora",),
        {f".unilora_indices_{letter}": f"{slot}_choice" for letter, slot in _PAIR.items()}
        | {f".unilora_scales_{letter}": f"{slot}_weight" for letter, slot in _PAIR.items()}
        | {".unilora_theta_d": "bank"},
        shared={"bank": "unilora_theta_d"}, conv1d=True, names_layers=flag("save_indices"),
    ),
    PeftMethod("BEFT", ("lora_bias",), {".beft_bias": "diff"}),
    PeftMethod(
        "DEFT", ("deft",), {".deft_P": "subspace", ".deft_R": "content"}, deft,
        {"method": text("decomposition_method", "relu", "relu", "qr")}, conv1d=True,
    ),
    PeftMethod(
        "SUPERTUNING", ("supertuning",),
        {".supertuning_values": "values", ".supertuning_indices": "places"}
        | {f".supertuning_lora_{letter}.weight": slot for letter, slot in _PAIR.items()},
        supra, {"top": flag("select_top", default=True)},
    ),
    PeftMethod(
        "OSF", ("osf",),
        {f".osf_svd_params.{end}_low": slot for end, slot in (("U", "left"), ("S", "values"), ("V", "right"))},
    ),
    PeftMethod(
        "WAVEFT", ("waveft",), {".waveft_spectrum": "spectrum"}, number("scaling", 25.0),
        {"seed": integer("random_loc_seed", 777, SEED), "family": text("wavelet_family", "db1"),
         "transform": flag("use_idwt", default=True)},
        {"waveft": _FREQUENCIES}, conv1d=True,
    ),
    PeftMethod(
        "PEANUT", ("peanut",),
        {f".peanut_{letter}.weight": slot for letter, slot in _PAIR.items()}
        | {f".peanut_{side}s.{i}.weight": f"{side}_{i}" for side in ("encoder", "decoder") for i in range(4)},
        number("scaling", 1.0), {"depth": integer("depth", 0), "activation": text("act_fn", "relu")},
    ),
    PeftMethod(
        "GLORA", ("peft_glora", "peft_glora_bias"),
        {f".glora_{x}.{end}": (x.lower() + slot, "peft_glora") for x in "AB" for end, slot in _LETTER.items()}
        | {f".glora_C.{end}": (f"c{slot}", "peft_glora_bias") for end, slot in _LETTER.items()}
        | {f".glora_{x}.{end}": (x.lower(), "peft_glora_bias") for x in "DE" for end in ("X", "zeros")},
    ),
    PeftMethod(
        "PSOFT", ("psoft",), {".psoft_R.weight": "turn", ".psoft_R.vector_b": "rows", ".psoft_R.vector_a": "columns"},
        settings={
            "orthogonal": flag("psoft_orth", default=True), "terms": terms(required=False),
            "limit": limit("cayley_neumann_eps", 0.0, "use_cayley_neumann"),
            "balanced": other("ab_svd_init", "psoft_init", "pissa_init"),
            "low_rank": other("psoft_svd", "full", "lowrank"),
            "rounds": integer("psoft_svd_lowrank_niter", 10), "seed": integer("random_seed", 0),
        },
    ),
    PeftMethod(
        "ADAMSS", ("adamss",),
        {".adamss_newB": "space"}
        | {f".adamss_{letter}.{i}": f"{slot}_{i}" for letter, slot in _PAIR.items() for i in range(32)},
        settings={"seed": integer("random_seed", 0)},
    ),
    PeftMethod(
        "FROD", ("frod",), {".frod_lambda_l": "diagonal", ".frod_lambda_s_values": "values"},
        shared={"basis": "frod_V.{kind}", "places": "frod_s_indices.{kind}"}, conv1d=True,
    ),
    PeftMethod(
        "TINYLORA", ("tinylora",), {".tinylora_A": "down", ".tinylora_B": "up", ".tinylora_P": "mixed"},
        counts={"tinylora": Count("vector", 0, "u")}, shared={"vector": "tinylora_v.{group}"}, conv1d=True,
        counted=True,
    ),
    PeftMethod("TRAINABLE_TOKENS", token_field="token_indices"),
    PeftMethod(
        MLX, ("lora_transposed", "lora_switch"), settings={"over_rank": lambda _: False, "lora_alpha": mlx_scale},
        one_table=True,
    ),
    *(PeftMethod(name, refuses=(NOT_A_WEIGHT, TRAIN_AGAIN))
      for name in ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "ADAPTION_PROMPT", "CPT",
                   "CARTRIDGE")),
    *(PeftMethod(name, refuses=(NEEDS_INPUT, TRAIN_AGAIN)) for name in ("XLORA", "POLY", "LILY", "SHADOW")),
)  # fmt: skip

PEFT_METHODS: Final[Mapping[str, PeftMethod]] = MappingProxyType({row.name: row for row in PEFT_ROWS})

SHARED_SLOTS_OF_ROW: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {row: method.shared for method in PEFT_ROWS for row in method.algorithms if method.shared}
)
"""Row → its method's shared slots, also for a file without configuration."""

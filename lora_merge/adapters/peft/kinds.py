"""PEFT's methods: which rows of ALGORITHMS each can be, and what a file of it has once for all modules. Tables; no
torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

MLX: Final = "MLX"
"""What an adapter_config.json of mlx-lm is called here, which has no peft_type."""

KINDS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "LORA": (
            *("lora", "lora_bias", "lora_embedding", "lora_experts", "lora_experts_transposed"),
            *("bdlora", "pissa", "olora", "kasa", "lora_sparse"),
        ),
        "ADALORA": ("adalora",),
        "LOHA": ("loha",),
        "LOKR": ("lokr",),
        "IA3": ("peft_ia3_out", "peft_ia3_in"),
        "OFT": ("peft_oft", "peft_oft_embedding", "peft_oft2", "peft_oft1"),
        "BOFT": ("peft_boft",),
        "VERA": ("vera",),
        "PVERA": ("pvera",),
        "RANDLORA": ("randlora",),
        "FOURIERFT": ("fourierft",),
        "LN_TUNING": (),
        "HRA": ("hra",),
        "MISS": ("miss", "miss_mini", "miss_bat"),
        "BONE": ("miss", "miss_mini", "miss_bat"),
        "SHIRA": ("shira",),
        "C3A": ("c3a",),
        "ROAD": ("road",),
        "DELORA": ("delora",),
        "GRALORA": ("gralora",),
        "HIRA": ("hira", "hira_embedding"),
        "VBLORA": ("vblora", "vblora_top"),
        "UNILORA": ("unilora",),
        "BEFT": ("lora_bias",),
        "DEFT": ("deft",),
        "SUPERTUNING": ("supertuning",),
        "OSF": ("osf",),
        "WAVEFT": ("waveft",),
        "PEANUT": ("peanut",),
        "GLORA": ("peft_glora", "peft_glora_bias"),
        "PSOFT": ("psoft",),
        "ADAMSS": ("adamss",),
        "FROD": ("frod",),
        "TINYLORA": ("tinylora",),
        "TRAINABLE_TOKENS": (),
        MLX: ("lora_transposed", "lora_switch"),
    }
)
"""peft_type → rows of ALGORITHMS that its tensors can be."""

STARTED: Final = ("pissa", "olora", "kasa")
"""Rows whose start PEFT takes out of the weight itself when it wraps a layer."""

SHARED: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        "vera": {"down": "vera_A", "up": "vera_B"},
        "pvera": {"down": "pvera_A", "up": "pvera_B"},
        "randlora": {"down": "randlora_A", "up": "randlora_B"},
        "vblora": {"bank": "vblora_vector_bank"},
        "vblora_top": {"bank": "vblora_vector_bank"},
        "unilora": {"bank": "unilora_theta_d"},
        "tinylora": {"vector": "tinylora_v.{group}"},
        "frod": {"basis": "frod_V.{kind}", "places": "frod_s_indices.{kind}"},
    }
)

OTHERS: Final = frozenset({"onetrainer_oft", "onetrainer_oft_conv", "full_rank"})
"""Rows of other trainers that spell their tensors as PEFT does."""

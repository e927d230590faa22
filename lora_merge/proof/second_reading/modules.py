"""An adapter file, for the second reading: which tensors make up a module, and of what kind the module is.

The plan's own tables of endings are not used here. Only the spellings that trainers write today are known. A module
with any other spelling is left out, so that a rare spelling is never a false alarm.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from ...dtypes import StoredTensor
from .methods import LETTER, METHOD_ROWS

LORA_SLOTS: Final = {"up": ("lora_up", "lora_B", "lora.up", "lora_linear_layer.up"),
                     "down": ("lora_down", "lora_A", "lora.down", "lora_linear_layer.down"),
                     "mid": ("lora_mid",)}  # fmt: skip
"""Role → what kohya, PEFT and diffusers call it, before `.weight`."""

ROLE_OF_ENDING: Final = MappingProxyType({
    **{f"{name}.weight": role for role, names in LORA_SLOTS.items() for name in names},
    **{f"hada_{role}": role for role in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")},
    **{f"lokr_{role}": f"lokr/{role}" for role in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")},
    **{f"{role}.weight": role for role in ("a1", "a2", "b1", "b2", "bm")},
    "bias_indices": "indices", "bias_values": "values", "bias_size": "size",
    "diff": "diff", "w_norm": "diff", "diff_b": "bias:diff", "b_norm": "bias:diff",
    "ia3_l": "factor", "on_input": "on_input", "weight": "ia3/diff",
    "lora_embedding_A": "lora_embedding/down", "lora_embedding_B": "lora_embedding/up",
    "alpha": "alpha", "lora_alpha": "alpha", "lora.alpha": "alpha", "scale": "override",
    **{f"glora_{x}.{name}": f"bias:glora/{x}{part}" for x in "CDE" for name, part in LETTER.items()},
    **{ending: ("bias:" if m.parameter == "bias" else "") + f"{family}/{slot}"
       for family, m in METHOD_ROWS.items() for ending, slot in m.endings.items()},
    "lora_diag": "values", "magnitude_r": "bora/rows", "magnitude_c": "bora/columns", "alpha_scale": "override",
    **{f"lora_up_{n}.weight": f"lora_blocks/up_{n}" for n in range(4)},
    "dora_scale": "magnitude", "lora_magnitude_vector": "magnitude", "lora_magnitude_vector.weight": "magnitude",
})  # fmt: skip
"""The last parts of a key → the role of the tensor: `slot` or `family/slot`; `bias:` if it changes the bias."""

NAMED_PARTS: Final = ("lora_A", "lora_B", "lora_E", "lora_diag", "lora_embedding_A", "lora_embedding_B",
                      "lora_magnitude_vector", "ia3_l")  # fmt: skip
"""Parts of a key that PEFT may write the adapter's own name behind (`default` if the user chose none)."""

NUMBER_ROLES: Final = frozenset({"alpha", "override", "magnitude"})
"""Roles that a module of any kind may have."""

MODULE_KINDS: Final[tuple[tuple[str, set[str], set[str]], ...]] = (
    #  kind             roles that it has                                  and may have
    ("lora",            {"up", "down"},                                    {"mid"}),
    ("litgpt",          {"adalora/up", "adalora/down"},                    set()),
    ("lora_blocks",     {"lora_blocks/up_0", "down"},                      {f"lora_blocks/up_{n}" for n in (1, 2, 3)}),
    ("bora",            {"adalora/up", "adalora/down", "bora/rows", "bora/columns"}, set()),
    ("lora_sparse",     {"up", "down", "indices", "values", "size"},       set()),
    ("lora_sparse_tucker", {"up", "down", "mid", "indices", "values", "size"}, set()),
    ("kasa",            {"up", "down", "values"},                          set()),
    ("full_rank",       {"down"},                                          set()),
    ("lora_embedding",  {"lora_embedding/up", "lora_embedding/down"},                      set()),
    ("loha",            {"w1_a", "w1_b", "w2_a", "w2_b"},                  {"t1", "t2"}),
    ("lokr",            {"lokr/w1", "lokr/w2"},                            set()),
    ("lokr",            {"lokr/w1", "lokr/w2_a", "lokr/w2_b"},             {"lokr/t2"}),
    ("lokr",            {"lokr/w1_a", "lokr/w1_b", "lokr/w2"},             set()),
    ("lokr",            {"lokr/w1_a", "lokr/w1_b", "lokr/w2_a", "lokr/w2_b"}, {"lokr/t2"}),
    ("glora",           {"a1", "a2", "b1", "b2"},                          {"bm"}),
    ("full",            {"diff"},                                          set()),
    ("ia3",             {"ia3/diff", "on_input"},                              set()),
    ("peft_ia3",        {"factor"},                                        set()),
    *((family, {f"{family}/{slot}" for slot in {*m.endings.values()} - m.may}, {f"{family}/{slot}" for slot in m.may})
      for family, m in METHOD_ROWS.items()),
)  # fmt: skip
"""A module is of the first kind whose roles it has, without any other role."""

LONGCAT_UP: Final = ".lora_up"
"""What LongCat-Video writes before `.blocks.0.weight`, one up factor for each layer in a fused one."""

_LEVELS: Final = 3  # parts of the longest ending, with the number of a row part or the name of an adapter


@dataclass
class Group:
    """The tensors of one module; `part` if several modules write the rows of one weight in turn."""

    stem: str
    parameter: str = "weight"
    part: int | None = None
    roles: dict[str, StoredTensor] = field(default_factory=dict)
    twice: dict[str, list[StoredTensor]] = field(default_factory=dict)  # role → all tensors, where there are several
    kind: str = ""  # "" until all tensors are added, and if no kind has these roles

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Slot → stored shape."""
        return {role.rpartition("/")[2]: info.shape for role, info in self.roles.items()}

    def put(self, role: str, info: StoredTensor) -> None:
        """Add a tensor."""
        first = self.roles.setdefault(role, info)
        if first is not info:
            self.twice.setdefault(role, [first]).append(info)


def groups(tensors: Iterable[StoredTensor]) -> list[Group]:
    """Return the modules of a file, without those of unknown kinds or with a tensor of an unknown spelling."""
    by_module: dict[tuple[str, str, int | None], Group] = {}
    odd: set[str] = set()
    for info in tensors:
        split_name = ending(info.name)
        if split_name is None:
            odd.update(_above(info.name))
            continue
        stem, role, part = split_name
        parameter, _, role = role.rpartition(":")
        key = (stem, parameter or "weight", part)
        group = by_module.get(key) or by_module.setdefault(key, Group(stem, parameter or "weight", part))
        group.put(role, info)
    for (stem, parameter, part), group in by_module.items():
        if part is not None and (whole := by_module.get((stem, parameter, None))) is not None:
            for role in NUMBER_ROLES & whole.roles.keys():  # one α for all parts
                group.put(role, whole.roles[role])
    kinds = (replace(group, kind=_kind(group.roles)) for group in by_module.values() if group.stem not in odd)
    return [group for group in kinds if group.kind]


def _kind(roles: Collection[str]) -> str:
    tensors = {*roles} - NUMBER_ROLES
    return next((kind for kind, needs, may in MODULE_KINDS if tensors and needs <= tensors <= needs | may), "")


def ending(name: str) -> tuple[str, str, int | None] | None:
    """Return (stem, role, number of the row part) of a key; None for a spelling that is not known here."""
    parts = name.rsplit(".", _LEVELS)
    if len(parts) > 3 and parts[-1] == "weight" and parts[-2].isdecimal() and parts[-3] in ("lora_up", "lora_down"):
        stem = name[: -len(".".join(parts[-3:])) - 1]
        return (stem, ROLE_OF_ENDING[f"{parts[-3]}.weight"], int(parts[-2])) if len(parts[-2]) < 4 else None
    if len(parts) > 3 and parts[0].endswith(LONGCAT_UP) and (parts[1], parts[3]) == ("blocks", "weight"):
        role = ROLE_OF_ENDING.get(f"lora_up_{parts[2]}.weight")
        return (parts[0].removesuffix(LONGCAT_UP), role, None) if role else None
    if len(parts) > 2 and parts[-2] in NAMED_PARTS and parts[-1] not in ("weight", "bias"):  # `.ia3_l.default`
        return name[: -len(parts[-2]) - len(parts[-1]) - 2], ROLE_OF_ENDING.get(parts[-2], ""), None
    if len(parts) > 3 and parts[-3] in NAMED_PARTS and parts[-1] == "weight":  # `.lora_A.default.weight`
        stem = name[: -len(".".join(parts[-3:])) - 1]
        role = ROLE_OF_ENDING.get(f"{parts[-3]}.weight")
        return (stem, role, None) if role else None
    for count in (3, 2, 1):
        tail = ".".join(parts[-count:])
        if len(parts) > count and tail in ROLE_OF_ENDING:
            return name[: -len(tail) - 1], ROLE_OF_ENDING[tail], None
    return None


def _above(name: str) -> list[str]:
    """Return the modules that a key with an unknown ending may belong to."""
    parts = name.split(".")
    return [".".join(parts[:-count]) for count in range(1, _LEVELS + 1)]

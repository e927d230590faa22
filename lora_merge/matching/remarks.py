"""Remarks for the user on single modules of an adapter; none of them is an error."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from ..algorithms import ALGORITHMS, Shapes
from ..algorithms.adamss import ADAMSS
from ..algorithms.frod import FROD
from ..algorithms.psoft import PSOFT
from ..algorithms.supertuning import SUPERTUNING
from ..algorithms.unilora import UNILORA
from ..text import Note

NO_ALPHA: Final = Note(
    "no alpha is stored, so it counts as trained with scale 1 (alpha = rank); if it was another, state it with "
    "--setting lora_alpha=VALUE"
)
ZERO_ALPHA: Final = Note("the stored alpha is 0, which means alpha = rank (scale 1), as in the trainers")
BORROWED: Final = Note("its alpha is from the file's header, which calls this part of the model by another name")
OTHER_ALPHA: Final = Note(
    "its configuration gives another scale than the stored alpha; the configuration is used, as in PEFT"
)
NO_DORA: Final = Note("its configuration turns DoRA off, so its magnitude is left out, as in PEFT")
BYPASSED: Final = Note(
    "trained in bypass mode, where its magnitude has no effect, so it is left out; other programs use it"
)
LEFT_OUT: Final = Note("it does not fit the base, and is left out because its strength is 0")
EMPTY: Final = Note("it has a tensor without elements (rank 0), which changes nothing")
UNSCALED: Final = Note(
    "trained in bypass mode, where DyLoRA has no scale: its alpha is left out; other programs use it"
)
KERNEL_OFT: Final = Note("PEFT's forward pass of OFT on a kernel is not a convolution; this is what PEFT merges it to")
NORM_LIMIT: Final = Note(
    "its alpha of 1 is taken for the limit of the rotation's norm, as ComfyUI's own training node stores it; LyCORIS "
    "and sd-scripts, whose names are flat, mean alpha times the number of outputs"
)
TUNED_BIAS: Final = Note("torchtune's forward pass of DoRA scales the bias too, its merge does not; nor does this one")
TURNED_BIAS: Final = Note("trained in bypass mode, so its bias is changed with it; other programs leave the bias")
MAY_HAVE_GROUPS: Final = Note(
    "LyCORIS trains a convolution with groups in another way in bypass mode; the merge is right if that convolution "
    "has one group, which no file tells"
)
SHARED_TWICE: Final = "its {slot} is stored twice under different names, with equal values; it is used once"
DYLORA: Final = Note(
    "an up factor of its file has no axes of a kernel, as LyCORIS' DyLoRA saves it, and no metadata tells: scaled by "
    "alpha / rank, as LyCORIS loads DyLoRA; it trains its last block with alpha / number of blocks"
)

SAME_MACHINE: Final = "taken as PEFT takes them when it loads the adapter on a CPU; on other devices it may find others"

REBUILT: Final[Mapping[str, Note]] = MappingProxyType(
    {
        SUPERTUNING.name: Note(
            f"its places are not stored (save_precomputed_indices): those of the largest weights, {SAME_MACHINE}"
        ),
        PSOFT.name: Note(f"its factors are singular vectors of the base, {SAME_MACHINE}"),
        UNILORA.name: Note(
            "it is not stored (save_indices): taken for one of the layers that its configuration means, in the order "
            "of the model's own class"
        ),
        FROD.name: Note(
            f"its basis is not stored (save_projection), and made of the layers of its kind: {SAME_MACHINE}"
        ),
        ADAMSS.name: Note(f"its groups of rows are clusters in the base, {SAME_MACHINE}"),
    }
)
"""Row of ALGORITHMS that computes slots from the base (`Algorithm.rebuild`) → the remark on it."""


def rebuilt(name: str, shapes: Shapes) -> Note | None:
    """Return the remark on a module whose file lacks such slots; None where the file has them."""
    return REBUILT[name] if ALGORITHMS[name].is_rebuilt(shapes) else None

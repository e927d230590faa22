"""`merge_state_dict`: a new state dict with adapters merged in."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..boundary import public
from ..engine.torch_state import undisturbed
from ..errors import InputError
from ..progress import Progress, watched
from ..text import one_line
from ..typed_options import PythonOptions
from .merge import MemoryAdapters, prepare, warn_of
from .state_index import index_of, ties


@public
@undisturbed()
def merge_state_dict(
    state_dict: Mapping[str, Tensor],
    adapters: MemoryAdapters,
    *,
    numbers: dict[str, object] | None = None,
    progress: bool | Progress = False,
    **options: Unpack[PythonOptions],
) -> dict[str, Tensor]:
    """Return a new state dict with the adapters merged in; the input is not changed.

    Tensors may have different dtypes and be on different devices. Warns of tied entries that differ after the merge.
    The options are those of `merge`; `overwrite`, `max_memory` and `verify`, which concern files, have no effect.

    Parameters:
        state_dict: Name → tensor, as `model.state_dict()` gives it.
        adapters: As for `merge`; also state dicts of adapters, and LoadedAdapter objects.
        numbers: A table that gets what the merge did to the weights: `numbers` of a `Report`.
        progress: As for `merge`.
        device: As for `merge`. "keep": every result is made and stays on the device of its tensor.

    Returns:
        Name → tensor: detached, on the CPU (see `device`), in the dtype of the input, or in `dtype`. Untouched tensors
        that are there already share memory with the input.

    Raises:
        MergeError: As `merge`, except for errors of the output file and the disk.

    Examples:
        >>> merged = lora_merge.merge_state_dict(model.state_dict(), [("style.safetensors", 0.8)])
        >>> model.load_state_dict(merged)
        <All keys matched successfully>
    """
    index = index_of("state dict", state_dict)
    if not index.tensors:
        raise InputError("the state dict is empty", "state_dict", "give model.state_dict()")
    base = index.recognised()
    merge = prepare(base, adapters, options, state_dict, "merge_state_dict")
    merged: dict[str, Tensor] = {}
    with watched(progress) as watcher:
        facts = merge.run(lambda target, tensor: merged.__setitem__(target.in_file[0], tensor), watcher)
    warn_of(facts)
    if numbers is not None:
        numbers.update(facts.numbers)
    changed = {target.in_file[0] for target in merge.targets() if target.uses}
    parted = [
        tie for tie in ties(state_dict)
        if {*tie} != {*merge.head} and not changed.isdisjoint(tie) and merged.keys() >= {*tie}
        and not (_alike(*(state_dict[k] for k in tie)) and torch.equal(*(merged[k] for k in tie)))
    ]  # fmt: skip
    untied = bool(merge.head) and any(m.untied for m in merge.matched.adapters)
    for tie in parted + [merge.head] * untied:
        first, second = map(one_line, tie)
        warnings.warn(f"{first} and {second} were tied and now differ: load them into a model that does not tie them, "
                      "such as with tie_word_embeddings=False, or one is lost", stacklevel=4)  # fmt: skip
    return merged


def _alike(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors that share memory are the same numbers in the same order."""
    return (a.data_ptr(), a.dtype, a.shape, a.stride()) == (b.data_ptr(), b.dtype, b.shape, b.stride())

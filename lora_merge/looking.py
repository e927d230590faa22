"""The Python API that only looks: `inspect` and `compare`."""

from __future__ import annotations

from pathlib import Path

from .boundary import public
from .job import Adapter, OneAdapter, make_job
from .viewing.facts import Facts


@public
def inspect(
    path: str | Path, adapter: OneAdapter | None = None, *, weights: bool = False, hashes: bool = False
) -> Facts:
    """Tell what a file or folder is, or how an adapter fits a base.

    Parameters:
        path: A checkpoint or an adapter.
        adapter: An adapter for the base at `path`, as for `merge`.
        weights: Whether numbers are read too: for norms, stable ranks and energies of an adapter, or with a base for
            the size of the change and how much of it the base's dtype keeps.
        hashes: Whether large files are hashed too; adapters up to 256 MiB are always.

    Returns:
        A table of facts, which shows itself as the text of `lora-merge inspect`; its `to_json()` has the format that
        `lora-merge schema inspect` describes.

    Raises:
        InputError: A file is missing, damaged or of a kind that is not supported.

    Examples:
        >>> facts = lora_merge.inspect("style.safetensors")
        >>> facts["algorithms"], facts["ranks"]
        ({'lora': 264}, [32])
    """
    from .paths import input_path
    from .viewing.facts import Facts
    from .viewing.inspect import inspect as look
    from .viewing.text import rows

    ref: Adapter | None = None if adapter is None else make_job(path, [adapter], path).adapters[0]
    return Facts(look(input_path(path), ref, weights=weights, hashes=hashes), rows)


@public
def compare(a: str | Path, b: str | Path, *, base: str | Path | None = None) -> Facts:
    """Tell where two models differ and by how much, or how alike the changes of two adapters are.

    Parameters:
        a: A model or an adapter.
        b: Another one of the same kind.
        base: For two adapters that spell names in different words, or whose formulas read the weights: a base of both.

    Returns:
        A table of facts, which shows itself as text. For models: counts of equal and different tensors, ‖B−A‖ in all,
        by block and by tensor. For adapters: norms, cosine and overlap of spaces, in all, by block and by module. Its
        `to_json()` has the format that `lora-merge schema compare` describes.

    Raises:
        UsageError: One is an adapter and the other is not.
        InputError: A file is missing or damaged.

    Examples:
        >>> lora_merge.compare("base.safetensors", "merged.safetensors")["different"]
        264
    """
    from .paths import input_path
    from .viewing.compare import compare as look
    from .viewing.compare import compare_rows
    from .viewing.facts import Facts

    return Facts(look(input_path(a), input_path(b), None if base is None else input_path(base)), compare_rows)

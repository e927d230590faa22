"""An opened adapter, and ΔW of each of its modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from ..adapter_arguments import adapter_path
from ..adapters.modules import AdapterFile, Module, group
from ..adapters.network_settings import rules_of
from ..adapters.tensor_values import FileValues
from ..algorithms import ALGORITHMS, DoesNotFit
from ..boundary import public
from ..disk.reader import Reader
from ..dtypes import Shape
from ..engine.module_change import change_of_patch
from ..engine.patch_tensors import PatchTensors
from ..engine.tensor_moves import finite, host
from ..engine.tensors import TensorCache
from ..engine.torch_state import undisturbed
from ..errors import InputError, TooLarge, UsageError, misfit
from ..files.checkpoint import open_checkpoint
from ..job import SETTING
from ..matching.formula import AdapterContext, choose
from ..matching.orientation import BaseLayers, ModuleMatch
from ..models.weights import Weight, whole
from ..planning.downloads import downloaded_paths
from ..text import Shown
from .state_index import check_weight, index_of

GIVE_WEIGHT: Final = "give it: delta(name, base_weight)"


class LoadedAdapter(Shown):
    """An opened adapter file: its modules, and ΔW of each module for a given weight. Several threads may share it.

    Examples:
        >>> adapter = lora_merge.load_adapter("style.safetensors")
        >>> name = adapter.modules[0]
        >>> adapter.algorithm(name), adapter.delta(name, weight).shape == weight.shape
        ('lora', True)
    """

    @public
    def __init__(self, path: str | Path) -> None:
        path = adapter_path(path, alone=True)
        self.path = downloaded_paths([], [path])[path]
        self.file: AdapterFile = group(open_checkpoint(self.path, adapter=True))
        self._rules = rules_of(self.file)

    def _heading(self) -> str:
        return f"Adapter: {self.path.name}"

    def _facts(self) -> Iterator[tuple[str, str]]:
        """Yield (name, text) for the first lines of its text and its table."""
        kinds = Counter(next(iter(m.complete), "incomplete") for m in self.file.modules)
        yield "path", str(self.path)
        yield "modules", f"{len(self.modules)}: {', '.join(f'{name} {n}' for name, n in kinds.most_common())}"
        yield "first", next(iter(self.modules), "")

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of the modules that the adapter changes, as the file spells them."""
        names = (m.name for m in self.file.modules if not self._rules.of(m.name).is_shared(m.name))
        return tuple(dict.fromkeys(names))

    @public
    def algorithm(self, name: str) -> str:
        """Return the algorithm name of a module's tensors.

        Parameters:
            name: As `modules` has it.

        Returns:
            One of the names that `lora-merge algorithms` lists.

        Raises:
            UsageError: The adapter has no such module.
            InputError: The module lacks tensors.
        """
        module = self._module(name)
        complete = module.complete
        chosen = self._rules.of(name).algorithm(name, complete) or next(iter(complete), None)
        if chosen is None:
            raise InputError("the module is incomplete", f"{self.path}: {name}", "export the adapter again")
        return chosen

    @public
    @undisturbed()
    def delta(
        self, name: str, base_weight: Tensor | None = None, *, fan_in_fan_out: bool | None = None
    ) -> Tensor:  # fmt: skip
        """Return F(W) − W at strength 1 for one module: fp32, on the CPU, in the base weight's shape.

        Whether the weight is [out, in] or [in, out] is found from its shape and the module's name, as in a merge into a
        base with this weight alone.

        Parameters:
            name: As `modules` has it.
            base_weight: The weight that the module changes. None: as the formula does not read it (LoRA, LoHa, LoKr …).
            fan_in_fan_out: Whether the weight is [in, out], if the shape contradicts the configuration, and for a
                Conv1D with methods whose tensors fit any shape (FourierFT, WaveFT).

        Returns:
            A tensor of the base weight's shape.

        Raises:
            UsageError: The formula reads the weight, or the tensors do not show its shape, and no weight is given.
            ShapeMismatch: The tensors do not fit the weight, or contradict the configuration.
            MergeError: As for `merge`.
        """
        module, unread = self._module(name), base_weight is None
        if base_weight is None:
            base_weight = torch.zeros(self._shape(module))
        check_weight(base_weight)
        shape = tuple(base_weight.shape)
        view = whole("weight", shape)
        settings = {} if fan_in_fan_out is None else {SETTING: fan_in_fan_out}
        layers = BaseLayers((), lambda _: False, lambda: [ModuleMatch(module, view, None)])
        context = AdapterContext(0, self.file, self._rules, FileValues(), user_settings=settings, base=layers)
        patch = choose(module, view, context, {"weight": view}).patch
        if unread and (patch.reads_base or patch.base_slots or ALGORITHMS[patch.algorithm].is_rebuilt(patch.shapes)):
            kind = patch.algorithm if patch.magnitude is None else "DoRA"
            raise UsageError(f"ΔW of {kind} depends on the base's weight", f"{self.path}: {name}", GIVE_WEIGHT)
        weight = Weight(shape, index_of("weight", {"weight": base_weight}).tensors["weight"])
        with Reader([self.file.index]) as reader, torch.no_grad():
            factors = TensorCache(reader, frozenset(self.file.index.files))
            try:
                change = change_of_patch(patch, weight, PatchTensors(factors.fetch, {"weight": weight})).dense()
            except DoesNotFit as e:
                raise misfit(f"{self.path}: {name}", e) from e
            turned = patch.view.row_slices[0].transposed
            result = host((change.t() if turned else change).reshape(shape), torch.float32)
        if not finite(result).all() and finite(base_weight).all():
            raise TooLarge("ΔW is too large for fp32", f"{self.path}: {name}", "use another checkpoint of the adapter")
        return result

    def _shape(self, module: Module) -> Shape:
        """Return the shape of the weight that a module changes; UsageError if its tensors do not show it."""
        if (shape := module.parameter_shape) is None:
            raise UsageError("the module's tensors do not show the shape of the weight", f"{self.path}: {module.name}",
                             GIVE_WEIGHT)  # fmt: skip
        return shape

    def _module(self, name: str) -> Module:
        for module in self.file.modules:
            if isinstance(name, str) and module.name == name:
                return module
        raise UsageError(f"the adapter has no module {name!r}", str(self.path), "see .modules for the names")

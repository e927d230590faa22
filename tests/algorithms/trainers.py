"""Layers as trainers that are no test dependency compute them, written down anew from reading their sources.

Each class is a layer with what one trainer hangs on it: its state dict has the trainer's own names, its `forward`
takes the trainer's own steps (inputs rotated, outputs added, weights rebuilt …), which are rarely the steps of our
formulas. `SOURCES` names what was read, and at which version each class answered as the original did, to 1e-6 or
better in float32, for random non-zero weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SOURCES: Final[Mapping[str, str]] = {
    "KohyaOft": "kohya-ss/sd-scripts 48d368f, networks/oft.py: OFTModule",
    "KohyaSplitOft": "kohya-ss/sd-scripts 48d368f, networks/oft_flux.py: OFTModule",
    "KohyaDylora": "kohya-ss/sd-scripts 48d368f, networks/dylora.py: DyLoRAModule",
    "OneTrainerOft": "Nerogar/OneTrainer 23df383, modules/module/{LoRAModule,oft_utils}.py: OFTModule",
    "OneTrainerLoha": "Nerogar/OneTrainer 23df383, modules/module/LoRAModule.py: LoHaModule",
    "OneTrainerDora": "Nerogar/OneTrainer 23df383, modules/module/LoRAModule.py: DoRAModule",
    "ToolkitLora": "ostris/ai-toolkit 27a03a9, toolkit/{lora_special,network_mixins}.py: LoRAModule",
    "ToolkitFullRank": "ostris/ai-toolkit 27a03a9, the same with network type fullrank",
    "ToolkitDora": "ostris/ai-toolkit 27a03a9, toolkit/{models/DoRA,network_mixins}.py: DoRAModule",
    "ToolkitLokr": "ostris/ai-toolkit 27a03a9, toolkit/models/lokr.py: LokrModule",
    "ToolkitFull": "ostris/ai-toolkit 27a03a9, toolkit/lora_special.py: FullModule",
    "OldGlora": "lycoris-lora 1.9.0 and 2.2.0.post3, lycoris/modules/glora.py: GLoRAModule",
    "TuckerGlora": "lycoris-lora 3.0.0.post1, lycoris/modules/glora.py: GLoRAModule with use_tucker",
    "OftDiag": "lycoris-lora 2.0.2, lycoris/modules/diag_oft.py: DiagOFTModule",
    "Litgpt": "litgpt 0.5.13, litgpt/lora.py: LoRALinear",
    "LitgptFused": "litgpt 0.5.13, litgpt/lora.py: LoRAQKVLinear",
    "Torchtune": "torchtune 0.6.1, torchtune/modules/peft/lora.py: LoRALinear",
    "TorchtuneDora": "torchtune 0.6.1, torchtune/modules/peft/dora.py: DoRALinear",
    "Scratch": "llms-from-scratch 1.0.19 (α) and rasbt/LLMs-from-scratch 8f3e5b0 (α / r), appendix_e.py: LinearWithLoRA",
    "Mlx": "mlx-lm 0.32.2, mlx_lm/tuner/lora.py: LoRALinear",
    "MlxDora": "mlx-lm 0.32.2, mlx_lm/tuner/dora.py: DoRALinear",
    "StableAudioXs": "Stability-AI/stable-audio-3 058e567, stable_audio_3/models/lora/model.py, by its text alone",
    "StableAudioBora": "Stability-AI/stable-audio-3 058e567, the same with adapter type bora, by its text alone",
    "LongCatLora": "meituan-longcat/LongCat-Video, longcat_video/modules/lora_utils.py, by its text alone",
}
"""Class → what it was compared with."""


def noise(*shape: int, spread: float = 0.3) -> nn.Parameter:
    """Trained numbers."""
    return nn.Parameter(torch.randn(*shape) * spread)


class Trained(nn.Module):
    """A layer, which is no part of the state dict, and what a trainer adds to it."""

    layer: nn.Linear | nn.Conv2d

    def __init__(self, layer: nn.Linear | nn.Conv2d) -> None:
        super().__init__()
        object.__setattr__(self, "layer", layer)

    def base(self, x: Tensor) -> Tensor:
        """What the layer answered before training."""
        return self.layer(x)

    def rebuilt(self, x: Tensor, weight: Tensor) -> Tensor:
        """What the layer answers with another weight."""
        weight = weight.reshape(self.layer.weight.shape)
        if isinstance(self.layer, nn.Linear):
            return F.linear(x, weight, self.layer.bias)
        return F.conv2d(x, weight, self.layer.bias, self.layer.stride, self.layer.padding)

    def adds(self, x: Tensor, change: Tensor) -> Tensor:
        """The layer's answer with another weight and no bias, to be added."""
        change = change.reshape(self.layer.weight.shape)
        if isinstance(self.layer, nn.Linear):
            return F.linear(x, change)
        return F.conv2d(x, change, None, self.layer.stride, self.layer.padding)

    @property
    def sides(self) -> tuple[int, int]:
        """(outputs, inputs of the flattened weight)."""
        return self.layer.weight.shape[0], self.layer.weight[0].numel()


def cayley(blocks: Tensor, limit: float) -> list[Tensor]:
    """kohya's rotation of each block; the norm of all blocks together is limited."""
    skew = blocks - blocks.mT
    norm = skew.norm()
    skew = skew * (norm.clamp(max=limit) + 1e-8) / (norm + 1e-8)
    eye = torch.eye(blocks.shape[-1], dtype=blocks.dtype)
    return [(eye + q) @ torch.linalg.inv(eye - q) for q in skew]


class KohyaOft(Trained):
    """Every block of outputs is turned by R, from the right of its index."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, count: int = 4, alpha: float = 1e-3) -> None:
        super().__init__(layer)
        size = self.sides[0] // count
        self.oft_blocks = noise(count, size, size)
        self.register_buffer("alpha", torch.tensor(alpha))

    def forward(self, x: Tensor) -> Tensor:
        """The weight is rebuilt."""
        turned = torch.block_diag(*cayley(self.oft_blocks, float(self.alpha) * self.sides[0]))
        return self.rebuilt(x, turned.T @ self.layer.weight.flatten(1))


class KohyaSplitOft(Trained):
    """The fused projections of Flux: every part has blocks and a limit of its own."""

    def __init__(self, layer: nn.Linear, parts: tuple[int, ...], count: int = 4, alpha: float = 1e-3) -> None:
        super().__init__(layer)
        self.parts = parts
        self.oft_blocks = nn.ParameterList(noise(count, p // count, p // count) for p in parts)
        self.register_buffer("alpha", torch.tensor(alpha))

    def forward(self, x: Tensor) -> Tensor:
        """The parts answer apart."""
        assert self.layer.bias is not None
        answers = []
        rows = zip(self.parts, self.layer.weight.split(self.parts), self.layer.bias.split(self.parts), strict=True)
        for blocks, (height, weight, bias) in zip(self.oft_blocks, rows, strict=True):
            turned = torch.block_diag(*cayley(blocks, float(self.alpha) * height))
            answers.append(F.linear(x, turned.T @ weight, bias))
        return torch.cat(answers, dim=-1)


class KohyaDylora(Trained):
    """DyLoRA with all of its ranks, when the factor for lower ranks is one."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, rank: int = 3, alpha: float = 2.0) -> None:
        super().__init__(layer)
        self.lora_down, self.lora_up = nn.Module(), nn.Module()
        self.lora_down.weight = noise(rank, *layer.weight.shape[1:])
        self.lora_up.weight = noise(self.sides[0], rank, *[1] * (layer.weight.dim() - 2))
        self.register_buffer("alpha", torch.tensor(alpha))

    def forward(self, x: Tensor) -> Tensor:
        """Both factors one after the other, beside the layer."""
        scale = float(self.alpha) / len(self.lora_down.weight)
        if isinstance(self.layer, nn.Linear):
            return self.base(x) + F.linear(F.linear(x, self.lora_down.weight), self.lora_up.weight) * scale
        inner = F.conv2d(x, self.lora_down.weight, None, self.layer.stride, self.layer.padding)
        return self.base(x) + F.conv2d(inner, self.lora_up.weight) * scale


class OneTrainerOft(Trained):
    """Inputs of linear layers are turned; of convolutions the weight, and the other way round."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, size: int = 6, *, share: bool = False, scaled: bool = False):
        super().__init__(layer)
        self.size, self.count = size, self.sides[1] // size
        self.oft_R = nn.Module()
        self.oft_R.weight = noise(1 if share else self.count, size * (size - 1) // 2)
        if scaled:
            self.oft_R.register_buffer("scaled_oft", torch.ones((), dtype=torch.bool))

    def rotations(self) -> Tensor:
        """[count, size, size], the Cayley transform's series cut after five terms."""
        angles = self.oft_R.weight
        if "scaled_oft" in dict(self.oft_R.named_buffers()):
            angles = angles / (2 * math.sqrt(self.size - 1))
        turns = []
        for row in angles:
            s = torch.zeros(self.size, self.size, dtype=row.dtype)
            s[tuple(torch.triu_indices(self.size, self.size, 1))] = row
            s = s - s.T
            power = torch.linalg.matrix_power
            turns.append(power(s, 0) + 2 * s + 2 * power(s, 2) + 2 * power(s, 3) + power(s, 4))
        return torch.stack(turns).expand(self.count, -1, -1)

    def forward(self, x: Tensor) -> Tensor:
        """Groups of inputs, row vectors, times R."""
        turns = self.rotations()
        if isinstance(self.layer, nn.Linear):
            groups = [g @ r for g, r in zip(x.split(self.size, -1), turns, strict=True)]
            return self.base(torch.cat(groups, -1))
        groups = [g @ r for g, r in zip(self.layer.weight.flatten(1).split(self.size, 1), turns, strict=True)]
        return self.rebuilt(x, torch.cat(groups, 1))


class OneTrainerLoha(Trained):
    """LoHa whose factors have the shapes of convolutions."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, rank: int = 3, alpha: float = 2.0) -> None:
        super().__init__(layer)
        ones = [1] * (layer.weight.dim() - 2)
        for i in (1, 2):
            setattr(self, f"hada_w{i}_a", noise(self.sides[0], rank, *ones))
            setattr(self, f"hada_w{i}_b", noise(rank, *layer.weight.shape[1:]))
        self.register_buffer("alpha", torch.tensor(alpha))

    def forward(self, x: Tensor) -> Tensor:
        """The product's answer is added."""
        first = self.hada_w1_a.flatten(1) @ self.hada_w1_b.flatten(1)
        second = self.hada_w2_a.flatten(1) @ self.hada_w2_b.flatten(1)
        return self.base(x) + self.adds(x, first * second * (self.alpha / len(self.hada_w1_b)))


class OneTrainerDora(Trained):
    """DoRA on either axis; by default on the inputs."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, *, outputs: bool, rank: int = 3, alpha: float = 2.0) -> None:
        super().__init__(layer)
        weight, ones = layer.weight, [1] * (layer.weight.dim() - 2)
        self.lora_down, self.lora_up = nn.Module(), nn.Module()
        self.lora_down.weight = noise(rank, *weight.shape[1:])
        self.lora_up.weight = noise(weight.shape[0], rank, *ones)
        self.dora_scale = noise(*((weight.shape[0], 1) if outputs else (1, weight.shape[1])), *ones)
        self.register_buffer("alpha", torch.tensor(alpha))

    def forward(self, x: Tensor) -> Tensor:
        """The weight is rebuilt."""
        change = (self.lora_up.weight.flatten(1) @ self.lora_down.weight.flatten(1)).reshape(self.layer.weight.shape)
        v = self.layer.weight + change * (self.alpha / len(self.lora_down.weight))
        along = [d for d in range(v.dim()) if self.dora_scale.shape[d] == 1]
        return self.rebuilt(x, self.dora_scale * v / torch.linalg.vector_norm(v, dim=along, keepdim=True))


class ToolkitLora(Trained):
    """Saved in PEFT's names without an α: training makes it equal to the rank. The up layer may have a bias."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, rank: int = 3, *, bias: bool = False) -> None:
        super().__init__(layer)
        if isinstance(layer, nn.Linear):
            self.lora_A: nn.Module = nn.Linear(self.sides[1], rank, bias=False)
            self.lora_B: nn.Module = nn.Linear(rank, self.sides[0], bias=bias)
        else:
            kernel, stride = layer.kernel_size, layer.stride
            self.lora_A = nn.Conv2d(layer.in_channels, rank, kernel, stride, layer.padding, bias=False)
            self.lora_B = nn.Conv2d(rank, self.sides[0], 1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Both layers one after the other, beside the old one."""
        return self.base(x) + self.lora_B(self.lora_A(x))


class ToolkitFullRank(Trained):
    """The first of the two layers does it all."""

    def __init__(self, layer: nn.Linear | nn.Conv2d) -> None:
        super().__init__(layer)
        self.lora_A = nn.Module()
        self.lora_A.weight = noise(*layer.weight.shape)

    def forward(self, x: Tensor) -> Tensor:
        """Beside the old one."""
        return self.base(x) + self.adds(x, self.lora_A.weight)


class ToolkitDora(Trained):
    """The weight's norm is corrected by a third term."""

    def __init__(self, layer: nn.Linear, rank: int = 3) -> None:
        super().__init__(layer)
        self.lora_A = nn.Linear(self.sides[1], rank, bias=False)
        self.lora_B = nn.Linear(rank, self.sides[0], bias=False)
        self.magnitude = noise(self.sides[0])

    def forward(self, x: Tensor) -> Tensor:
        """Base, LoRA, and what the magnitude changes of the two without the bias."""
        turned = self.layer.weight + self.lora_B.weight @ self.lora_A.weight
        factor = self.magnitude / turned.norm(dim=1) - 1
        return self.base(x) + self.lora_B(self.lora_A(x)) + factor * F.linear(x, turned)


class ToolkitLokr(Trained):
    """LoKr; where both factors are whole the saved α is the huge configured rank."""

    def __init__(
        self, layer: nn.Linear | nn.Conv2d, rank: int = 0, alpha: float = 2.0, first: tuple[int, int] = (2, 3)
    ) -> None:
        super().__init__(layer)
        out, width, *kernel = layer.weight.shape
        rows, columns = out // first[0], width // first[1]
        self.rank = rank
        self.lokr_w1 = noise(*first)
        if rank:
            self.lokr_w2_a = noise(rows, rank)
            self.lokr_w2_b = noise(rank, math.prod(kernel) * columns)
        else:
            self.lokr_w2 = noise(rows, columns, *kernel)
        self.register_buffer("alpha", torch.tensor(alpha if rank else 9999999999.0))

    def forward(self, x: Tensor) -> Tensor:
        """Every block of the change is one number of the first factor times the second."""
        second = (self.lokr_w2_a @ self.lokr_w2_b) if self.rank else self.lokr_w2.flatten(1)
        rows = [torch.cat([number * second for number in row], 1) for row in self.lokr_w1]
        scale = float(self.alpha) / self.rank if self.rank else 1.0
        return self.base(x) + self.adds(x, torch.cat(rows)) * scale


class ToolkitFull(Trained):
    """Differences of the weight and the bias."""

    def __init__(self, layer: nn.Linear | nn.Conv2d) -> None:
        super().__init__(layer)
        self.diff, self.diff_b = noise(*layer.weight.shape), noise(self.sides[0])

    def forward(self, x: Tensor) -> Tensor:
        """The old answer and that of the differences."""
        ones = [1] * (x.dim() - 2 if isinstance(self.layer, nn.Conv2d) else 0)
        return self.base(x) + self.adds(x, self.diff) + self.diff_b.reshape(-1, *ones)


class OldGlora(Trained):
    """GLoRA before LyCORIS 3: inputs go through a pair before the layer, and through another beside it.

    Both pairs are scaled by α / r at their middle and again at their end.
    """

    def __init__(self, layer: nn.Linear | nn.Conv2d, rank: int = 3, alpha: float = 2.0) -> None:
        super().__init__(layer)
        out, width = layer.weight.shape[:2]
        ones = [1] * (layer.weight.dim() - 2)
        for name, shape in (("a1", (rank, width)), ("a2", (width, rank)), ("b1", (rank, width)), ("b2", (out, rank))):
            setattr(self, name, nn.Module())
            getattr(self, name).weight = noise(*shape, *ones)
        self.register_buffer("alpha", torch.tensor(alpha))

    def forward(self, x: Tensor) -> Tensor:
        """The layer is asked about changed inputs."""
        scale = float(self.alpha) / len(self.a1.weight)

        def through(x: Tensor, first: Tensor, second: Tensor, stride: int) -> Tensor:
            if first.dim() == 2:
                return F.linear(F.linear(x, first) * scale, second) * scale
            return F.conv2d(F.conv2d(x, first, stride=stride) * scale, second) * scale

        stride = self.layer.stride[0] if isinstance(self.layer, nn.Conv2d) else 1
        beside = through(x, self.b1.weight, self.b2.weight, stride)
        return self.base(x + through(x, self.a1.weight, self.a2.weight, 1)) + beside


class TuckerGlora(Trained):
    """GLoRA of LyCORIS 3.0 on a convolution: the pair beside the layer has a core."""

    def __init__(self, layer: nn.Conv2d, rank: int = 3, alpha: float = 2.0) -> None:
        super().__init__(layer)
        out, width = layer.weight.shape[:2]
        shapes = {"a1": (width, rank, 1, 1), "a2": (rank, width, 1, 1), "b1": (out, rank, 1, 1),
                  "b2": (rank, width, 1, 1), "bm": (rank, rank, *layer.kernel_size)}  # fmt: skip
        for name, shape in shapes.items():
            setattr(self, name, nn.Module())
            getattr(self, name).weight = noise(*shape)
        self.register_buffer("alpha", torch.tensor(alpha))

    def forward(self, x: Tensor) -> Tensor:
        """Inputs through a1 after a2 before the old kernel; through b2, core and b1 beside it."""
        layer, scale = self.layer, float(self.alpha) / len(self.a2.weight)
        assert isinstance(layer, nn.Conv2d)
        before = F.conv2d(F.conv2d(x, self.a2.weight), self.a1.weight)
        before = F.conv2d(before, layer.weight, None, layer.stride, layer.padding)
        beside = F.conv2d(F.conv2d(x, self.b2.weight), self.bm.weight, None, layer.stride, layer.padding)
        return self.base(x) + scale * (before + F.conv2d(beside, self.b1.weight))


class OftDiag(Trained):
    """LyCORIS 2.0 stores the finished rotations, rescaled where asked to."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, count: int = 4) -> None:
        super().__init__(layer)
        size = self.sides[0] // count
        turned = torch.stack(cayley(torch.randn(count, size, size) * 0.3, math.inf))
        self.oft_diag = nn.Parameter(turned * (1 + 0.1 * torch.randn(count, size, 1)))

    def forward(self, x: Tensor) -> Tensor:
        """The weight is rebuilt."""
        return self.rebuilt(x, torch.block_diag(*self.oft_diag).T @ self.layer.weight.flatten(1))


class Litgpt(Trained):
    """Bare factors; α is in the run's arguments only."""

    def __init__(self, layer: nn.Linear, rank: int = 3, alpha: float = 6.0) -> None:
        super().__init__(layer)
        self.lora_A, self.lora_B = noise(rank, self.sides[1]), noise(self.sides[0], rank)
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        """Beside the layer."""
        return self.base(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scale


class Parametrized(Trained):
    """Stable Audio 3: what torch's parametrize makes of a weight, whose tensors are named below the weight."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, scale: float, **tensors: Tensor) -> None:
        super().__init__(layer)
        inside = nn.ParameterDict({name: nn.Parameter(tensor) for name, tensor in tensors.items()})
        self.parametrizations = nn.ModuleDict({"weight": nn.ModuleList([inside])})
        self.scale = scale

    def tensor(self, name: str) -> Tensor:
        """A stored tensor."""
        found: Tensor = self.parametrizations["weight"][0][name]
        return found

    @property
    def flat(self) -> Tensor:
        """The weight as a matrix."""
        return self.layer.weight.reshape(self.sides)


class StableAudioXs(Parametrized):
    """A trained core between the first singular vectors."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, rank: int = 3, alpha: float = 6.0) -> None:
        out, width = layer.weight.shape[0], layer.weight[0].numel()
        tensors = {"U": noise(out, rank), "V": noise(width, rank), "M_xs": noise(rank, rank)}
        super().__init__(layer, alpha / rank, **tensors)

    def forward(self, x: Tensor) -> Tensor:
        """With a rebuilt weight."""
        change = self.tensor("U") @ self.tensor("M_xs") @ self.tensor("V").T
        return self.rebuilt(x, self.flat + self.scale * change)


class StableAudioBora(Parametrized):
    """The lengths of all rows are set, then those of all columns."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, rank: int = 3, alpha: float = 6.0) -> None:
        out, width = layer.weight.shape[0], layer.weight[0].numel()
        tensors = {"lora_A": noise(rank, width), "lora_B": noise(out, rank)}
        tensors |= {"magnitude_r": noise(out), "magnitude_c": noise(width)}
        super().__init__(layer, alpha / rank, **tensors)

    def forward(self, x: Tensor) -> Tensor:
        """With a rebuilt weight."""
        turned = self.flat + self.scale * (self.tensor("lora_B") @ self.tensor("lora_A"))
        turned = turned / turned.norm(dim=1, keepdim=True) * self.tensor("magnitude_r").unsqueeze(1)
        turned = turned / turned.norm(dim=0, keepdim=True) * self.tensor("magnitude_c").unsqueeze(0)
        return self.rebuilt(x, turned)


class StableAudioColumns(Parametrized):
    """The length of each column is set."""

    def __init__(self, layer: nn.Linear, rank: int = 3, alpha: float = 6.0) -> None:
        out, width = layer.weight.shape
        tensors = {"lora_A": noise(rank, width), "lora_B": noise(out, rank), "magnitude": noise(width)}
        super().__init__(layer, alpha / rank, **tensors)

    def forward(self, x: Tensor) -> Tensor:
        """With a rebuilt weight."""
        turned = self.flat + self.scale * (self.tensor("lora_B") @ self.tensor("lora_A"))
        return self.rebuilt(x, turned / turned.norm(dim=0, keepdim=True) * self.tensor("magnitude").unsqueeze(0))


class LongCatLora(Trained):
    """One `down` that gives several times the rank, and an `up` for the part of each layer in a fused one."""

    def __init__(self, layer: nn.Linear, parts: tuple[int, ...], rank: int = 2, scale: float = 0.5) -> None:
        super().__init__(layer)
        self.lora_down = nn.Linear(self.sides[1], rank * len(parts), bias=False)
        self.lora_up = nn.Module()
        self.lora_up.blocks = nn.ModuleList([nn.Linear(rank, rows, bias=False) for rows in parts])
        self.register_buffer("alpha_scale", torch.tensor(scale))

    def forward(self, x: Tensor) -> Tensor:
        """Beside the layer."""
        inner = self.lora_down(x).chunk(len(self.lora_up.blocks), dim=-1)
        outer = torch.cat([up(part) for up, part in zip(self.lora_up.blocks, inner, strict=True)], dim=-1)
        return self.base(x) + self.alpha_scale * outer


class StackedExperts(nn.Module):
    """Tinker, SkyRL, SGLang: factors of three axes, of which one may be for all experts.

    thinking-machines-lab/tinker-cookbook 78b0202, tinker_cookbook/weights/_merge.py.
    """

    def __init__(self, weights: Tensor, up: int, down: int, rank: int = 2, alpha: float = 4.0) -> None:
        super().__init__()
        _, out, width = weights.shape
        self.lora_A, self.lora_B = noise(down, rank, width), noise(up, out, rank)
        self.base, self.scale = weights, alpha / rank

    def forward(self, x: Tensor, expert: int) -> Tensor:
        """What one expert answers."""
        a, b = self.lora_A[expert % len(self.lora_A)], self.lora_B[expert % len(self.lora_B)]
        return x @ self.base[expert].T + self.scale * (x @ a.T @ b.T)


class LitgptFused(Trained):
    """One LoRA per trained part of a fused query-key-value weight."""

    def __init__(self, layer: nn.Linear, parts: tuple[tuple[int, int], ...], rank: int = 2, alpha: float = 6.0) -> None:
        super().__init__(layer)
        self.parts, self.scale = parts, alpha / rank
        self.lora_A = noise(rank * len(parts), self.sides[1])
        self.lora_B = noise(sum(end - first for first, end in parts), rank)

    def forward(self, x: Tensor) -> Tensor:
        """Each part is added to its own outputs."""
        answer = self.base(x).clone()
        heights = [end - first for first, end in self.parts]
        pairs = zip(self.lora_A.chunk(len(self.parts)), self.lora_B.split(heights), strict=True)
        for (first, end), (down, up) in zip(self.parts, pairs, strict=True):
            answer[..., first:end] += (x @ down.T @ up.T) * self.scale
        return answer


class Torchtune(Trained):
    """Two layers; α is in the recipe only."""

    def __init__(self, layer: nn.Linear, rank: int = 3, alpha: float = 6.0) -> None:
        super().__init__(layer)
        self.lora_a = nn.Linear(self.sides[1], rank, bias=False)
        self.lora_b = nn.Linear(rank, self.sides[0], bias=False)
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        """Beside the layer."""
        return self.base(x) + self.scale * self.lora_b(self.lora_a(x))


class TorchtuneDora(Torchtune):
    """DoRA of a layer without a bias, which is what torchtune's models have it on."""

    def __init__(self, layer: nn.Linear, rank: int = 3, alpha: float = 6.0) -> None:
        super().__init__(layer, rank, alpha)
        self.magnitude = noise(self.sides[0])

    def forward(self, x: Tensor) -> Tensor:
        """Every output is stretched by its magnitude over its weight's norm."""
        turned = self.layer.weight + self.scale * self.lora_b.weight @ self.lora_a.weight
        return super().forward(x) * (self.magnitude / turned.norm(dim=1))


class Scratch(Trained):
    """LLMs-from-scratch, appendix E: factors the other way round, and the layer itself is saved with them."""

    def __init__(self, layer: nn.Linear, rank: int = 3, alpha: float = 6.0, *, over_rank: bool) -> None:
        super().__init__(layer)
        self.linear = layer
        self.lora = nn.Module()
        self.lora.A, self.lora.B = noise(self.sides[1], rank), noise(rank, self.sides[0])
        self.scale = alpha / rank if over_rank else alpha

    def forward(self, x: Tensor) -> Tensor:
        """Beside the layer."""
        return self.base(x) + self.scale * (x @ self.lora.A @ self.lora.B)


class Mlx(Trained):
    """mlx-lm: factors the other way round, of the layer's own names."""

    def __init__(self, layer: nn.Linear, rank: int = 3, scale: float = 2.0) -> None:
        super().__init__(layer)
        self.lora_a, self.lora_b = noise(self.sides[1], rank), noise(rank, self.sides[0])
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """Beside the layer."""
        return self.base(x) + self.scale * (x @ self.lora_a @ self.lora_b)


class MlxSwitch(nn.Module):
    """mlx-lm: a layer of experts, of which every token is given to one."""

    def __init__(self, weight: Tensor, rank: int = 3, scale: float = 2.0) -> None:
        super().__init__()
        experts, out, width = weight.shape
        self.lora_a, self.lora_b = noise(experts, rank, width), noise(experts, out, rank)
        self.base, self.scale = weight, scale

    def forward(self, x: Tensor, indices: Tensor) -> Tensor:
        """Beside the layer: x [tokens, in], indices [tokens]."""
        low = torch.einsum("ti,tri->tr", x, self.lora_a[indices])
        whole = torch.einsum("ti,toi->to", x, self.base[indices])
        return whole + self.scale * torch.einsum("tr,tor->to", low, self.lora_b[indices])


class MlxDora(Mlx):
    """Every output but its bias is stretched by its magnitude over its weight's norm."""

    def __init__(self, layer: nn.Linear, rank: int = 3, scale: float = 2.0) -> None:
        super().__init__(layer, rank, scale)
        self.m = noise(self.sides[0])

    def forward(self, x: Tensor) -> Tensor:
        """As it trains."""
        turned = self.layer.weight + self.scale * (self.lora_a @ self.lora_b).T
        answer = x @ self.layer.weight.T + self.scale * (x @ self.lora_a @ self.lora_b)
        answer = answer * (self.m / turned.norm(dim=1))
        return answer if self.layer.bias is None else answer + self.layer.bias

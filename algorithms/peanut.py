"""PEANuT, ΔW = c · (f(…f(Wᵀ Aᵀ)…) Bᵀ)ᵀ: a small network that reads the weight. Zhong et al. 2024, arXiv:2410.01870.

Between A and B lie as many encoders as decoders, r × r with f after each; the input of encoder i is added to the output
of the decoder that mirrors it. PEFT tuners/peanut/layer.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .base import Algorithm, AlphaOverRank, Checks, Shape, Shapes, expect, expect_shapes

if TYPE_CHECKING:
    from torch import Tensor

    from .base import Scalar

MOST_ENCODERS: Final = 4  # the most encoders that a file can have

ACTIVATION_FUNCTIONS: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = MappingProxyType(
    {
        **{name: (name, {}) for name in ("relu", "gelu", "silu", "mish", "relu6", "sigmoid", "tanh", "leaky_relu")},
        "swish": ("silu", {}),
        "gelu_pytorch_tanh": ("gelu", {"approximate": "tanh"}),
    }
)
"""Name in transformers → name in torch.nn.functional, and its arguments."""


class PeanutTensors(NamedTuple):
    """The adapter tensors of n layers of equal shape, stacked."""

    down: Tensor  # A, [n, r, out]
    up: Tensor  # B, [n, out, r]
    scale: Scalar  # `scaling`
    depth: int = 0  # number of encoders, and of decoders
    activation: str = "relu"  # `act_fn`
    encoder_0: Tensor | None = None  # [n, r, r], like all encoders and decoders
    encoder_1: Tensor | None = None
    encoder_2: Tensor | None = None
    encoder_3: Tensor | None = None
    decoder_0: Tensor | None = None
    decoder_1: Tensor | None = None
    decoder_2: Tensor | None = None
    decoder_3: Tensor | None = None


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the stored shapes."""
    rank = shapes["down"][0] if shapes["down"] else 0
    expect(holds=len(target) == 2 and rank > 0, otherwise=f"A is {list(shapes['down'])}, the weight {list(target)}")
    want = {**{slot: (rank, rank) for slot in shapes}, "down": (rank, target[0]), "up": (target[0], rank)}
    return expect_shapes(shapes, want)


def check_settings(settings: Mapping[str, Any], shapes: Shapes, _: Shape) -> None:
    """Raise DoesNotFit if a layer of the network is missing, or f is unknown."""
    depth, name = settings.get("depth", 0), settings.get("activation", "relu")
    stored = shapes.keys() - {"down", "up"}
    inner = {f"{side}_{i}" for side in ("encoder", "decoder") for i in range(min(depth, MOST_ENCODERS))}
    expect(
        holds=depth <= MOST_ENCODERS and inner == stored,
        otherwise=f"the network is {depth} deep, the file has {sorted(stored)}",
    )
    expect(
        holds=name in ACTIVATION_FUNCTIONS,
        otherwise=f"f is {str(name)[:20]!r}, known are {', '.join(ACTIVATION_FUNCTIONS)}",
    )


def delta(base: Tensor, t: PeanutTensors) -> Tensor:
    """Return ΔW [n, out, cols] from the untouched `base`."""
    import torch

    name, arguments = ACTIVATION_FUNCTIONS[t.activation]
    activation = getattr(torch.nn.functional, name)

    def f(x: Tensor) -> Tensor:
        done: Tensor = activation(x, **arguments)
        return done

    hidden, layers = f(base.mT @ t.down.mT), []
    for i in range(t.depth):
        layers.append(hidden)
        hidden = f(hidden @ getattr(t, f"encoder_{i}").mT)
    for i in range(t.depth):
        hidden = f(hidden @ getattr(t, f"decoder_{i}").mT) + layers.pop()
    return (t.up * t.scale) @ hidden.mT


PEANUT = Algorithm(
    "peanut", PeanutTensors, fitted_shapes, delta, "arXiv:2410.01870", scalars_from=AlphaOverRank(), reads_base=True,
    checks=Checks(settings=check_settings), scale_from_config=True,
)  # fmt: skip

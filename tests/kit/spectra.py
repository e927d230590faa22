"""Matrices with known singular values."""

from __future__ import annotations

import torch

SPECTRA = {
    "flat": torch.ones(96),
    "slow": torch.arange(1, 97).float().pow(-0.7),
    "steep": torch.arange(1, 97).float().pow(-2),
    "signal above noise": torch.cat((torch.full((3,), 100.0), torch.linspace(1, 0.2, 93))),
    "equal signals": torch.cat((torch.full((6,), 3.0), torch.linspace(1, 0.2, 90))),
    "signals far above noise": torch.cat((torch.linspace(2000, 1000, 7), torch.linspace(1, 0.2, 89))),
    "nothing but signals": torch.cat((torch.linspace(3, 1, 5), torch.zeros(91))),
}
"""Singular values of an example, by what is hard about it."""


def example(spectrum: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    u = torch.linalg.qr(torch.randn(120, 96, generator=generator, dtype=torch.float64)).Q
    v = torch.linalg.qr(torch.randn(130, 96, generator=generator, dtype=torch.float64)).Q
    return (u * SPECTRA[spectrum]) @ v.mT

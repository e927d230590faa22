"""Heads that share the weight of a base's input embeddings (tied heads). No torch.

A head is separable if transformers 5 loads it from its own tensors with `tie_word_embeddings: false`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final

from ..dtypes import StoredTensor
from .names import Names

DECODER_CLASSES: Final = ("ForCausalLM", "LMHeadModel")

HEADED: Final = (
    *DECODER_CLASSES,
    "ForMaskedLM",
    "ForPreTraining",
    "ForConditionalGeneration",
    "ForBlockDiffusion",
    "MTModel",
)
"""Endings of the names of transformers' classes with a head."""

LM_HEAD: Final = "lm_head"

SEPARABLE: Final = ("model.embed_tokens", "transformer.wte", "transformer.word_embeddings", "backbone.embeddings")

WHISPER: Final = "whisper"

SEPARABLE_IN: Final = ("opt", "model.decoder.embed_tokens")  # the heads of TrOCR and Whisper have other names
"""Input embeddings of decoders whose separable head is `lm_head.weight`: in all models, and in one model type."""

VISION_EMBEDDINGS: Final = {
    "model.language_model.embed_tokens": LM_HEAD,
    "language_model.model.embed_tokens": f"language_model.{LM_HEAD}",
    "model.text_model.embed_tokens": LM_HEAD,
    "model.embed_tokens": LM_HEAD,
}
"""Input embeddings of vision-language models → the head, in the layouts of transformers 5 and 4."""

VISION_TYPES: Final = frozenset(
    (
        *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3", "llava", "llava_next", "llava_onevision"),
        *("mistral3", "internvl", "paligemma", "aya_vision", "idefics3", "smolvlm"),
    )
)
"""Types of vision-language models with a separable head; each was tried."""

SHARED_LAYERS: Final = {"diffusion_gemma": re.compile(r"(?:.*\.)?(?:encoder\.language_model|decoder)\.layers\..*")}
"""Type of model → layers that two parts of the model share; PEFT makes separate factors for each part."""

ENCODER_DECODER: Final = "EncoderDecoderModel"

DECODER_EMBEDDINGS: Final = re.compile(r"decoder\.(?:.*\.)?(?:wte|embed_tokens|word_embeddings)\.weight")

DECODER_HEADS: Final = ("lm_head", "output_projection", "cls.predictions.decoder", "lm_head.decoder")
"""The decoder's embeddings, and the names of its head, in a model of an encoder and a decoder (TrOCR, Donut). The
decoder's own configuration ties them, whatever the whole model's configuration states; they are not separable."""

_WORDS: Final = re.compile(r"\w+\.embeddings\.word_embeddings\.weight")

ENCODERS: Final = (
    # tensor with the head      embeddings                                          head                       shares it
    ("cls.predictions.bias",   _WORDS,                                             "cls.predictions.decoder", True),
    ("lm_head.bias",           re.compile(r"esm\.embeddings\.word_embeddings\.weight"),   "lm_head.decoder", False),
    ("lm_head.bias",           _WORDS,                                             "lm_head.decoder",         True),
    ("lm_head.decoder.bias",   _WORDS,                                             "lm_head.decoder",         False),
    ("predictions.bias",       _WORDS,                                             "predictions.decoder",     True),
    ("vocab_projector.bias",   _WORDS,                                             "vocab_projector",         False),
    ("generator_lm_head.bias", _WORDS,                                             "generator_lm_head",       False),
    ("decoder.bias",           re.compile(r"model\.embeddings\.tok_embeddings\.weight"),  "decoder",         False),
)  # fmt: skip
"""Heads of encoders (BERT, ESM, RoBERTa, GTE, ALBERT, DistilBERT, ELECTRA, ModernBERT and related): a bias of the head
is stored, its weight is not. In the rows with True, that bias is tied to the head's own bias, so both are separated
with the weight. Source: transformers 5, models/*/modeling_*.py, `_tied_weights_keys`."""

EMBEDDINGS: Final = (
    *("model.embed_tokens", "model.language_model.embed_tokens", "model.decoder.embed_tokens", "transformer.wte"),
    *("shared", "model.shared", "gpt_neox.embed_in", "transformer.word_embeddings", "embed_tokens"),
    *("backbone.embeddings", "model.text_model.embed_tokens"),
)
"""The names of the input embeddings that a tied head uses, in transformers' models."""


@dataclass(frozen=True)
class TiedPair:
    """A head and the input embeddings whose tensor it shares."""

    info: StoredTensor
    head: str  # module name in adapters
    bias: StoredTensor | None  # the tensor that the head's bias is tied to
    separable: bool  # whether the head can be given a tensor of its own
    key: str = ""  # module name of the head in the base, if it is another one
    stored: str = ""  # the head's own tensor, which some bases store though their configuration ties it
    own_bias: str = ""  # the tensor that the head's layer adds to its outputs

    @property
    def sources(self) -> dict[str, StoredTensor]:
        """Name of a tensor that a separate head needs and the base lacks → the tensor with its value."""
        bias = {f"{self.head}.bias": self.bias} if self.bias else {}
        return {f"{self.key or self.head}.weight": self.info, **bias} if self.separable else {}


def tied(names: Names, base: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> TiedPair | None:
    """Return the tied pair of a base; None if its head is not tied, if it has no head, or if that is unknown."""
    classes = config.get("architectures")
    named = [c for c in classes if isinstance(c, str)] if isinstance(classes, list) else []
    if any(c.endswith(ENCODER_DECODER) for c in named):
        return _of_encoder_decoder(base, config.get("decoder"))
    stated = config.get("tie_word_embeddings")
    if stated is False or not any(c.endswith(HEADED) for c in named):
        return None
    kind = str(config.get("model_type"))
    family = kind if kind in (*VISION_TYPES, WHISPER) or all(c.endswith(DECODER_CLASSES) for c in named) else ""
    pair = (
        _of_encoder(base) or _of_decoder(names, base, family) or (_only_table(base, config) if stated is True else None)
    )
    head = names.only(pair.head) if pair else None
    if pair is None or head is None:
        return pair
    fits = stated is True and pair.bias is None and head.shape == pair.info.shape and len(head.row_slices) == 1
    return replace(pair, separable=False, stored=head.row_slices[0].key) if fits else None


def _of_encoder_decoder(base: Mapping[str, StoredTensor], decoder: object) -> TiedPair | None:
    """Return the tied pair of a model of an encoder and a decoder. `decoder`: the configuration of the decoder."""
    stated = isinstance(decoder, Mapping) and decoder.get("tie_word_embeddings")
    table = next((info for key, info in base.items() if DECODER_EMBEDDINGS.fullmatch(key)), None)
    if table is None or stated is False or any(f"decoder.{head}.weight" in base for head in DECODER_HEADS):
        return None
    return TiedPair(table, LM_HEAD, None, separable=False)


def _of_encoder(base: Mapping[str, StoredTensor]) -> TiedPair | None:
    for bias, embeddings, head, shares in ENCODERS:
        table = next((i for k, i in base.items() if embeddings.fullmatch(k)), None) if bias in base else None
        if table is not None:
            shared = base[bias] if shares and f"{head}.bias" not in base else None
            own_bias = bias if shares or bias == f"{head}.bias" else ""
            return TiedPair(table, head, shared, _plain(table), own_bias=own_bias)
    return None


def _of_decoder(names: Names, base: Mapping[str, StoredTensor], family: str) -> TiedPair | None:
    """Return the tied pair of a decoder. `family`: the type of a model whose head is known, "" for others."""
    view = next((v for v in map(names.only, EMBEDDINGS) if v is not None), None)
    if view is None or len(view.row_slices) > 1:
        return None
    info = base[view.row_slices[0].key]
    name = info.name.removesuffix(".weight")
    if family in VISION_TYPES:
        return TiedPair(
            info, LM_HEAD, None, name in VISION_EMBEDDINGS and _plain(info), VISION_EMBEDDINGS.get(name, "")
        )
    if family == WHISPER:
        return TiedPair(info, "proj_out", None, _plain(info))
    known = bool(family) and (name in SEPARABLE or (family, name) == SEPARABLE_IN)
    return TiedPair(info, LM_HEAD, None, known and _plain(info))


def _only_table(base: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> TiedPair | None:
    """Return the only tensor with a row for every token as the tied pair; None if there are none or several."""
    sizes = [part.get("vocab_size") for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    tables = [info for info in base.values() if len(info.shape) == 2 and info.shape[0] in sizes]
    return TiedPair(tables[0], LM_HEAD, None, separable=False) if len(tables) == 1 else None


def _plain(info: StoredTensor) -> bool:
    return info.stored in ("", info.name) and prod(info.shape) > 0

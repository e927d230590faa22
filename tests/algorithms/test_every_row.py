"""No row without a proof: which test compares it with the forward pass of the library that writes its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_merge.algorithms import ALGORITHMS

LYCORIS = "lycoris_layers.py"
PEFT, OLD_PEFT, TRAINERS = (f"test_{name}.py" for name in ("peft_oracles", "peft_old_oft", "trainers"))

PROOFS: dict[str, tuple[str, str]] = {
    "lora": (LYCORIS, "locon.LoConModule"),
    "lora_sparse": (TRAINERS, "extract_diff"),
    "lora_sparse_tucker": (TRAINERS, "small_conv"),
    "lora_fused": (TRAINERS, "trainers.LitgptFused"),
    "lora_blocks": (TRAINERS, "trainers.LongCatLora"),
    "lora_xs": (TRAINERS, "trainers.StableAudioXs"),
    "bora": (TRAINERS, "trainers.StableAudioBora"),
    "lora_transposed": (TRAINERS, "trainers.Scratch"),
    "lora_bias": (PEFT, '"lora_bias": True'),
    "lora_embedding": (PEFT, '"lora": (peft.LoraConfig, [*LINEAR, *CONV, "table"]'),
    "lora_experts": (PEFT, "target_parameters=parameters"),
    "lora_experts_transposed": (PEFT, '"is_transposed", [False, True]'),
    **dict.fromkeys(("lora_stacked", "lora_stacked_down", "lora_stacked_up"), (TRAINERS, "trainers.StackedExperts")),
    "lora_switch": (TRAINERS, "trainers.MlxSwitch"),
    "bdlora": (PEFT, "peft.BdLoraConfig"),
    "pissa": (PEFT, '"init_lora_weights": "pissa"'),
    "olora": (PEFT, '"init_lora_weights": "olora"'),
    "kasa": (PEFT, "peft.KasaConfig"),
    "loha": (LYCORIS, "loha.LohaModule"),
    "lokr": (LYCORIS, "lokr.LokrModule"),
    "glora": (LYCORIS, "glora.GLoRAModule"),
    "glora_old": (TRAINERS, "trainers.OldGlora"),
    "tlora": (LYCORIS, "tlora.TLoraModule"),
    "full": (LYCORIS, "full.FullModule"),
    "full_rank": (TRAINERS, "trainers.ToolkitFullRank"),
    "set": (PEFT, "modules_to_save="),
    "ia3": (LYCORIS, "ia3.IA3Module"),
    "diag_oft": (LYCORIS, "diag_oft.DiagOFTModule"),
    "oft_diag": (TRAINERS, "trainers.OftDiag"),
    "boft": (LYCORIS, "boft.ButterflyOFTModule"),
    "onetrainer_oft": (TRAINERS, "trainers.OneTrainerOft"),
    "onetrainer_oft_conv": (TRAINERS, "trainers.OneTrainerOft"),
    "adalora": (PEFT, "peft.AdaLoraConfig"),
    "peft_ia3_out": (PEFT, '"feedforward_modules": []'),
    "peft_ia3_in": (PEFT, '"feedforward_modules": ["wide"'),
    "peft_oft": (PEFT, "peft.OFTConfig"),
    "peft_oft_embedding": (PEFT, 'peft.OFTConfig, [*LINEAR, "table"]'),
    "peft_oft2": (OLD_PEFT, "test_second_generation"),
    "peft_oft1": (OLD_PEFT, "test_first_generation"),
    "peft_boft": (PEFT, "peft.BOFTConfig"),
    "vera": (PEFT, "peft.VeraConfig"),
    "pvera": (PEFT, "peft.PveraConfig"),
    "randlora": (PEFT, "peft.RandLoraConfig"),
    "fourierft": (PEFT, "peft.FourierFTConfig"),
    "hra": (PEFT, "peft.HRAConfig"),
    "miss": (PEFT, "peft.MissConfig"),
    "miss_bat": (PEFT, '"init_weights": "bat"'),
    "miss_mini": (PEFT, '"init_weights": "mini"'),
    "shira": (PEFT, "peft.ShiraConfig"),
    "c3a": (PEFT, "peft.C3AConfig"),
    "road": (PEFT, "peft.RoadConfig"),
    "delora": (PEFT, "peft.DeloraConfig"),
    "gralora": (PEFT, "peft.GraloraConfig"),
    "hira": (PEFT, "peft.HiraConfig"),
    "hira_embedding": (PEFT, 'peft.HiraConfig, [*LINEAR, "conv", "table"]'),
    "vblora": (PEFT, "peft.VBLoRAConfig"),
    "vblora_top": (PEFT, '"save_only_topk_weights": True'),
    "deft": (PEFT, "peft.DeftConfig"),
    "supertuning": (PEFT, "peft.SupertuningConfig"),
    "osf": (PEFT, "peft.OSFConfig"),
    "waveft": (PEFT, "peft.WaveFTConfig"),
    "peanut": (PEFT, "peft.PeanutConfig"),
    "unilora": (PEFT, "peft.UniLoraConfig"),
    "peft_glora": (PEFT, "peft.GloraConfig"),
    "peft_glora_bias": (PEFT, "peft.GloraConfig"),
    "psoft": (PEFT, "peft.PsoftConfig"),
    "adamss": (PEFT, "peft.AdamssConfig"),
    "tinylora": (PEFT, "peft.TinyLoraConfig"),
    "frod": (PEFT, "peft.FrodConfig"),
}
"""Row → (file, words of the case there)."""


@pytest.mark.few(17)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_row_has_an_oracle(name: str) -> None:
    file, words = PROOFS[name]
    assert words in (Path(__file__).parent / file).read_text(encoding="utf-8")


def test_no_proof_of_a_row_that_is_gone() -> None:
    assert list(PROOFS) == list(ALGORITHMS)

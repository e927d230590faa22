"""LyCORIS from end to end: its modules saved as a trainer saves them, merged as files, against its forward.

Modules that share the arguments of a training run, as far as they matter, share a file.
"""

from __future__ import annotations

import json
import logging
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import lora_merge

pytest.importorskip("lycoris.modules", reason="lycoris-lora is not installed")
from lycoris import kohya, wrapper

from tests.algorithms.lycoris_layers import LAYERS, build, inputs, table

NAMINGS = ("lycoris_blocks_{}", "lora_unet_blocks_{}", "blocks.{}")


def runs() -> dict[str, list[tuple[str, str, dict[str, Any], float]]]:
    """[network arguments, what the user has to state] of a run → modules: (LyCORIS class, layer, options, tolerance)."""
    found: dict[str, list[tuple[str, str, dict[str, Any], float]]] = {}
    for path, layers, options, tolerance, _ in table():
        told = {k: options[k] for k in ("rs_lora",) if k in options}
        stated = {k: options[k] for k in ("sig_type",) if k in options}  # no trainer hands it on
        if path.startswith("tlora"):
            told["algo"] = "tlora"
        run = json.dumps([{k: str(v) for k, v in told.items()}, stated])
        found.setdefault(run, []).extend((path, layer, options, tolerance) for layer in layers)
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize(("arguments", "modules"), runs().items(), ids=list(runs()))
def test_file_merges_into_the_trained_model(
    arguments: str, modules: list[tuple[str, str, dict[str, Any], float]], tmp_path: Path
) -> None:
    torch.manual_seed(2)
    trained, adapter = nn.ModuleDict(), {}
    for i, (_, kind, _, tolerance) in enumerate(modules):
        trained[f"{i}"] = LAYERS[kind]().to(torch.float64 if tolerance < 1e-9 else torch.float32)
    base = {f"blocks.{k}": v.clone() for k, v in trained.state_dict().items()}
    for i, ((path, _, options, _), naming) in enumerate(zip(modules, cycle(NAMINGS), strict=False)):
        saved = build(path, trained[f"{i}"], options).state_dict()
        adapter |= {f"{naming.format(i)}.{k}": v.detach().clone().contiguous() for k, v in saved.items()}
    save_file(base, tmp_path / "base.safetensors")
    told, stated = json.loads(arguments)
    save_file(adapter, tmp_path / "adapter.safetensors", {"ss_network_args": json.dumps(told)})

    report = lora_merge.merge(
        tmp_path / "base.safetensors", tmp_path / "adapter.safetensors", tmp_path / "out.safetensors",
        compute_dtype="fp64", device="cpu", setting=stated,
    )  # fmt: skip
    assert report.coverage
    merged = load_file(tmp_path / "out.safetensors")
    for i, (_, kind, _, tolerance) in enumerate(modules):
        plain = LAYERS[kind]()
        plain.load_state_dict({k: merged[f"blocks.{i}.{k}"] for k in plain.state_dict()}, assign=True)
        x = inputs(plain).to(plain.weight.dtype)
        with torch.no_grad():
            theirs, mine = trained[f"{i}"](x), plain(x)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance * float(theirs.abs().max()))


@pytest.mark.parametrize(
    "told",
    [
        {"algo": "dylora"},
        {"algo": "dylora", "block_size": "2"},
        {"algo": "dylora", "bypass_mode": "True"},
        {"algo": "dylora", "block_size": "8", "bypass_mode": "1"},
        {"algo": "dylora", "block_size": "8", "bypass_mode": "False"},
        {},
    ],
    ids=str,
)
def test_dylora_is_the_training_module_with_all_its_blocks(
    told: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LyCORIS draws the rank anew in every forward pass; its scale is α over the number of blocks, and only the metadata
    says so. Other tools, and we without the metadata, read α / r. In bypass mode it leaves the scale out."""
    size = int(told.get("block_size", 4))
    base, adapter, trained = {}, {}, nn.ModuleDict()
    for kind in ("linear", "conv2d"):
        trained[kind] = LAYERS[kind]().double()
        base |= {f"blocks.{kind}.{k}": v.clone() for k, v in trained[kind].state_dict().items()}
        mode = {"bypass_mode": told.get("bypass_mode", "False") != "False"}
        module = build("dylora.DyLoraModule", trained[kind], {"lora_dim": 8, "alpha": 3.0, "block_size": size, **mode})
        adapter |= {f"lycoris_blocks_{kind}.{k}": v.detach().contiguous() for k, v in module.state_dict().items()}
    save_file(adapter, tmp_path / "adapter.safetensors", {"ss_network_args": json.dumps(told)})
    merged = lora_merge.merge_state_dict(base, tmp_path / "adapter.safetensors", compute_dtype="fp64")
    monkeypatch.setattr("random.randint", lambda _, last: last)
    for kind, layer in trained.items():
        plain = LAYERS[kind]()
        plain.load_state_dict({k: merged[f"blocks.{kind}.{k}"] for k in plain.state_dict()}, assign=True)
        x = inputs(plain)
        with torch.no_grad():
            theirs, mine, before = layer(x), plain(x), untrained(kind, base, x)
        wanted = theirs if told else before + (theirs - before) / size
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-9)


def untrained(kind: str, base: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The layer before training."""
    plain = LAYERS[kind]()
    plain.load_state_dict({k: base[f"blocks.{kind}.{k}"] for k in plain.state_dict()}, assign=True)
    return plain(x)


class FinalLayer(nn.Module):
    """A kind of block whose layers both functions of LyCORIS wrap."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(24, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.first(x))
        return y


class Model(nn.Module):
    """One block."""

    def __init__(self) -> None:
        super().__init__()
        self.block = FinalLayer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.block(x)
        return y


def wrapped(model: nn.Module, entry: str, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What the trainer that writes this entry saves, after wrapping the model with these arguments."""
    logging.getLogger("LyCORIS").setLevel(logging.ERROR)
    if entry == "ss_network_args":
        network = kohya.create_network(1.0, 4, 2.0, None, [], model, **given)
        network.apply_to([], model, apply_text_encoder=False, apply_unet=True)
    else:
        preset, own = given.get("apply_preset"), {k: v for k, v in given.items() if k != "apply_preset"}
        network = wrapper.create_lycoris(model, 1.0, linear_dim=4, linear_alpha=2.0, **own)
        if preset:  # as a trainer's own code does, after its arguments chose the default
            wrapper.LycorisNetwork.apply_preset(preset)
            network = wrapper.LycorisNetwork(model, lora_dim=4, alpha=2.0, network_module=own["algo"])
        network.apply_to()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    network.to(next(model.parameters()).dtype).eval()
    return {k: v.detach().clone().contiguous() for k, v in network.state_dict().items()}


@pytest.mark.pairs
@pytest.mark.parametrize("entry", ["ss_network_args", "lycoris_config"])
@pytest.mark.parametrize("told", [{"rs_lora": True}, {"sig_type": "last", "use_data_init": False}], ids=["rs", "start"])
@pytest.mark.parametrize("algo", ["lora", "loha", "lokr", "glora", "tlora"])
def test_arguments_count_where_the_library_reads_them(
    algo: str, told: dict[str, Any], entry: str, tmp_path: Path
) -> None:
    """Only kohya.py hands `rs_lora` on, and neither of the two what T-LoRA starts from."""
    torch.manual_seed(3)
    given = {"algo": algo, **({"full_matrix": True} if algo == "lokr" else {}), **told}
    trained = Model().double()
    base = {k: v.clone() for k, v in trained.state_dict().items()}
    saved = wrapped(trained, entry, given)
    assert len({k.partition(".")[0] for k in saved}) == 2
    save_file(saved, tmp_path / "adapter.safetensors", {entry: json.dumps(given)})
    merged = Model().double()
    x = torch.randn(5, 24, dtype=torch.float64)
    merged.load_state_dict(lora_merge.merge_state_dict(base, tmp_path / "adapter.safetensors", compute_dtype="fp64"))
    with torch.no_grad():
        torch.testing.assert_close(merged(x), trained(x), rtol=0, atol=1e-4 if algo == "tlora" else 1e-9)


@pytest.mark.few(2)
@pytest.mark.parametrize("entry", ["ss_network_args", "lycoris_config"])
@pytest.mark.parametrize(
    ("algo", "mode"),
    [
        ("diag-oft", True),
        ("diag-oft", "False"),
        ("diag-oft", None),
        ("diag-oft", "no"),
        ("boft", "0"),
        ("boft", "false"),
    ],
)
def test_bypass_mode_turns_the_bias_too(algo: str, mode: bool | str | None, entry: str, tmp_path: Path) -> None:  # noqa: FBT001
    """LyCORIS takes every value but "False" for yes, also null, "no" and "0"."""
    torch.manual_seed(3)
    given = {"algo": algo, "bypass_mode": mode, "rescaled": True}
    trained = Model()
    base = {k: v.clone() for k, v in trained.state_dict().items()}
    save_file(wrapped(trained, entry, given), tmp_path / "adapter.safetensors", {entry: json.dumps(given)})
    merged = Model()
    merged.load_state_dict(lora_merge.merge_state_dict(base, tmp_path / "adapter.safetensors", compute_dtype="fp64"))
    x = torch.randn(5, 24)
    with torch.no_grad():
        theirs, mine = trained(x), merged(x)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=5e-6 * float(theirs.abs().max()))
    turned = not torch.equal(merged.state_dict()["block.first.bias"], base["block.first.bias"])
    assert turned is (str(mode).lower() != "false")
    save_file(base, tmp_path / "base.safetensors")
    report = lora_merge.merge(
        tmp_path / "base.safetensors", tmp_path / "adapter.safetensors", tmp_path / "out.safetensors"
    )
    assert report.verified and ("bypass mode" in str(report.coverage)) is turned


@pytest.mark.few(3)
@pytest.mark.parametrize("entry", ["ss_network_args", "lycoris_config"])
@pytest.mark.parametrize("mode", [True, False], ids=["bypass", "rebuild"])
@pytest.mark.parametrize("algo", ["lora", "loha", "lokr", "ia3"])
def test_bypass_mode_is_what_was_trained(algo: str, mode: bool, entry: str, tmp_path: Path) -> None:  # noqa: FBT001
    """There DoRA's magnitude has no effect, and (IA)³ of outputs scales the bias; other programs see neither."""
    torch.manual_seed(3)
    given = {"algo": algo, "bypass_mode": mode, **({} if algo == "ia3" else {"dora_wd": True})}
    trained = Model()
    base = {k: v.clone() for k, v in trained.state_dict().items()}
    save_file(wrapped(trained, entry, given), tmp_path / "adapter.safetensors", {entry: json.dumps(given)})
    save_file(base, tmp_path / "base.safetensors")
    report = lora_merge.merge(
        tmp_path / "base.safetensors", tmp_path / "adapter.safetensors", tmp_path / "out.safetensors"
    )
    assert ("bypass mode" in str(report.coverage)) is mode
    merged, x = Model(), torch.randn(5, 24)
    merged.load_state_dict(load_file(tmp_path / "out.safetensors"))
    with torch.no_grad():
        theirs, mine = trained(x), merged(x)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=5e-6 * float(theirs.abs().max()))


class Convolution(nn.Module):
    """One convolution."""

    def __init__(self, inputs: int, out: int, groups: int, kernel: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, out, kernel, groups=groups)


def in_bypass(
    path: str, shape: tuple[int, ...], options: dict[str, Any], told: dict[str, Any], file: Path
) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Write the file of a convolution trained in bypass mode; return its weights before, inputs and its outputs."""
    torch.manual_seed(3)
    model = Convolution(*shape)
    base = {k: v.clone() for k, v in model.state_dict().items()}
    saved = build(path, model.conv, {"bypass_mode": True, **options}).state_dict()
    save_file({f"lycoris_conv.{k}": v.detach().clone().contiguous() for k, v in saved.items()}, file,
              {"ss_network_args": json.dumps(told)})  # fmt: skip
    x = torch.randn(2, shape[0], 5, 5)
    with torch.no_grad():
        return base, x, model.conv(x)


IA3 = ("ia3.IA3Module", {"train_on_input": True}, {"algo": "ia3", "bypass_mode": "True"})
BOFT = ("boft.ButterflyOFTModule", {"lora_dim": 4, "constraint": 0}, {"algo": "boft", "bypass_mode": "True"})
LOHA = ("loha.LohaModule", {"weight_decompose": True}, {"algo": "loha", "bypass_mode": "True"})
LOKR = ("lokr.LokrModule", {}, {"algo": "lokr", "bypass_mode": "True"})
LORA = ("locon.LoConModule", {}, {"algo": "lora", "bypass_mode": "True"})
DORA = ("locon.LoConModule", {"weight_decompose": True}, {"algo": "lora", "bypass_mode": "True"})
TLORA = ("tlora.TLoraModule", {}, {"algo": "tlora", "bypass_mode": "True"})
DYLORA = ("locon.LoConModule", {"lora_dim": 4, "alpha": 4.0}, {"algo": "dylora", "bypass_mode": "True"})
OFT = ("diag_oft.DiagOFTModule", {"lora_dim": 4, "constraint": 0}, {"algo": "diag-oft", "bypass_mode": "True"})


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("kind", "shape", "noted"),
    [
        *[(IA3, shape, False) for shape in ((8, 12, 2), (12, 12, 3), (8, 8, 8), (4, 8, 4), (8, 12, 1))],
        *[(kind, (8, 16, 1), True) for kind in (BOFT, OFT)],
        (OFT, (8, 16, 2), True),  # no block lies in two groups
        *[(kind, (8, 16, 1), True) for kind in (LOKR, DYLORA, DORA)],
        (TLORA, (8, 16, 1, 1), True),
        *[(kind, (8, 16, 2), False) for kind in (LOHA, LORA)],
    ],
)
def test_convolution_trained_in_bypass_mode(
    kind: tuple[str, dict[str, Any], dict[str, Any]],
    shape: tuple[int, ...],
    noted: bool,  # noqa: FBT001
    tmp_path: Path,
) -> None:
    """(IA)³ has factors for the inputs of all groups; a rotation of the outputs is a weight where it stays in a group."""
    base, x, theirs = in_bypass(kind[0], shape, kind[1], kind[2], tmp_path / "a.safetensors")
    save_file(base, tmp_path / "b.safetensors")
    report = lora_merge.merge(
        tmp_path / "b.safetensors", tmp_path / "a.safetensors", tmp_path / "o.safetensors", compute_dtype="fp64"
    )
    merged = Convolution(*shape)
    merged.load_state_dict(load_file(tmp_path / "o.safetensors"))
    with torch.no_grad():
        mine = merged.conv(x)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=5e-6 * float(theirs.abs().max()))
    assert ("right if that convolution has one group" in str(report.coverage)) is noted


@pytest.mark.parametrize(
    ("kind", "shape", "told", "why"),
    [
        (BOFT, (8, 8, 8), {}, "different groups were mixed"),
        (OFT, (8, 16, 8), {}, "different groups were mixed"),
        (IA3, (8, 12, 2), {"bypass_mode": "False"}, "no metadata says"),
        (IA3, (9, 12, 3), {"bypass_mode": "False"}, "no metadata says"),
    ],
)
def test_change_larger_than_a_grouped_convolution_is_refused(
    kind: tuple[str, dict[str, Any], dict[str, Any]], shape: tuple[int, ...], told: dict[str, Any], why: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Blocks across groups mix their outputs; factors for several groups in another mode were trained on another base."""
    base, _, _ = in_bypass(kind[0], shape, kind[1], {**kind[2], **told}, tmp_path / "a.safetensors")
    with pytest.raises(lora_merge.MergeError, match=why):
        lora_merge.merge_state_dict(base, tmp_path / "a.safetensors")


@pytest.mark.parametrize("rank", [16, 40])
def test_tlora_of_a_rank_above_the_width(rank: int, tmp_path: Path) -> None:
    """LyCORIS fills its factors with zeros."""
    torch.manual_seed(3)
    logging.getLogger("LyCORIS").setLevel(logging.ERROR)
    layer = nn.Linear(12, 20)
    base, x = {f"m.{k}": v.clone() for k, v in layer.state_dict().items()}, torch.randn(5, 12)
    module = wrapper.TLoraModule("lycoris_m", layer, 1.0, rank, 4.0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        saved = {f"lycoris_m.{k}": v.clone().contiguous() for k, v in module.custom_state_dict().items()}
        module.apply_to()
        wanted = layer(x)
    save_file(saved, tmp_path / "a.safetensors", {"lycoris_config": json.dumps({"algo": "tlora"})})
    save_file(base, tmp_path / "b.safetensors")
    lora_merge.merge(tmp_path / "b.safetensors", tmp_path / "a.safetensors", tmp_path / "o.safetensors")
    merged = load_file(tmp_path / "o.safetensors")
    mine = nn.functional.linear(x, merged["m.weight"], merged["m.bias"])
    torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))


def test_setting_of_some_layers_only_has_to_be_stated(tmp_path: Path) -> None:
    """A preset can give arguments to one kind of layers, and no file tells which layers are of that kind."""
    model = Model().double()
    base = {k: v.clone() for k, v in model.state_dict().items()}
    preset = {"target_module": ["FinalLayer"], "module_algo_map": {"FinalLayer": {"rs_lora": True}}}
    given = {"algo": "glora", "apply_preset": preset}
    save_file(
        wrapped(model, "lycoris_config", given), tmp_path / "a.safetensors", {"lycoris_config": json.dumps(given)}
    )
    with pytest.raises(lora_merge.MergeError, match="rs_lora; give it with setting="):
        lora_merge.merge_state_dict(base, tmp_path / "a.safetensors")
    merged = Model().double()
    merged.load_state_dict(
        lora_merge.merge_state_dict(base, tmp_path / "a.safetensors", setting={"rs_lora": True}, compute_dtype="fp64")
    )
    x = torch.randn(5, 24, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(merged(x), model(x), rtol=0, atol=1e-9)

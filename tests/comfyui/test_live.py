"""The node pack in ComfyUI itself, started without a screen on the CPU; its own loader reads what the pack wrote.

Needs ComfyUI's sources and a Python with its requirements: `LORA_MERGE_COMFYUI="PYTHON PATH/main.py"`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.kit.comfy import lora, node
from tests.kit.files import save
from tests.kit.live_comfy import COMMAND, Server, installed, running
from tests.kit.models import sd3

pytestmark = [
    pytest.mark.release,
    pytest.mark.skipif(not COMMAND, reason='needs ComfyUI: LORA_MERGE_COMFYUI="PYTHON PATH/main.py"'),
]


LOOP = """
from comfy_execution.graph_utils import GraphBuilder

class Loop:
    RETURN_TYPES, FUNCTION, CATEGORY = ("LORA_MERGE_ADAPTERS",), "run", "loops"
    INPUT_TYPES = classmethod(lambda cls: {"required": {"lora": ("STRING", {})}})

    def run(self, lora):
        graph = GraphBuilder()
        unet = graph.node("UNETLoader", unet_name="sd3.safetensors", weight_dtype="default")
        loader = graph.node("LoraLoaderModelOnly", model=unet.out(0), lora_name=lora, strength_model=0.5)
        stack = graph.node("LoraMergeStack", model=loader.out(0))
        return {"result": (stack.out(0),), "expand": graph.finalize()}

NODE_CLASS_MAPPINGS = {"Loop": Loop}
"""
"""A node pack that makes nodes while a workflow runs, as loops do."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("comfyui")
    installed(folder)
    base = sd3()
    save(base, folder / "models/diffusion_models/sd3.safetensors")
    name = "joint_blocks.0.x_block.attn.qkv.weight"
    out, inner = base[name].shape
    up, down = torch.randn(out, 4).mul(0.1), torch.randn(4, inner).mul(0.1)
    prefix = f"diffusion_model.{name.removesuffix('.weight')}"
    save({f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up}, folder / "models/loras/a.safetensors")
    (folder / "custom_nodes/loop.py").write_text(LOOP)
    (folder / "more").mkdir()
    save({f"{prefix}.lora_A.weight": -down, f"{prefix}.lora_B.weight": up}, folder / "more/b.safetensors")
    (folder / "more/flux.gguf").write_bytes(b"GGUF")
    (folder / "paths.yaml").write_text(f"more:\n  base_path: {folder}\n  loras: more\n  diffusion_models: more\n")
    with running(folder, "--extra-model-paths-config", str(folder / "paths.yaml")) as it:
        yield it


def bake(**more: Any) -> dict[str, Any]:
    inputs = {"base": "diffusion_models/sd3.safetensors", "dtype": "keep", "unmatched": "error", "name": "baked", "overwrite": False,
              "method": "sum", "adapters__adapter0": ["1", 0]}  # fmt: skip
    return {"1": lora("a.safetensors", 0.5), "2": node("Bake", **{**inputs, **more})}


def test_baked_file_is_loaded_by_comfyui_and_has_the_change(server: Server) -> None:
    status, said = server.post(bake())
    assert status == "success", said
    models = server.folder / "models"
    base, adapter = load_file(models / "diffusion_models/sd3.safetensors"), load_file(models / "loras/a.safetensors")
    down, up = (adapter[next(n for n in adapter if f"lora_{side}" in n)] for side in "AB")
    # ComfyUI loads the file and saves what it has loaded.
    status, said = server.post({
        "1": {"class_type": "UNETLoader", "inputs": {"unet_name": "baked.safetensors", "weight_dtype": "default"}},
        "2": {"class_type": "ModelSave", "inputs": {"model": ["1", 0], "filename_prefix": "loaded"}},
    })  # fmt: skip
    assert status == "success", said
    (saved,) = (server.folder / "output").rglob("loaded*.safetensors")
    loaded = {name.removeprefix("model.diffusion_model."): t for name, t in load_file(saved).items()}
    changed = "joint_blocks.0.x_block.attn.qkv.weight"
    expected = (base[changed].double() + 0.5 * up.double() @ down.double()).to(base[changed].dtype)
    assert set(base) <= set(loaded)
    for name, tensor in base.items():
        wanted = expected if name == changed else tensor
        # On the CPU, ComfyUI holds fp32. Ours is rounded once from fp32: at a tie one step from the double's.
        torch.testing.assert_close(loaded[name].float(), wanted.float(), rtol=2**-10 if name == changed else 0, atol=0)


def test_loras_of_a_loader_and_of_another_folder_meet_by_a_method(server: Server) -> None:
    """The loader is in the workflow and does not run: its model is not loaded."""
    loader = {"class_type": "LoraLoaderModelOnly", "inputs": {
        "model": ["model", 0], "lora_name": "a.safetensors", "strength_model": 0.5,
    }}  # fmt: skip
    unet = {"class_type": "UNETLoader", "inputs": {"unet_name": "sd3.safetensors", "weight_dtype": "default"}}
    method = {"method": "ties", "method.density": 1.0, "method.elect": "sum", "method.normalise": "count"}
    workflow = {
        **bake(name="ties", **method), "model": unet, "loader": loader, "3": node("Stack", model=["loader", 0]),
        "1": lora("b.safetensors", 0.25),
    }  # fmt: skip
    workflow["2"]["inputs"]["adapters.adapter1"] = ["3", 0]
    status, said = server.post(workflow)
    assert status == "success", said
    assert "UNETLoader" in said["3"] and said["picture 2"][0]["type"] == "temp"
    ran = {name for kind, about in said["messages"] if kind == "execution_cached" for name in about["nodes"]}
    assert not {"model", "loader"} & ran
    models = server.folder / "models"
    from lora_merge import merge

    expected = server.folder / "expected.safetensors"
    merge(models / "diffusion_models/sd3.safetensors",
          [(server.folder / "more/b.safetensors", 0.25), (models / "loras/a.safetensors", 0.5)], expected,
          method="ties", density=1.0)  # fmt: skip
    baked = load_file(models / "diffusion_models/ties.safetensors")
    for name, tensor in load_file(expected).items():
        torch.testing.assert_close(baked[name], tensor, rtol=0, atol=0)


def test_nodes_that_a_loop_makes_are_read(server: Server) -> None:
    plain, made = bake(name="plain"), bake(name="made")
    made["1"] = {"class_type": "Loop", "inputs": {"lora": "a.safetensors"}}
    for workflow in (plain, made):
        status, said = server.post(workflow)
        assert status == "success", said
    first, second = (load_file(server.folder / f"models/diffusion_models/{n}.safetensors") for n in ("plain", "made"))
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=0, atol=0)


def test_switch_of_comfyui_is_passed_through(server: Server) -> None:
    """Its outputs have the type of what is connected, which ComfyUI does not say."""
    unet = {"class_type": "UNETLoader", "inputs": {"unet_name": "sd3.safetensors", "weight_dtype": "default"}}
    loader = {"class_type": "LoraLoaderModelOnly", "inputs": {
        "model": ["u", 0], "lora_name": "a.safetensors", "strength_model": 0.5,
    }}  # fmt: skip
    switch = {"class_type": "ComfySwitchNode", "inputs": {"switch": True, "on_true": ["l", 0], "on_false": ["u", 0]}}
    workflow = {"u": unet, "l": loader, "s": switch, "1": node("Stack", model=["s", 0])}
    status, said = server.post({**bake(name="switched"), **workflow})
    assert status == "success", said
    assert "a.safetensors: 0.5" in said["1"] and "ComfySwitchNode, UNETLoader" in said["1"]


def test_second_queue_bakes_nothing(server: Server) -> None:
    path = server.folder / "models/diffusion_models/twice.safetensors"
    status, said = server.post(bake(name="twice"))
    assert status == "success", said
    assert path.exists(), (said, [*server.folder.rglob("twice*")])
    before = path.stat().st_ino
    for _ in range(2):
        assert server.post(bake(name="twice"))[0] == "success"
    assert path.stat().st_ino == before


def test_error_of_a_node_is_ours(server: Server) -> None:
    status, said = server.post(bake(name="../../out"))
    assert status == "error"
    message = next(m[1]["exception_message"] for m in said["messages"] if m[0] == "execution_error")
    assert "not inside of ComfyUI's folder 'diffusion_models'" in message


def test_nodes_are_listed_with_what_they_are_searched_by(server: Server) -> None:
    nodes = {name: about for name, about in server.get("/object_info").items() if name.startswith("LoraMerge")}
    assert len(nodes) == 10 and all(about["category"] == "lora-merge" for about in nodes.values())
    offered = nodes["LoraMergeBake"]["input"]["required"]["base"]
    assert "diffusion_models/flux.gguf" in str(offered) and "b.safetensors" in str(nodes["LoraMergeLoRA"]["input"])
    assert nodes["LoraMergeBake"]["output_node"] and nodes["LoraMergeBake"]["output"] == ["STRING", "STRING"]

"""The node pack on a host of the tests: workflows as ComfyUI runs them, and the folder that is installed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import lora_merge
from lora_merge.comfyui import pack
from lora_merge.comfyui.loaders import LoaderChain, loaded
from lora_merge.merge_methods import COMBINATIONS, METHODS
from tests.kit.adapters import kohya
from tests.kit.comfy import HOST, DynamicPrompt, Host, comfyui, lora, node
from tests.kit.command_line import run
from tests.kit.files import save
from tests.kit.models import sd1_sample

BASE = "checkpoints/tiny.safetensors"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """A host with one checkpoint and two LoRAs."""
    with comfyui(tmp_path) as it:
        save(sd1_sample(), tmp_path / BASE)
        for n in range(2):
            save(kohya(sd1_sample(), seed=n + 1), tmp_path / f"loras/a{n}.safetensors")
        yield it


def bake(**more: Any) -> dict[str, Any]:
    """A workflow that merges both LoRAs."""
    inputs = {"base": BASE, "dtype": "keep", "unmatched": "error", "name": "out/both", "overwrite": False, "method": "sum",
              "adapters__adapter0": ["1", 0], "adapters__adapter1": ["2", 0]}  # fmt: skip
    return {
        "1": lora("a0.safetensors", 0.8),
        "2": lora("a1.safetensors", 0.5, 0.5, "B01=0, unet=0.9"),
        "3": node("Bake", **{**inputs, **more}),
    }


def test_bake_writes_what_merge_writes(host: Host) -> None:
    path, report = host.post(bake())["3"].values
    assert path == str(host.models / "checkpoints/out/both.safetensors") and "5 of 14 tensors" in report
    second = lora_merge.Adapter(host.models / "loras/a1.safetensors", 0.5, (("te", 0.5), ("B01", 0), ("unet", 0.9)))
    expected = host.models / "expected.safetensors"
    lora_merge.merge(host.models / BASE, [(host.models / "loras/a0.safetensors", 0.8), second], expected)
    assert Path(path).read_bytes() == expected.read_bytes()


def test_queue_bakes_once_and_again_when_a_file_changes(host: Host) -> None:
    path = Path(host.post(bake())["3"].values[0])
    before = path.stat().st_ino
    assert "there already" in host.post(bake())["3"].values[1]
    host.post(bake())
    assert host.runs == [] and path.stat().st_ino == before
    path.unlink()
    host.post(bake())
    assert host.runs == ["3"] and path.exists()
    save(kohya(sd1_sample(), seed=9), host.models / "loras/a1.safetensors")
    with pytest.raises(lora_merge.MergeError, match="another recipe"):
        host.post(bake())
    content = path.read_bytes()
    host.post(bake(overwrite=True))
    assert path.read_bytes() != content


def test_cancelled_run_leaves_nothing(host: Host) -> None:
    from comfy import model_management, utils

    def cancel() -> None:
        model_management.state["interrupted"] = True

    utils.watchers.append(cancel)
    with pytest.raises(model_management.InterruptProcessingException):
        host.post(bake())
    assert not model_management.state["interrupted"]
    assert [p.name for p in (host.models / "checkpoints").rglob("*") if p.is_file()] == ["tiny.safetensors"]


def test_progress_reaches_its_end(host: Host) -> None:
    from comfy import utils

    host.post(bake())
    assert utils.shown and all(0 <= value <= total for value, total in utils.shown)
    assert any(value == total for value, total in utils.shown)


def test_method_shows_its_own_parameters_only(host: Host) -> None:
    for name, methods in (("Bake", METHODS), ("Combine", COMBINATIONS)):
        inputs = host.nodes[f"LoraMerge{name}"].define_schema().inputs
        method = next(i for i in inputs if i.id == "method")
        assert {o.key: tuple(i.id for i in o.inputs) for o in method.options} == {
            n: r.takes for n, r in methods.items()
        }


@pytest.mark.few(2)
@pytest.mark.parametrize("method", ["ties", "slerp", "consensus", "della"])
def test_parameters_at_their_defaults_are_accepted(host: Host, method: str) -> None:
    option = next(i for i in host.nodes["LoraMergeBake"].define_schema().inputs if i.id == "method")
    chosen = next(o for o in option.options if o.key == method)
    values = {f"method__{i.id}": i.default for i in chosen.inputs}
    assert "5 of 14 tensors" in host.post(bake(method=method, **values))["3"].values[1]


def test_every_node_that_writes_or_looks(host: Host) -> None:
    both = bake(dtype="fp32")
    host.post(both)
    shared = {"overwrite": False, "base": BASE}
    posted = host.post({
        "1": both["1"], "2": both["2"],
        "combine": node("Combine", rank="exact", method="sum", name="c", adapters__adapter0=["1", 0], **shared),
        "resize": node("Resize", adapter="a0.safetensors", rank="2", name="r", **shared),
        "convert": node("Convert", adapter="a0.safetensors", to="diffusers", name="d", **shared),
        "extract": node("Extract", tuned="checkpoints/out/both.safetensors", rank="4", name="x", **shared),
        "verify": node("Verify", merged="checkpoints/out/both.safetensors", every_value=True),
        "inspect": node("Inspect", adapter="a0.safetensors", base=BASE),
        "alone": node("Inspect", adapter="a0.safetensors", base="none"),
        "out": node("TakeOut", merged="checkpoints/out/both.safetensors", name="without", overwrite=False),
    })  # fmt: skip
    for name in ("combine", "resize", "convert", "extract", "out"):
        path = Path(posted[name].values[0])
        assert path.is_file() and path.suffix == ".safetensors" and posted[name].ui["text"][0]
    assert "5 of 5 merged tensors" in posted["verify"].values[1]
    assert "5 of 5" in posted["inspect"].values[1]
    assert "rank 4" in posted["alone"].values[1]


def test_adapters_that_are_connected_are_taken_out(host: Host) -> None:
    both = bake(dtype="fp32")
    host.post(both)
    inputs = {"merged": "checkpoints/out/both.safetensors", "name": "without", "overwrite": False}
    path = host.post({
        "1": both["1"], "2": both["2"],
        "3": node("TakeOut", adapters__adapter0=["1", 0], adapters__adapter1=["2", 0], **inputs),
    })["3"].values[0]  # fmt: skip
    with safe_open(path, "pt") as taken, safe_open(host.models / BASE, "pt") as base:
        for name in base.keys():  # noqa: SIM118  # it is no table
            torch.testing.assert_close(taken.get_tensor(name).float(), base.get_tensor(name).float(), atol=1e-6, rtol=0)


def merged(host: Host, *adapters: Any) -> bytes:
    """What `merge` writes."""
    path = host.models / "expected.safetensors"
    lora_merge.merge(host.models / BASE, [lora_merge.Adapter(*a) for a in adapters], path, overwrite=True)
    return path.read_bytes()


def test_stack_of_another_pack(host: Host) -> None:
    """As its loaders read it: a strength for text encoders changes nothing in a LoRA without them."""
    save(kohya(sd1_sample(), te=False, seed=3), host.models / "loras/no te.safetensors")
    host.nodes["LoraMergeGiven"] = given_stack([
        ("a0.safetensors", 0.8, 0.4), ("a1.safetensors", 0.0, 0.5), ("a0.safetensors", 0.0, 0.0),
        ("no te.safetensors", 0.7, 0.2),
    ])  # fmt: skip
    workflow = {
        "0": node("Given"),
        "1": node("Stack", stack=["0", 0]),
        "2": node("Bake", **{**bake()["3"]["inputs"], "adapters.adapter0": ["1", 0], "adapters.adapter1": ["1", 0]}),
    }
    del workflow["2"]["inputs"]["adapters.adapter1"]
    posted = host.post(workflow)
    assert posted["1"].values[1].count("\n") == 2
    loras = host.models / "loras"
    assert Path(posted["2"].values[0]).read_bytes() == merged(
        host, (loras / "a0.safetensors", 0.8, (("te", 0.5),)), (loras / "a1.safetensors", 0.5, (("unet", 0),)),
        (loras / "no te.safetensors", 0.7, ()),
    )  # fmt: skip


def given_stack(stack: list[tuple[str, float, float]]) -> Any:
    """The class of a node of another pack, with this stack as its output."""
    from comfy_api.latest import io

    return type("Given", (io.ComfyNode,), {
        "define_schema": classmethod(lambda _: io.Schema("Given")),
        "fingerprint_inputs": classmethod(lambda _: ""),
        "execute": classmethod(lambda _: io.NodeOutput(stack)),
    })  # fmt: skip


LOADERS = {
    "c": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "tiny.safetensors"}},
    "p": {"class_type": "Power Lora Loader (rgthree)", "inputs": {
        "model": ["c", 0], "clip": ["c", 1], "PowerLoraLoaderHeaderWidget": {"type": "PowerLoraLoaderHeaderWidget"},
        "lora_1": {"on": True, "lora": "a0.safetensors", "strength": 0.8, "strengthTwo": 0.4},
        "lora_2": {"on": False, "lora": "gone.safetensors", "strength": 1.0}, "➕ Add Lora": "",
    }},
    "s": {"class_type": "ModelSamplingFlux", "inputs": {"model": ["p", 0], "max_shift": 1.15}},
    "m": {"class_type": "LoraLoaderModelOnly", "inputs": {
        "model": ["s", 0], "lora_name": "a1.safetensors", "strength_model": 0.5,
    }},
}  # fmt: skip
"""A workflow as ComfyUI's page sends it: loaders of rgthree-comfy and of ComfyUI itself, one behind the other."""


def test_loras_of_loaders_are_read_from_the_workflow(host: Host) -> None:
    bakes = {**bake()["3"]["inputs"], "adapters.adapter0": ["1", 0]}
    del bakes["adapters.adapter1"]
    workflow = {**LOADERS, "1": node("Stack", model=["m", 0]), "2": node("Bake", **bakes)}
    posted = host.post(workflow)
    assert host.runs == ["1", "2"]
    assert "ModelSamplingFlux" in posted["1"].values[1] and "gone" not in posted["1"].values[1]
    loras = host.models / "loras"
    assert Path(posted["2"].values[0]).read_bytes() == merged(
        host, (loras / "a0.safetensors", 0.8, (("te", 0.5),)), (loras / "a1.safetensors", 0.5, (("te", 0),))
    )


def way(workflow: dict[str, Any], node: str) -> LoaderChain:
    """The way to the model of a node, as the pack sees the workflow in ComfyUI."""
    from lora_merge.comfyui.host import ComfyWorkflow

    return loaded(ComfyWorkflow(DynamicPrompt(workflow, {})), [node, 0])


@pytest.mark.usefixtures("host")
def test_power_lora_loader_without_text_encoders() -> None:
    """It loads the denoiser's part alone, whatever the second strength is."""
    inputs = {name: value for name, value in LOADERS["p"]["inputs"].items() if name != "clip"}
    workflow = {**LOADERS, "p": {**LOADERS["p"], "inputs": inputs}}
    assert way(workflow, "p") == ([("a0.safetensors", 0.8, 0.0)], ["CheckpointLoaderSimple"], "")


@pytest.mark.usefixtures("host")
def test_name_of_a_model_is_no_link() -> None:
    """Loaders of models call their file `model` too, and its name may begin with the number of a node."""
    unrelated, last = (
        {**LOADERS["m"], "inputs": {**LOADERS["m"]["inputs"], "model": [link, 0]}} for link in ("c", "w")
    )
    workflow = {
        **LOADERS,
        "7": unrelated,
        "w": {"class_type": "ModelLoader", "inputs": {"model": "720p.gguf"}},
        "m": last,
    }
    assert way(workflow, "m") == ([("a1.safetensors", 0.5, 0.0)], ["ModelLoader"], "")


def lora_loader(model: Any) -> dict[str, Any]:
    """ComfyUI's own loader of LoRAs."""
    return {"class_type": "LoraLoaderModelOnly", "inputs": {
        "model": model, "lora_name": "a1.safetensors", "strength_model": 0.5,
    }}  # fmt: skip


def other(kind: str, **inputs: Any) -> dict[str, Any]:
    """A node of ComfyUI or of another pack."""
    return {"class_type": kind, "inputs": inputs}


PASSING = {
    "reroute": other("Reroute", **{"": ["p", 0]}),
    "patch": other("Patch of a pack", unet=["p", 0], latent=["l", 0]),
    "switch on": other("ComfySwitchNode", switch=True, on_true=["p", 0], on_false=["c", 0]),
    "switch off": other("ComfySwitchNode", switch=False, on_true=["c", 0], on_false=["p", 0]),
    "first": other("Any Switch (rgthree)", any_02=["c", 0], any_01=["p", 0]),
}
"""Nodes that pass the model of Power Lora Loader through, by inputs of other names than `model`."""


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("name", [*PASSING])
def test_way_goes_on_through_what_passes_a_model(name: str) -> None:
    workflow = {**LOADERS, "l": other("Latent"), "x": PASSING[name], "m": lora_loader(["x", 0])}
    passed = [PASSING[name]["class_type"], "CheckpointLoaderSimple"]
    both = [("a0.safetensors", 0.8, 0.4), ("a1.safetensors", 0.5, 0.0)]
    assert way(workflow, "m") == (both, passed, "")


STOPPING = {
    "ModelMergeSimple takes several models (model1, model2)": other(
        "ModelMergeSimple", model1=["p", 0], model2=["c", 0]
    ),
    "ComfySwitchNode takes several models": other(
        "ComfySwitchNode", switch=["b", 0], on_true=["p", 0], on_false=["c", 0]
    ),
    "node 99 is not in the workflow": other("Reroute", **{"": ["99", 0]}),
}  # fmt: skip
"""What is said → a node at which the way ends although something is before it."""


@pytest.mark.parametrize("said", [*STOPPING])
def test_report_says_where_the_way_ends(said: str, host: Host) -> None:
    workflow = {**LOADERS, "x": STOPPING[said], "m": lora_loader(["x", 0]), "1": node("Stack", model=["m", 0])}
    result = host.post(workflow)["1"]
    assert [a["path"] for a in result.values[0]] == [str(host.models / "loras/a1.safetensors")]
    assert f"the way ends: {said}" in result.values[1]
    with pytest.raises(ValueError, match=r"no LoRA is loaded .*" + re.escape(said)):
        host.post({**workflow, "1": node("Stack", model=["x", 0])})


def test_nodes_of_a_loop_are_read(host: Host) -> None:
    """Loops make copies of nodes while they run; the workflow that was posted does not have them."""
    made = {"7.0.m": lora_loader(["p", 0]), "7.0.1": node("Stack", model=["7.0.m", 0])}
    posted = host.post(LOADERS, made)
    assert [Path(a["path"]).name for a in posted["7.0.1"].values[0]] == ["a0.safetensors", "a1.safetensors"]


@pytest.mark.skipif(sys.platform == "win32", reason="links need a right there")
def test_link_that_leads_nowhere_does_not_make_a_stack_run_again(host: Host) -> None:
    (host.models / "loras/gone.safetensors").symlink_to(host.models / "nowhere.safetensors")
    workflow = {**LOADERS, "1": node("Stack", model=["m", 0])}
    host.post(workflow)
    host.post(workflow)
    assert host.runs == []


def test_picture_that_cannot_be_drawn_is_left_out(host: Host) -> None:
    """The file is there by then."""
    (host.models / "temp").write_text("no folder")
    output = host.post(bake())["3"]
    assert Path(output.values[0]).exists() and "images" not in output.ui and output.ui["text"] == (output.values[1],)


@pytest.mark.parametrize(
    ("model", "what"),
    [("c", r"no LoRA is loaded .*CheckpointLoaderSimple"), ("x", "type it into Power Lora Loader"), ("", "nothing is")],
)
def test_workflow_without_loras_is_an_error(host: Host, model: str, what: str) -> None:
    row = {"on": True, "lora": "a0.safetensors", "strength": ["f", 0]}
    linked = {"class_type": "Power Lora Loader (rgthree)", "inputs": {"model": ["c", 0], "lora_1": row}}
    inputs = {"model": [model, 0]} if model else {}
    with pytest.raises(ValueError, match=what):
        host.post({**LOADERS, "x": linked, "1": node("Stack", **inputs)})


def test_report_has_a_picture_of_its_lines_and_blocks(host: Host) -> None:
    """ComfyUI's page shows texts in no node of other packs."""
    image = pytest.importorskip("PIL.Image")

    def drawn(shown: dict[str, Any]) -> Any:
        (entry,) = shown["images"]
        assert entry["type"] == "temp" and not entry["subfolder"]
        with image.open(host.models / "temp" / entry["filename"]) as file:
            return file.copy()

    shown = host.post(bake())["3"].ui
    assert "5 of 14 tensors" in shown["text"][0] and "\nverified" in shown["text"][0]
    baked = drawn(shown)
    assert baked.height > 160 and (0x5B, 0x8D, 0xEF) in {color for _, color in baked.getcolors(1 << 16)}, "bars"
    assert drawn(host.post({"1": node("Inspect", adapter="a0.safetensors", base=BASE)})["1"].ui).height > 200
    assert "images" not in host.post({"1": lora("a0.safetensors")})["1"].ui


def test_picture_of_many_lines_and_blocks() -> None:
    pytest.importorskip("PIL")
    from lora_merge.comfyui.picture import MOST, picture

    assert 3 < picture("output  a\nnote    " + "long " * 60, {}).height // 20 < 8, "a long value has more lines"
    few, many = (picture("x", {f"model L{n}": {"ratio": n / 7} for n in range(count)}) for count in (3, 3 * MOST))
    assert few.width == many.width and few.height < many.height < 2000
    assert picture("\n".join("x" * 500), {}).height < 2000
    for numbers in ({"norm": 0.0}, {"ratio": None}, {"ratio": float("nan")}, {"elements": 3}):
        assert picture("x", {"BASE": numbers}).height


def test_text_encoders_of_a_lora_are_left_out_if_asked_for(host: Host) -> None:
    """For a diffusion model alone, which has none."""
    save(
        {k: v for k, v in sd1_sample().items() if k.startswith("model.")},
        host.models / "diffusion_models/unet.safetensors",
    )
    refused, left_out = (
        {**bake(base="diffusion_models/unet.safetensors", unmatched=way), "2": lora("a1.safetensors", 0.5)}
        for way in ("error", "skip")
    )
    with pytest.raises(lora_merge.MergeError, match="text encoder"):
        host.post(refused)
    assert "4 of 4 merged tensors" in host.post(left_out)["3"].values[1]


@pytest.mark.parametrize("name", ["../out", "/tmp/out", "", " ", "a/../../out"])
def test_name_outside_of_the_model_folders(host: Host, name: str) -> None:
    with pytest.raises(ValueError, match="not inside"):
        host.post(bake(name=name))
    assert len([*host.models.rglob("*.safetensors")]) == 3


def test_files_of_all_folders_are_offered(host: Host, tmp_path: Path) -> None:
    import folder_paths

    more = tmp_path / "more"
    (more / "sub").mkdir(parents=True)
    save(kohya(sd1_sample(), seed=3), more / "sub" / "b.safetensors")
    (more / "notes.txt").write_text("no weights")
    (host.models / "diffusion_models" / "flux.gguf").write_bytes(b"")
    folder_paths.roots["loras"].append(str(more))
    inputs = {i.id: i for name in ("LoRA", "Bake") for i in host.nodes[f"LoraMerge{name}"].define_schema().inputs}
    assert inputs["adapter"].options == ["a0.safetensors", "a1.safetensors", "sub/b.safetensors"]
    assert inputs["base"].options == [BASE, "diffusion_models/flux.gguf"]
    assert host.post({"1": lora("sub/b.safetensors")})["1"].values[0][0]["path"] == str(more / "sub/b.safetensors")


def test_error_is_that_of_the_merge_and_nothing_is_written(host: Host) -> None:
    (host.models / "loras/a1.safetensors").write_bytes(b"<html>")
    with pytest.raises(lora_merge.MergeError) as caught:
        host.post(bake())
    assert "a1.safetensors" in str(caught.value)
    assert not (host.models / "checkpoints/out").exists()


@pytest.mark.release
def test_installed_pack_loads_by_itself(tmp_path: Path) -> None:
    """ComfyUI's Python has no lora_merge: the pack has its own."""
    (tmp_path / "ComfyUI/custom_nodes").mkdir(parents=True)
    assert run("comfyui", "install", tmp_path / "ComfyUI").code == 0
    folder = tmp_path / "ComfyUI/custom_nodes/lora-merge"
    program = f"""
import asyncio, importlib.util, sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in str(f).lower()]
sys.path[:] = [{str(HOST)!r}, *(p for p in sys.path if "site-packages" in p or "python3" in p)]
spec = importlib.util.spec_from_file_location("pack", {str(folder / "__init__.py")!r})
module = importlib.util.module_from_spec(spec); sys.modules["pack"] = module; spec.loader.exec_module(module)
pack = asyncio.run(module.comfy_entrypoint())
print(len(asyncio.run(pack.get_node_list())))
import lora_merge, lora_merge.algorithms
print(lora_merge.__file__); print(lora_merge.algorithms.__file__); print("torch" in sys.modules, "typer" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path)
    count, package, formulas, imported = done.stdout.splitlines() or [done.stderr] * 4
    assert int(count) == 10 and package.startswith(str(folder)) and formulas.startswith(str(folder))
    assert imported == "False False"


def test_pack_is_ready_for_the_registry(tmp_path: Path) -> None:
    assert run("comfyui", "export", tmp_path).code == 0
    tomllib = pytest.importorskip("tomllib")
    folder = tmp_path / "lora-merge"
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["name"] == "lora-merge" and project["project"]["version"] == lora_merge.__version__
    assert not any(line.startswith("torch") for line in project["project"]["dependencies"])
    assert set(project["tool"]["comfy"]) == {"PublisherId", "DisplayName", "Icon", "requires-comfyui"}
    assert (folder / "LICENSE").read_bytes() == Path("LICENSE").read_bytes()
    assert not [*folder.rglob("__pycache__")]
    source = "".join(p.read_text(encoding="utf-8") for p in (folder / "package/lora_merge/comfyui").glob("*.py"))
    assert not {"eval(", "exec(", "subprocess", "pip"} & set(source.split())


def test_install_refuses_other_folders_and_keeps_what_is_there(tmp_path: Path) -> None:
    refused = run("comfyui", "install", tmp_path)
    assert refused.code == 3 and "no ComfyUI" in refused.err
    pack_folder = tmp_path / "custom_nodes/lora-merge"
    pack_folder.mkdir(parents=True)
    (pack_folder / "mine.txt").write_text("mine")
    assert run("comfyui", "install", tmp_path).code == 2
    assert run("comfyui", "install", tmp_path, "--overwrite").code == 2
    assert [p.name for p in pack_folder.iterdir()] == ["mine.txt"]
    (pack_folder / "mine.txt").unlink()
    pack_folder.rmdir()
    for more in ((), ("--overwrite",)):
        assert run("comfyui", "install", tmp_path, *more).code == 0
    assert [p.name for p in (tmp_path / "custom_nodes").iterdir()] == ["lora-merge"]
    assert pack.custom_nodes(tmp_path / "custom_nodes") == tmp_path / "custom_nodes"


def test_page_of_the_documentation_has_every_node(host: Host) -> None:
    page = (Path(__file__).parents[2] / "configs/site/pages/comfyui.md").read_text(encoding="utf-8")
    assert {node.define_schema().display_name for node in host.nodes.values()} == {
        *re.findall(r"^\| ([A-Z]\S* .*?) \|", page, re.MULTILINE)
    }

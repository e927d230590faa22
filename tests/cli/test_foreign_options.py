"""Lines of other programs, and strengths at the wrong place: each is answered with one whole line, which is accepted."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from lora_merge.cli.corrected_line import PLACES
from tests.kit.adapters import kohya
from tests.kit.command_line import run
from tests.kit.files import save
from tests.kit.models import sd1_sample
from tests.kit.tensors import rand

LINE = re.compile(r"lora-merge (?!help)(.*?)(?=; (?:or|then|see) |$)")
"""A command in a fix, which is the last part of it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("foreign")
    base = sd1_sample()
    save(base, path / "base.safetensors")
    save({k: v + rand(*v.shape) if "attn1" in k else v for k, v in base.items()}, path / "tuned.safetensors")
    for seed, name in enumerate(("one", "two", "three")):
        save(kohya(base, seed=seed), path / f"{name}.safetensors")
    save({k: v for k, v in kohya(base).items() if "alpha" not in k}, path / "bare.safetensors")
    denoiser = {k: v for k, v in base.items() if "cond_stage" not in k}
    save(denoiser, path / "denoiser.safetensors")
    fields = {
        "base_model": "./base.safetensors",
        "adapter": "lora",
        "lora_model_dir": "./one.safetensors",
        "learning_rate": 1e-4,
        "output_dir": "./out",
    }
    (path / "axolotl.yml").write_text("\n".join(f"{name}: {value}" for name, value in fields.items()))
    nodes = [
        ("CheckpointLoaderSimple", 0, ["base"]),
        ("LoraLoader", 0, ["one", 0.8, 0.5]),
        ("LoraLoader", 4, ["two", 1, 1]),
    ]
    workflow = {"nodes": [{"type": kind, "mode": mode, "widgets_values": values} for kind, mode, values in nodes]}
    (path / "workflow.json").write_text(json.dumps(workflow))
    script = (
        "p = P.from_single_file('base')\np.load_lora_weights('one', adapter_name='a')\np.set_adapters(['a'], [0.8])\n"
    )
    (path / "fuse.py").write_text(f"{script}p.save_pretrained('x')")
    (path / "toolkit.yaml").write_text("job: mod\nconfig:\n  name: x\n")
    of_adapters = "base_model: base\nmodels:\n- model: base+one\n  parameters: {weight: 0.5}\ndtype: bfloat16"
    (path / "adapters.yml").write_text(f"merge_method: linear\n{of_adapters}")
    (path / "mergekit.yml").write_text("merge_method: ties\nmodels: []\n")
    save(kohya(denoiser), path / "flat.safetensors")
    return path


LINES = {
    # sd-scripts, LyCORIS
    "--sd_model base --models one --ratios 0.7 --save_to x --save_precision bf16 --precision fp32": "base one:0.7 -o x --dtype bf16 --compute-dtype fp32",
    "--sd_model base --models one two --ratios 0.7:0.3 --save_to x --precision float": "base one:0.7 two:0.3 -o x --dtype fp32",
    "--sd_model base --models one --ratios 0.7 --concat --shuffle --v2": "base one:0.7",
    "--models one two --ratios 0.8 0.5 --save_to x": "combine one:0.8 two:0.5 -o x",
    "networks/merge_lora.py --sd_model base --models one --ratios 0.8 --save_to x": "base one:0.8 -o x",
    "python svd_merge_lora.py --models one two --ratios 0.7 0.3 --new_rank 4 --new_conv_rank 2 --save_to x": "combine one:0.7 two:0.3 -o x --rank 4 --conv-rank 2",
    "resize_lora --model one --new_rank 2 --save_to x --dynamic_method sv_ratio --dynamic_param 20": "resize one -o x --rank ratio:20 --max-rank 2",
    "extract_lora_from_models --model_org base --model_tuned tuned --dim 2 --save_to x --clamp_quantile 0.99": "extract base tuned -o x --rank 2",
    "extract --model_tuned tuned --model_org base --linear_dim 2": "extract base tuned --rank 2",
    "base one --save_precision float --no_metadata --metadata_title T": "base one --dtype fp32 --no-metadata --title T",
    "base --network_weights one --network_mul 0.7": "base one:0.7",
    # Values of switches, strengths of parts, cameled names.
    "base one --overwrite true -o x": "base one -o x --overwrite",
    "base one --verify false": "base one --no-verify",
    "base one --no_verify=true -v 2": "base one --no-verify -v",
    "base one --loraWeight 0.5 --savePrecision bf16": "base one:0.5 --dtype bf16",
    "base one --strength 0.7 --text-encoder-strength 0.3": "base one:1,unet=0.7,te=0.3",
    "base one:0.6 --te 0": "base one:1,unet=0.6,te=0",
    "-m base --lora one --lora-scaled two 0.3 -o x": "base one two:0.3 -o x",
    # supermerger, ComfyUI, stable-diffusion.cpp
    "base one --alpha 0.6 --lbw te=0": "base one:0.6 --strength-for te=0",
    "base one --block-weights te=0": "base one --strength-for te=0",
    "base --lora one 0.7 --lora two 0.3": "base one:0.7 two:0.3",
    "--ckpt_name base --lora_name one --strength_model 0.8 --strength_clip 0.5 --filename_prefix x": "base one -o x --strength-for unet=0.8 --strength-for te=0.5",
    "--unet_name base --lora_name one --weight_dtype fp8_e4m3fn": "base one --dtype fp8_e4m3fn",
    # PEFT, LLaMA-Factory, Axolotl, Unsloth, FastChat
    "--base_model_name_or_path base --peft_model_path one --output_dir x --device cpu --push_to_hub": "base one -o x --device cpu",
    "--model_name_or_path base --adapter_name_or_path one --export_dir x --template llama3 --finetuning_type lora": "base one -o x",
    "export --model_name_or_path base --adapter_name_or_path one --export_dir x --export_size 2": "base one -o x",
    "merge-lora --base_model base --lora_model_dir one --output_dir x --load_in_8bit false --fp16 true": "base one -o x --dtype fp16",
    "--model_name base --adapter_path one --save_method merged_16bit --save_directory x": "base one -o x --dtype bf16",
    "--base-model-path base --target-model-path x --lora-path one": "base one -o x",
    "combine one two --combination_type linear --weights 0.5,0.4 --adapter_name both": "combine one:0.5 two:0.4 --method sum",
    "combine one two --combination_type magnitude_prune --density 0.5 --weights [1,0] --svd_rank 2": "combine one:1 two:0 --method prune --density 0.5 --rank 2",
    # mergekit, llama.cpp, diffusers, sd-mecha
    "mergekit-extract-lora --model tuned --base-model base --out-path x --max-rank 2 --lazy-unpickle": "extract base tuned -o x --max-rank 2",
    "base one two --merge-method ties --out-dir x": "base one two -o x --method ties",
    "-m base --lora-scaled one 0.5 -o x": "base one:0.5 -o x",
    "--base_model_path base --checkpoint_path one --dump_path x --alpha 0.75": "base one:0.75 -o x",
    "--model base --lora one --merge_dtype fp64 --output_dtype bf16 --threads 8 --output x": "base one --output x --compute-dtype fp64 --dtype bf16",
    # musubi-tuner, and words of no known program: by the words of the name, and by the value
    "--dit base --lora_weight one --lora_multiplier 0.6 --save_merged_model x": "base one:0.6 -o x",
    "--base_model base --lora_weights one --lora_weights_scale 0.5 --output_path x": "base one:0.5 -o x",
    "--transformer base --my_lora_file one --lora_scaling_factor 0.7 --result_to x": "base one:0.7 -o x",
    "--unet base --lora_1 one --lora_1_coef 0.4 --lora_2 two --lora_2_coef 0.3": "base one:0.4 two:0.3",
    "extract --base base --finetuned tuned --r 2 --output x": "extract base tuned --output x --rank 2",
    "extract --model_a base --model_b tuned --rank 2": "extract base tuned --rank 2",
    "resize --input_lora one --output_lora x --target_dim 2": "resize one -o x --rank 2",
    "base one --fp16 --and_this two": "base one two --dtype fp16",
    "--flux_model base --clip_l tuned --t5xxl tuned --models one --ratios 0.8 --save_to x": "base one:0.8 -o x",
    "base one x.safetensors --weight 0.7 --is_sdxl": "base one:0.7 -o x.safetensors",
    "extract base tuned x.safetensors --mode fixed --linear_dim 2 --conv_dim 1": "extract base tuned -o x.safetensors --rank 2 --conv-rank 1",
    "convert --src ai-toolkit --dst sd-scripts --src_path one --dst_path x --base base": "convert one -o x --to sd-scripts --base base",
    "convert --input one --output x --target diffusers --base base": "convert one --output x --to diffusers --base base",
    "-m base --lora-scaled one 0.5 -t 4": "base one:0.5", "base one --cfg 7 --steps 20 --shard-size 5GB": "base one",
    "--input_model base --lora_file one --mult 0.5 --o x": "base one:0.5 -o x", "base one --unet_lora_scale 0.5 --lora_dropout 0.1": "base one --strength-for unet=0.5",
    "base one --strength0.5": "base one --strength=0.5", "base <lora:one:0.7> <lora:two:0.3>": "base one.safetensors:0.7 two.safetensors:0.3",
    # Single options
    "base one --model-type sd15": "base one", "base one --low-vram": "base one", "base one --threads 4": "base one",
    "base one --save_precsion fp16 --out x": "base one -o x --dtype fp16",
    "base one --weight 0.5 --clip-skip 2": "base one:0.5", "base one --fp16 --nonsense": "base one --dtype fp16",
    "base one --alpha 16 --lora_alpha 16": "base one", "base bare --alpha 16 --lora_alpha 16": "base bare --setting lora_alpha=16",
    "convert one --output-format diffusers --include unet --base base": "convert one --to diffusers --include unet --base base",
    "resize one --new_rank 0.9": "resize one --rank energy:0.9", "resize one 50%": "resize one --rank energy:0.5",
    "resize one --rank energy:90": "resize one --rank energy:0.9", "combine one two --method tise --rank 2": "combine one two --method ties --rank 2",
    # Strengths
    "base one two --strength 0.5 0.6 -o x": "base one:0.5 two:0.6 -o x", "base one:0.5 two -s 0.6": "base one:0.5 two:0.6",
    "base one 0.8 two": "base one:0.8 two", "base 0.8 one 0.5 two": "base one:0.8 two:0.5", "base one two 0.5 0.6": "base one:0.5 two:0.6",
    "base one,te=0 -s 0.6": "base one:0.6,te=0", "base one two -s 0.5,0.6,0.7": "base one:0.5 two:0.6",
    "base one two three -s 0.5": "base one:0.5 two:0.5 three:0.5", "base one:0.5 two --scale 2": "base one:1 two:2",
    "average one two --ratio 0.7:0.3": "average one two --weights 0.7,0.3", "average one two --weight 0.7 0.3 -o x": "average one two -o x --weights 0.7,0.3",
    "average one two --weights 0.7 0.3": "average one two --weights 0.7,0.3", "average one 0.7 two 0.3": "average one two --weights 0.7,0.3",
    "average one.safetensors:0.7 two.safetensors:0.3": "average one.safetensors two.safetensors --weights 0.7,0.3",
    "base <lora:one:0.8> --save_to x": "base one.safetensors:0.8 -o x", "base one,two -s 0.5 0.6": "base one:0.5 two:0.6",
    "base one@0.8 two --save_to x": "base one.safetensors:0.8 two -o x", "base one:0.8:0.5 --out x": "base one:1,unet=0.8,te=0.5 -o x",
    "base one --lora one:0.5": "base one:0.5", "base one -s -0.5 two 0.6": "base one:-0.5 two:0.6",
    "average one two --weights 0.7:0.3": "average one two --weights 0.7,0.3", "average one two --weights [70%,30%]": "average one two --weights 0.7,0.3",
    "base one two -s 0.7:0.3": "base one:0.7 two:0.3", "base one:0.5,0.6": "base one:1,unet=0.5,te=0.6", "base one:0.5;0.6": "base one:1,unet=0.5,te=0.6",
    "base:0.5 one": "base one:0.5", "base:0.5 one:0.8 two,te=0": "base one:0.8 two:0.5,te=0", "base:0.5 one:0.8": "base one:0.8",
    "resize one --rank 2 3": "resize one --rank 2", "combine one two --rank 2 3 -o x": "combine one two -o x --rank 2",
    # Two values for one option: the last
    "base one:0.5 --lora-weight 0.8 -o x": "base one:0.8 -o x", "base one:0.5 -s 0.6": "base one:0.6",
    "base one --save_to a -o b": "base one -o b", "base one --save_precision fp16 --dtype bf16": "base one --dtype bf16",
    "base one --strength_clip 0 --te-strength 0.5": "base one --strength-for te=0.5",
    "--sd_model base --ckpt tuned --lora one": "tuned one",
    # Strengths of parts of each adapter, in order or right behind it
    "base --lora one --strength_model 0.7 --lora two --strength_model 0.4": "base one:1,unet=0.7 two:1,unet=0.4",
    "base --lora one --strength_clip 0.3 --lora two": "base one:1,te=0.3 two", "base one two --strength_clip 0.3": "base one two --strength-for te=0.3",
    "base one two --strength_model 0.7 0.2 --strength_clip 0.5 0.1": "base one:1,unet=0.7,te=0.5 two:1,unet=0.2,te=0.1",
    "base one two --strength 0.7 0.4 --te 0.3 0.1": "base one:1,unet=0.7,te=0.3 two:1,unet=0.4,te=0.1",
    "--sd_model base --models one two --ratios 0.7 0.3 --lbws 1,0,0 0,1,0": "base one:0.7,lbw=1,0,0 two:0.3,lbw=0,1,0",
    "base one:0.7,te=0.2 --te 0.5": "base one:1,unet=0.7,te=0.5", "base one --no-unet": "base one --strength-for unet=0",
    "base one --te1_strength 0.5 --te2 0.3": "base one --strength-for te1=0.5", "denoiser flat --strength_model 0.7 --strength_clip 0.5": "denoiser flat:0.7",
    # The share of the second of two files; the alpha of an output
    "average --model_a one --model_b two --alpha 0.3": "average one two --weights 0.7,0.3",
    "combine --model_a one --model_b two --alpha 0.3": "combine one:0.7 two:0.3",
    "resize one --new_rank 2 --new_alpha 4": "resize one --rank 2 --alpha 4", "resize bare --new_rank 2 --new_alpha 4": "resize bare --rank 2 --setting lora_alpha=4",
    # Names of programs by their verb, with files in their order
    "lycoris/merge.py base one out --weight 0.7 --is_sdxl": "base one:0.7 -o out", "fuse base one": "base one",
    "python -m mlx_lm.fuse --model base --adapter-path one --save-path x": "base one -o x",
    "axolotl merge-lora config.yml --lora-model-dir=one --base-model base": "base one", "llama-cli -m base --lora one": "base one",
    "script.py --base base --outfile x one": "base one -o x", "one base --fp16": "base one --dtype fp16",
    # Switches of parts, folders and names, outputs by position
    "base one --adapter_weights 0.7 --fuse_unet true --fuse_text_encoder false": "base one:0.7 --strength-for te=0",
    "base one --network_train_unet_only": "base one --strength-for te=0", "denoiser one --strength_model 0.8 --strength_clip 0.6": "denoiser one --strength-for unet=0.8 --strength-for te=0",
    "base one --multiplier 0.7 --output_name foo --output_dir outs": "base one:0.7 -o outs/foo", "resize one s2 2": "resize one -o s2 --rank 2",
    "convert one k --to kohya --base base": "convert one -o k --to kohya --base base", "base one 0.8 out.safetensors": "base one:0.8 -o out.safetensors",
    "extract tuned base ./ext --rank=2 --no-lazy-unpickle": "extract tuned base -o ./ext --rank 2", "convert one --to_diffusers --base base": "convert one --to diffusers --base base",
    "--base_weights one --base_weights_multiplier 0.5 --base base": "base one:0.5", "svd_merge one:0.8 two:0.5 --new_rank 2 -o both": "combine one:0.8 two:0.5 -o both --rank 2",
    "base one two --method dare_ties --drop_rate 0.4": "base one two --method dare_ties --density 0.6", "ema one two": "average one two",
    "base one --output_dtype BFLOAT_16": "base one --dtype bf16", "base one --mixed_precision fp16": "base one --dtype fp16",
    # Configurations of other programs, files joined by a plus, tags with names, block weights by a preset
    "axolotl merge-lora axolotl.yml": "./base.safetensors ./one.safetensors -o ./out/merged", "axolotl.yml": "./base.safetensors ./one.safetensors -o ./out/merged",
    "axolotl merge-lora axolotl.yml --lora-model-dir=two --output-dir x": "./base.safetensors two -o x",
    "base+one -o x": "base one -o x", "base <lora:one:te=0.5:unet=0.8:dyn=64>": "base one.safetensors:1,unet=0.8,te=0.5",
    "base lora_name=one strength_model=0.8": "base one --strength-for unet=0.8",
    "base one --finetuning_type two": "base one", "python -u merge_lora.py --sd_model base --models one": "base one",
    "lora_post_hoc_ema.py one two --beta 0.9 --beta2 0.95": "average one two --ema 0.9 --ema-to 0.95",
    "extract_locon.py base tuned --mode threshold --linear_threshold 0.1": "extract base tuned --rank above:0.1",
    "mergekit-extract-lora tuned.safetensors base.safetensors x --rank=2": "extract base.safetensors tuned.safetensors -o x --rank 2",
    "python convert_lora.py --input one --output x --target other --base base": "convert one --output x --to comfy --base base",
    "extract_locon.py base tuned x.safetensors --mode ratio --linear_ratio 0.5 --conv_quantile 0.75": "extract base tuned -o x.safetensors --rank ratio:2 --conv-rank sum:0.75",
    "lora_post_hoc_ema.py one two --no_sort --output_file x --beta 0.9": "average one two -o x --ema 0.9", "base one -m 0.8": "base one:0.8", "base one two -a 0.5 -b 0.3": "base one:0.5 two:0.3",
    "<lora:one:0.8> base.safetensors": "base.safetensors one.safetensors:0.8", "CUDA_VISIBLE_DEVICES=0 swift export --model base --adapters one": "base one",
    "base one --block-weight unet=0.5,te=0.2": "base one --strength-for unet=0.5 --strength-for te=0.2", "base one --lbw NONE": "base one --strength-for lbw=NONE",
    "denoiser <lora:one:0.8:0.5> -o x": "denoiser one.safetensors:1,unet=0.5,te=0 -o x", "base <lora:flat:0.5:0.7>": "base flat.safetensors:1,unet=0.7",
    "--sd_model denoiser --models one --ratios 0.8": "denoiser one:1,unet=0.8,te=0", "base one --prompt <lora:two:0.5>": "base one two.safetensors:0.5",
    "base one:0.8:NONE two:0.5:ALL": "base one:0.8,lbw=NONE two:0.5,lbw=ALL",
    "base one --stength 0.7 --ouput x": "base one:0.7 --output x", "cp base one out.safetensors": "base one -o out.safetensors",
    # Modules of Python, programs without a name here, a verb after the name of a program
    "mlx_lm.fuse --model base --adapter-path one --save-path x --de-quantize": "base one -o x --dtype bf16", "supermerger base one:0.8 -o x": "base one:0.8 -o x",
    "peft merge --base_model base --adapter one --out x": "base one -o x", "cp -r base one merged/": "base one -o merged/", "merge_adapter base one": "base one",
    "convert_model.py --input-name one --output-model-destination x.safetensors --output-dtype FLOAT_16 --output-model-format LEGACY_SAFETENSORS --base base": "convert one -o x.safetensors --dtype fp16 --to kohya --base base",
    "accelerate launch --num_processes 1 merge_lora.py --sd_model base --models one": "base one", "average one one --beta 0.9": "average one one --ema 0.9",
    "base one --output_dir x --hub_model_id me/x --push_to_hub": "base one -o x", "unmerge --sd_model base --lora one -o x": "unmerge base one -o x",
    "/venv/Scripts/accelerate.EXE launch /sd/merge_lora.py --sd_model base --models one": "base one", "conda run -n sd python merge_lora.py --sd_model base --models one": "base one",
    # Lines of Python, inputs of nodes
    "p.load_lora_weights('one.safetensors');p.fuse_lora(lora_scale=0.7)": "base.safetensors one.safetensors:0.7",
    "p.set_adapters(['one','two'],adapter_weights=[0.7,0.3])": "base.safetensors one:0.7 two:0.3",
    "P.from_pretrained(A.from_pretrained('base'),'one').merge_and_unload().save_pretrained('x')": "base one -o x",
    '{"1":{"inputs":{"ckpt_name":"base"}},"2":{"inputs":{"lora_name":"one","strength_model":0.8,"model":["1",0]}}}': "base one --strength-for unet=0.8",
    "ckpt_name: base lora_name: one strength_model: 0.8": "base one --strength-for unet=0.8", "lora_name=one strength_model=0.8": "base.safetensors one --strength-for unet=0.8",
    'p.load_lora_weights("one",adapter_name="a");p.load_lora_weights("two",adapter_name="b");p.set_adapters(["a","b"],[0.8,0.4]);p.fuse_lora(lora_scale=0.5)': "base.safetensors one:0.4 two:0.2",
    "base p.load_lora_weights('./',weight_name='one') p.fuse_lora(lora_scale=0.5)": "base one:0.5", "python fuse.py": "base one:0.8 -o x",
    'base {"a":{"on":true,"lora":"one","strength":0.8},"b":{"on":false,"lora":"two","strength":1}}': "base one:0.8",
    "workflow.json": "base one --strength-for unet=0.8 --strength-for te=0.5", "merge ckpt_name=base lora_name=one strength_model=0.8 filename_prefix=x": "base one -o x --strength-for unet=0.8",
    "mergekit-yaml adapters.yml x": "base one:0.5 -o x --method sum --dtype bfloat16", "cp --recursive base one merged/": "base one -o merged/",
    "nohup python3 -u merge_lora.py --sd_model base --models one": "base one", "resize one --new_rank 2 --new_alpha 1": "resize one --rank 2 --alpha 1",
    "sd -m base --lora-model-dir . -p <lora:one:0.8> -o x.safetensors": "base one.safetensors:0.8 -o x.safetensors", "base one --save_precision fp8": "base one --dtype fp8_e4m3fn",
    # A line that is refused: the one of its own error
    "combine one two --combination_type ties --density 0.5": "combine one two --method ties --density 0.5 --rank 32", "convert one --input-format kohya --base base": "convert one --base base --to diffusers",
    "m.add_weighted_adapter(['one','two'],[0.7,0.3],combination_type='ties')": "combine one:0.7 two:0.3 --method ties --rank 32", "one two --strength 0.8 0.5 -o x": "combine one:0.8 two:0.5 -o x",
    "merge_lora.py --sd_model bsae --models one": "base.safetensors one",
    # What has no counterpart
    "base one --bogus": "base one", "base one --fp16 --export_legacy_format False --mem_eff_load_save": "base one --dtype fp16",
    "base one --log_file x.log --lora_count 3": "base one", "base one --no-cuda": "base one --device cpu",
    "base one --fp16 --save_every 3 --model_length 512 --lora_targets q_proj": "base one --dtype fp16",
}  # fmt: skip
"""Line as it is typed → the line of the fix."""


@pytest.mark.few(10)
@pytest.mark.parametrize("words", LINES)
def test_line_of_the_fix_is_accepted_as_typed(words: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the last part of the fix, has no placeholder, and does what was meant."""
    monkeypatch.chdir(folder)
    code, _, err = run(*words.split())
    (right,) = LINE.findall(err.splitlines()[-1] if "see lora-merge" not in err else err.partition("; see")[0])
    assert code == 2 and right == LINES[words] and not {*re.findall("[A-Z]\\w+", right)} & {*PLACES}
    typed = shlex.split(right)
    assert run(*typed, "--dry-run")[0] == 0
    assert not [*folder.glob("x*")]


REMARKS = {
    "base one --save_to a -o b": ["--save_to a and -o b contradict each other", "keep one of them"],
    "base one --fp16 --save_precision bf16": ["--fp16 and --save_precision bf16 contradict each other"],
    "base one:0.5 --lora-weight 0.8": ["one has two strengths, 0.5 and 0.8"],
    "base one --clip-skip 2 --template llama3 --out x": ["leave out --clip-skip 2, --template llama3 (not needed here); write"],
    "base one --nonsense x --threads 4": ["--nonsense x (not known here), --threads 4 (all cores are used)"],
    "base one two -s 0.5,0.6,0.7": ["3 strengths for 2 adapters", "leave out 0.7 (every adapter has a strength)"],
    "batch --config j.json --jobs 2": ["write lora-merge batch j.json --workers 2\n"],
    "verify base --model base --lora one:0.8 two:0.5 --tolerance 1": ["--tolerance 1 (not known here)", "write lora-merge verify base --base base --adapter one:0.8 --adapter two:0.5\n"],
    "compare --a base --b tuned": ["write lora-merge compare base tuned\n"],
    "base one --vae tuned": ["leave it out: it is not merged into; write lora-merge base one\n"],
    "base one --fp16 --some 0.5": ["no option --fp16 nor --some here", "--some 0.5 (not known here; a strength is written one:0.5)"],
    "base one --fp16 --other x.safetensors": ["--other x.safetensors (not known here; an output is written -o x.safetensors)"],
    "base one two --fp16 --lbws strong weak": ["for --lbws strong weak, use --strength-for lbw=1,0,0,… with a number for each block; write lora-merge base one two --dtype fp16"],
    "accelerate launch --num_processes 1 train_network.py --pretrained_model base --network_weights one": ["train_network.py trains", "then merge what it writes\n"],
    "python lora_interrogator.py --sd_model base --model one": ["write lora-merge inspect base one\n"],
    "axolotl merge-lora no.yml": ["there is no no.yml here"],
    "convert_lora_to_gguf.py --base base one --outfile x.gguf": ["writes an adapter as GGUF, which lora-merge does not", "lora-merge base one\n"], "convert one --outfile x.gguf --base base": ["no adapter is written as GGUF"],
    "pipe.load_lora_weights('one.safetensors')": ["this is Python", "name the base: lora-merge base.safetensors one.safetensors\n"], "base one --load_in_8bit": ["leave it out: a merge is computed in full precision"],
    "batch axolotl.yml": ["a configuration of another program", "write lora-merge ./base.safetensors ./one.safetensors -o ./out/merged\n"],
    "base one --weight x": ["for --weight x, write the strength after the file name: one:0.8; write lora-merge base one"],
    "base one --only IN04 --out o": ["for --only IN04, use --strength-for, such as --strength-for te=0; write lora-merge base one -o o"],
    "base one --config jobs.yaml": ["for --config jobs.yaml, several merges go into a jobs file: lora-merge batch JOBS.yaml; write lora-merge base one"],
    "base one --exclude_patterns blocks.0 --half": ["for --exclude_patterns blocks.0, use --strength-for", "write lora-merge base one --dtype fp16"],
    "base one --gpu 0,1": ["for --gpu 0,1, use --device cuda; write lora-merge base one"],
    "base one --save_precision nothing": ["for --save_precision nothing, use --dtype fp16, bf16 or fp32; write lora-merge base one"],
    "info one": ["write lora-merge inspect one\n"], "mergekit-yaml mergekit.yml x --cuda": ["a mergekit configuration", "lora-merge extract"],
    "base flat:1,unet=0.5,te=0.3": ["write lora-merge base flat:1,unet=0.5\n"],
    "average one two --weights 2,1": ["add up to 1, these to 3", "write lora-merge average one two --weights 0.666667,0.333333\n"],
    "average one two --weights 70,30": ["add up to 1, these to 100", "write lora-merge average one two --weights 0.7,0.3\n"],
    "denoiser flat --te 0.5": ["leave it out: the base has no text encoder; write lora-merge denoiser flat"],
    "base one --quantization fp8": ["write lora-merge base one --dtype fp8_e4m3fn\n"],
    "base:0.5 one:0.8": ["a base has no strength, so :0.5 is left out: "], "resize one --rank 2 3": ["--rank has two values, 2 and 3", "keep one of them"],
    "base one:0.5,0.6,0.7": ["several strengths", "write one:0.5, or by block one:1,lbw=0.5,0.6,0.7\n"],
    "extract tuned": ["write lora-merge extract tuned base.safetensors; or, if tuned is the model after the training, lora-merge extract base.safetensors tuned"],
    "average base tuned": ["to write the difference of two models as an adapter: lora-merge extract base tuned\n"],
    "average tuned base": ["lora-merge extract tuned base\n"], "base one --rank 2 --lora_alpha 32": ["for --rank 2, use lora-merge resize one --rank 16 first, as a merge keeps the rank; leave out --lora_alpha 32 (the adapter states its alpha); write lora-merge base one"],
    "batch --jobs jobs.yaml --num_workers 2 --dtype bf16 --max_size 4": ["leave out --dtype bf16 (a field of the jobs file), --max_size 4 (not known here); write lora-merge batch jobs.yaml --workers 2\n"],
    "base one:0.7,te2=0.3": ["did you mean te? ", "write lora-merge base one:0.7,te=0.3\n"], "denoiser one --strength-for te=0.8": ["write lora-merge denoiser one --strength-for te=0\n"],
    "-m base --lora-scaled missing 0.8 --lora one": ["write lora-merge base missing:0.8 one; that line has a mistake, too: missing:0.8: file not found"],
    "llama-export-lora -m no.gguf --lora-scaled a.gguf 0.8 -o x.gguf": ["write lora-merge no.gguf a.gguf:0.8 -o x.gguf; that line has a mistake, too"],
    "mlx_lm.fuse": ["mlx_lm.fuse is another program", "name the files: lora-merge base.safetensors bare.safetensors\n"],
    "mlx_lm.lora --model base --train --data d": ["mlx_lm.lora trains"], "axolotl train no.yml": ["axolotl trains"], "wget http://host/x.safetensors": ["wget is a command of the shell"],
    "fuse.py --sd_model http://host/x.safetensors --models one": ["write lora-merge http://host/x.safetensors one\n"], "pip install lora": ["pip is a command of the shell", "pip install lora\n"],
    "llama-quantize base x Q4_K": ["llama-quantize quantises models", "lora-merge base bare.safetensors --dtype q8_0\n"], "mlx_lm.convert --hf-path base": ["converts models, and lora-merge adapters"],
    "m.save_pretrained('x')": ["name the files: lora-merge BASE ADAPTER -o x\n"], "m.eval()": ["name a base and an adapter, or run it in Python"], "base one --hub_model_id x": ["use -o hf://OWNER/NAME"],
    "ModelMergeSimple model1=base model2=tuned": ["merges whole models", "lora-merge extract base.safetensors "], "merge_models.py --models base tuned": ["merge_models.py merges whole models"],
    "run.py toolkit.yaml": ["a configuration of AI-Toolkit"], "cp one x.safetensors": ["cp is a command of the shell"], "base <lora:one:0.8:dyn=16>": ["leave out dyn=16", "write lora-merge base one.safetensors:0.8\n"],
    "base one --upload-repo me/x": ["write lora-merge base one -o hf://me/x\n"], "base one --export-gguf": ["convert_hf_to_gguf.py of llama.cpp"],
    "merge_lora.py --models one --ratios 0.8 --save_to base": ["merge_lora.py is another program", "name the base: lora-merge base one:0.8 -o base"],
    "base one two --ratio 0.8": ["give one for each adapter, such as lora-merge base one:0.8 two:0.8"],
}  # fmt: skip
"""Line as it is typed → what its error says."""


@pytest.mark.few(10)
@pytest.mark.parametrize("words", REMARKS)
def test_what_is_dropped_is_named(words: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    code, _, err = run(*words.split())
    assert code in (2, 3) and all(part in err for part in REMARKS[words]), err


@pytest.mark.parametrize("words", [
    "one --base", "convert --input one --target strange", "base --vae tuned", "batch jobs.json --rank 16", "replay base --base one -o x",
    "resize one two --new_rank 2", "combine --models one two --model_tuned base", "unmerge base --base base", "base one --weight 1,0,0,1,1,0 --fp16",
])  # fmt: skip
def test_line_that_is_not_clear_is_not_written(words: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    code, _, err = run(*words.split())
    assert code == 2 and "write lora-merge" not in err, err


@pytest.mark.few(6)
def test_help_after_any_word(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for words in (
        ["combine", "-h"],
        ["combine", "one", "-h"],
        ["base", "one", "--help"],
        ["inspect", "one", "-h"],
        ["-h"],
    ):
        code, out, err = run(*words)
        assert code == 0 and "Usage:" in out and not err, words


@pytest.mark.parametrize("words", [
    "base one:0.5 two:0.6", "base one two -s 0.5,0.6", "base one two -s [0.5,0.6]", "base one two -s -0.5 -s 0.6", "base one --scale 1",
    "combine one two --scale 0.5", "combine one one -s 0.5 -s 0.5", "combine one two:0.5 --rank 2", "average one two --weights 0.7,0.3", "base one,te=0 two:0.5,te=0.5",
    "base one --strength-for te=0 --strength-for unet=0.5", "base one two three --method ties --scale 0.5", "resize one:0.5 --rank 2",
])  # fmt: skip
def test_lines_of_ours_are_no_mistakes(words: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert run(*words.split(), "--dry-run")[0] == 0


def test_folder_for_each_component_has_a_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    lines = LINE.findall(run("convert", "one", "--to", "peft", "--base", "base", "-o", "y")[2].splitlines()[-1])
    assert lines == [f"convert one --to peft --base base --include {part} -o y-{part}" for part in ("te", "unet")]
    assert all(run(*right.split(), "--dry-run")[0] == 0 for right in lines)


def test_rank_above_that_of_the_adapter_is_noted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    code, out, err = run("resize", "one", "--rank", 90, "--dry-run")
    assert code == 0 and "--rank 90 leaves the ranks as they are" in out + err
    code, out, err = run("resize", "one", "--rank", 1, "--dry-run")
    assert code == 0 and "leaves the ranks" not in out + err

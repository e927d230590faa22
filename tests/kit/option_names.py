"""Options of other programs: names that the table of patterns (cli/foreign_names.py) must know, each its meaning."""

from typing import Final

from lora_merge.cli.foreign_names import Foreign, meaning_of

NAMES: Final = """
concat shuffle trust-remote-code copy-tokenizer lazy-unpickle allow-crimes safe-serialization merge-and-unload
use-safetensors template finetuning-type task-type clip-skip max-seq-length safe-merge safe-fusing fuse-unet
fuse-text-encoder load-precision push-to-hub hub-model-id export-hub-model-id from v2 is-v2 v-parameterization sdxl
is-sdxl flux model-arch arch architecture no-overwrite device-map export-device max-shard-size out-shard-size
export-size low-vram lowvram low-memory low-cpu-memory low-cpu-mem-usage cpu-offload threads num-threads n-threads
num-workers config parallel jobs -j cpu cuda gpu use-gpu skip-verify no-check no-verification silent no-progress plan
simulate -n force yes exist-ok -f -y metadata-title majority-sign-method format to output-format target-format
combination-type merge-method merge-type lora-alpha network-alpha dynamic-param dynamic-method conv-dim new-conv-rank
rank new-rank dim lora-rank lora-r lora-dim network-dim network-rank target-rank svd-rank linear-dim -r load-in-8bit
load-in-4bit fp8 fp32 float32 bf16 bfloat16 fp16 float16 half compute-precision calc-precision calc-dtype
merge-precision merge-dtype working-dtype quant quantize quantization export-quantization qtype save-method precision
save-precision save-dtype save-type out-precision out-dtype output-precision output-dtype output-type torch-precision
torch-dtype torch-type export-precision export-dtype weight-precision weight-dtype type outtype lbw lbws block-weights
lora-block-weight no-te no-text-encoder unet-only only exclude ignore unet-strength unet-ratio unet-weight unet-scale
unet-multiplier unet-mul model-strength model-ratio model-weight model-scale model-multiplier model-mul strength-model
te-strength te-ratio te-weight te-scale te-multiplier te-mul text-encoder-strength text-encoder-ratio
text-encoder-weight text-encoder-scale text-encoder-multiplier text-encoder-mul clip-strength clip-ratio clip-weight
clip-scale clip-multiplier clip-mul strength-clip alpha ratio ratios weight weights multiplier multipliers strengths
-w lora-scaled lora-strength lora-ratio lora-weight lora-scale lora-multiplier lora-mul lora-strengths lora-ratios
lora-weights lora-scales lora-multipliers adapter-strength adapter-ratio adapter-weight adapter-scale
adapter-multiplier adapter-mul adapter-strengths adapter-ratios adapter-weights adapter-scales adapter-multipliers
network-strength network-ratio network-weight network-scale network-multiplier network-mul network-strengths
network-ratios network-weights network-scales network-multipliers save-to save-as save-path save-dir save-file
save-name save-folder save-directory save-model output-to output-as output-path output-dir output-file output-name
output-folder output-directory output-model out-to out-as out-folder out-directory out-model export-to export-as
export-folder export-directory export-model dump-to dump-as dump-path dump-dir dump-file dump-name dump-folder
dump-directory dump-model out outfile outdir export dest dst destination name target-model-path merged-model-path
filename-prefix lora loras lora-model lora-adapter adapter adapters adapter-model peft peft-model models lora-paths
lora-names model-tuned tuned tuned-model finetuned-model fine-tuned-model trained-model model-org original-model model
ckpt checkpoint unet-name input source -m base base-model sd-model pretrained pretrained-model
dit finetuned lora-weights-scale save-merged-model r
"""

FOREIGN_OPTIONS: Final[dict[str, Foreign | None]] = {
    name: meaning_of(name) for word in NAMES.split() for name in [word if word.startswith("-") else f"--{word}"]
}
"""Option → its meaning; None where the table has none."""

"""The weights that an output quantises, and their form: `--dtype fp8_scaled`, `nf4`, `q4_0` and the like.

Only matrices of linear layers are quantised. Norms, embeddings (of times and positions too), the first and last layers
and modulation keep their values: they are few, and errors there spread over the whole model. Text encoders and
VAE of a file with a diffusion model keep theirs too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

from ..dtypes import FLOATS, GGUF_TYPES, QUANTISED_DTYPES, StoredTensor
from ..errors import UsageError
from ..files.checkpoint import Index
from ..files.formats.base import NewWeight
from ..files.formats.output import FILE_FORMATS, FOLDER_FORMATS, OutputFormat
from ..files.gguf.diffusion import diffusion_file, new_blocks
from ..files.gguf.types import GGML_TYPES
from ..files.gguf.view import as_blocks
from ..files.side_files import stored_name
from ..job import Job
from ..models.fused_weights import together
from ..models.names import Names
from ..models.parts import Parts
from ..options import NO_DEFAULTS
from ..text import listed

QUANTISED_COMPONENTS: Final = frozenset(("unet", "transformer", "transformer_2", "prior", "decoder"))
"""Components that are quantised; of a checkpoint without them, all but the VAE."""

PRECISE: Final = (  # compiled on first use, which takes as long as a header
    "(?i)"
    r"norm|embed|(^|[._])embs?(_|\.|$)|emb_layers|relative_attention_bias|"  # scales, times, positions, words
    r"modulation|adaln|(^|[._])modf?\.|_mod(_|\.)|(^|\.)t_block\.|"
    r"(^|\.)((?!patch_blocks)\w*patch\w*|(?!(proj|linear|ff)_in\.)\w+_in|proj_in_(?!gate)\w+|input_proj|input_layer)\.|"
    r"(^|\.)(time_\w+|pos_\w+|wte|wpe|shared|vae2llm)\.|"
    r"(^|\.)(cap\w*_\w+|\w*caption_projection|(text|llm_cond|lyric|timestep|global|cross_attention|t5_y|encoder_hid|audio)_?proj)\.|"
    r"(^|\.)(\w+_projector|clip_\w+_mapper|(text|visual|modality)_projection|cond_seq_linear)\.|"  # texts, images
    r"(^|\.)(mlp_t5|pooler|state_proj|action_(in|out)_proj|action_time_mlp_out|(state|action)_(encoder|decoder))\.|"
    r"(^|\.)(future_tokens|soft_prompt_hub|(vlm|aux_visual|context_[kv])_proj|proj_out_[12]|(eagle_model|backbone\.model)\.mlp1)\.|"
    r"(^|\.)(\w+_scale_shift|av_\w+_gate|distilled_guidance_layer)\.|"  # modulation
    r"(^|\.)(\w*final_layer2?|final_(linear|proj)|last_layer|conv_out|out|output|norm_out)\.|"  # last layers
    r"(^|\.)(audio_proj_out|vid_out|llm2vae)\.|"
    r"(img2shape|shape2txt)\w*\.out_layer\.|(^|\.)face_encoder\.|"
    r"(^|\.)(lm_head|head|score|classifier)\.|"
    r"^(model\.diffusion_model\.|diffusion_model\.|net\.)?"
    r"((diffusion_transformer\.)?(transformer\.)?proj(ect)?_(in|out)|out_layer\.out_layer)\.|"
    r"(^|\.)(router|gate|shared_expert_gate|ffn_gate_inp)\.|"  # of experts
    r"(^|\.)(visual|vision_tower|vision_model|vision_backbone|multi_modal_projector|audio_tower|merger)\."
)
"""Names of weights that keep their values."""

INNER_LAYERS: Final = re.compile(r"(attn\w*|attention|to_out|layer\.\d+)\.(out|output)\.", re.IGNORECASE)
"""Names of layers inside blocks that are called like a last layer."""

TOP: Final = "."
"""The output folder itself, as its sub-folders are named."""

LEAST_SIDE: Final = 32  # rows or columns of a matrix that is quantised; smaller ones save next to nothing
UNIT: Final = 16  # the columns and the elements of a matrix that is quantised are multiples of it
BITSANDBYTES: Final = ("nf4", "int8")
"""Formats of folders that diffusers reads too."""

NO_CONVERSION: Final = frozenset(("gpt2", "gpt_bigcode", "imagegpt", "openai-gpt", "decision_transformer"))
"""Values of `model_type` whose layers are transposed (Conv1D); loaders of quantised folders read them as linear."""

KEEP_PRECISION: Final = "--keep-precision"
NOT_QUANTISED: Final = "a part without effect: no weight that would be quantised is in it"


@dataclass(frozen=True)
class Quantising:
    """The weights that an output quantises, and their form."""

    forms: Mapping[str, NewWeight]  # weight → its new form
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Folder, relative to the output → the section of its config.json that says how its weights are quantised."""


NO_QUANTISING: Final = Quantising({})


def quantising(job: Job, base: Index, names: Names) -> Quantising:
    """Return which weights the output stores as codes, and how; UsageError if no loader would read the output."""
    if job.dtype not in QUANTISED_DTYPES:
        if job.keep_precision:
            fix = f"leave it out, or write `--dtype {QUANTISED_DTYPES[0]}` or another that quantises"
            raise UsageError("nothing is quantised", f"`--keep-precision {job.keep_precision[0]}`", fix)
        return NO_QUANTISING
    form = _form(job, base)
    excepted = Parts(KEEP_PRECISION, (text for text in job.keep_precision if text != NO_DEFAULTS), names)
    forms = _forms(job, base, names, form, Parts(KEEP_PRECISION, (), names))
    if forms and excepted.texts:
        excepted.check({key: names.component(key) for key in forms}, NOT_QUANTISED)
        forms = _forms(job, base, names, form, excepted)
    if not forms:
        raise _nothing_to_quantise(job, base, names, form)
    return Quantising(forms, dict(_sections(base, forms, form)))


def _forms(job: Job, base: Index, names: Names, form: OutputFormat, excepted: Parts) -> Mapping[str, NewWeight]:
    """Return the weights that are quantised, in their new form. `excepted`: the parts that keep their values."""
    precise_name = _precise(job, base)
    forms: dict[str, NewWeight] = {}
    for key, part in _quantisable(base, names):
        if precise_name(key) or excepted.cover([key], part):
            continue
        if (new := _coded(base, form, base.tensors[key])) is not None:
            forms[key] = new
    if form.section is not None:
        forms = _as_loaders_read(base, _as_servers_read(base, forms), form, names, excepted)
    return forms


def _nothing_to_quantise(job: Job, base: Index, names: Names, form: OutputFormat) -> UsageError:
    """Return the error for a base of which no weight is quantised, with the reason."""
    fix, precise_name = "write `--dtype keep`", _precise(job, base)
    every = {key: base.tensors[key] for key, _ in _quantisable(base, names)}
    large = [info for key, info in every.items() if not precise_name(key)]
    if any(_coded(base, form, info) for info in every.values()):
        why = "its weights keep their precision, by their names or by --keep-precision"
        fix = "write `--dtype keep`, or change --keep-precision"
    elif not large:
        why = f"no matrix inside its blocks has {LEAST_SIDE} rows and columns or more, in multiples of {UNIT}"
    elif job.dtype in GGUF_TYPES:
        rows = listed(map(str, sorted({info.shape[-1] for info in large})), 3)
        why = f"rows of {rows} values do not fill blocks of {GGML_TYPES[job.dtype.upper()].unit[0]}"
        of_bits = sorted(GGUF_TYPES, key=lambda name: name[:2] != job.dtype[:2])  # q4_0 for q4_k
        smaller = next((name for name in of_bits if any(map(_blocks_of(base, name.upper()), large))), None)
        fix = f"write `--dtype {smaller}`" if smaller else fix
    else:
        why = "no weight has a shape, and names for its scales, that the format takes"
    return UsageError("the base has no weight to quantise", f"{base.path}: `--dtype {job.dtype}`: {why}", fix)


def _coded(base: Index, form: OutputFormat, info: StoredTensor) -> NewWeight | None:
    """Return the new form of a weight; None if the format or its names have no room for it."""
    new = form.make(info)
    taken = new is None or any(t.name in base.tensors and t.name not in base.packing_names for t in new.others)
    return None if taken else new


def _matrices(base: Index) -> Mapping[str, Mapping[str, StoredTensor]]:
    """Return folder → name of a module in it → its weight, for all matrices."""
    by_folder: dict[str, dict[str, StoredTensor]] = {}
    for info in base.tensors.values():
        if len(info.shape) == 2 and info.name.endswith(".weight"):
            part = info.name.partition(".")[0] if base.components else TOP
            by_folder.setdefault(part, {})[stored_name(info).removesuffix(".weight")] = info
    return by_folder


def _as_servers_read(base: Index, forms: Mapping[str, NewWeight]) -> dict[str, NewWeight]:
    """Return the weights to quantise without those that servers join with a weight that keeps its values.

    https://github.com/vllm-project/vllm vllm/model_executor/layers/quantization/utils/quant_utils.py, is_layer_skipped.
    """
    joined = together(key for key, info in base.tensors.items() if len(info.shape) == 2)
    return {name: form for name, form in forms.items() if forms.keys() >= {*joined.get(name, ())}}


def _as_loaders_read(
    base: Index, forms: Mapping[str, NewWeight], form: OutputFormat, names: Names, excepted: Parts
) -> dict[str, NewWeight]:  # fmt: skip
    """Return the weights to quantise, changed so that loaders read the list of the other weights as it is meant.

    config.json lists the weights that are not quantised, and loaders compare only the ends of names: `proj_out`, the
    last layer of Flux, means that layer of each block too. So such a last layer is quantised with them; if it
    cannot be, they keep their values.
    https://github.com/huggingface/diffusers quantizers/bitsandbytes/utils.py, transformers quantizers_utils.py.
    """
    result = dict(forms)
    for modules in _matrices(base).values():
        coded = {name for name, info in modules.items() if info.name in forms}
        left_out = sorted(modules.keys() - coded) if coded else []
        for name in left_out:  # grows
            meant = [other for other in coded if other.endswith(name) or f"{name}." in other]
            info = modules[name]
            possible = meant and _fits(info) and _is_decodable(info, base)
            possible = possible and not excepted.cover([info.name], names.component(info.name))
            if possible and (new := form.make(info)) is not None:
                result[info.name] = new
                coded.add(name)
                continue
            for other in meant:
                del result[modules[other].name]
            coded.difference_update(meant)
            left_out += meant
    return result


def _sections(
    base: Index, forms: Mapping[str, NewWeight], form: OutputFormat
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (folder, section of its config.json) for every folder with weights that are quantised."""
    if form.section is None:
        return
    for part, modules in _matrices(base).items():
        left_out = {name for name, info in modules.items() if info.name not in forms}
        if len(left_out) < len(modules):
            yield part, form.section(sorted({*left_out, "lm_head"}))


def _form(job: Job, base: Index) -> OutputFormat:
    """Return the format of the output; UsageError if no loader reads it in such a file or folder."""
    if job.dtype in GGUF_TYPES:
        return OutputFormat(_blocks_of(base, job.dtype.upper()))
    where, folder = f"`--dtype {job.dtype}`", base.path.is_dir()
    table, reader = FILE_FORMATS, "ComfyUI and Forge read no file"
    if folder:
        table, reader = FOLDER_FORMATS, "transformers reads no folder"
    if folder and (base.components or "_class_name" in base.config):
        table, reader = {name: FOLDER_FORMATS[name] for name in BITSANDBYTES}, "diffusers reads no folder"
    if job.dtype not in table:
        raise UsageError(f"{reader} in {job.dtype}", where, f"write `--dtype {'` or `--dtype '.join(table)}`")
    if folder and not base.config:
        raise UsageError("a folder without config.json does not show how it is quantised", f"{base.path}: {where}",
                         "write `--dtype keep`, give the file in it, or add its config.json")  # fmt: skip
    if folder and base.config.get("model_type") in NO_CONVERSION:
        raise UsageError("the layers of this model are transposed, and loaders quantise linear layers only",
                         f"{base.path}: {where}", "write `--dtype bf16`")  # fmt: skip
    return table[job.dtype]


def _quantisable(base: Index, names: Names) -> Iterator[tuple[str, str]]:
    """Yield key and network of the weights that formats can hold as codes, whether or not they are kept."""
    parts = {key: names.component(key) for key in base.tensors}
    main = {part for part in parts.values() if part in QUANTISED_COMPONENTS} or {*parts.values()} - {"vae"}
    for key, info in base.tensors.items():
        if _fits(info) and key.endswith(".weight") and _is_decodable(info, base) and parts[key] in main:
            yield key, parts[key]


def _precise(job: Job, base: Index) -> Callable[[str], bool]:
    """Return a test of a key: whether the weight keeps its values by default because of its name."""
    usual = NO_DEFAULTS not in job.keep_precision
    return lambda key: usual and precise(key.partition(".")[2] if base.components else key)


def _fits(info: StoredTensor) -> bool:
    """Return whether a weight is a matrix that is large enough and fills units of codes."""
    rows, cols = (info.shape[0], info.shape[-1]) if len(info.shape) == 2 else (0, 0)
    return rows >= LEAST_SIDE <= cols and cols % UNIT == 0 == prod(info.shape) % UNIT


def _is_decodable(info: StoredTensor, base: Index) -> bool:
    """Return whether a tensor holds values that can be read."""
    return info.name in base.packed or info.dtype in FLOATS


def precise(name: str) -> bool:
    """Return whether a weight keeps its values by default because of its name in its component."""
    return bool(re.search(PRECISE, name) and re.search(PRECISE, INNER_LAYERS.sub("", name)))


def _blocks_of(base: Index, kind: str) -> Callable[[StoredTensor], NewWeight | None]:
    """Return the function that returns a weight as blocks of ggml, or None if it does not fill them."""
    file = None if base.gguf is not None else diffusion_file(base.tensors)

    def make(info: StoredTensor) -> NewWeight | None:
        old = base.packed.get(info.name)
        packing = as_blocks(old, info, kind) if file is None else new_blocks(file, info, kind)
        return NewWeight(packing, ()) if packing is not None else None

    return make

"""Every model family of the installed Transformers, tiny: configurations and classes of models.

A family is a model type of Transformers' own list. Its configuration is the defaults', with every size that
is known by name made small (`shrunk`), or in further ways where that does not fit (`WAYS`); a model is any
class that Transformers maps the type to.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
import yaml
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

_settings = yaml.safe_load(Path(__file__).with_name("family_settings.yaml").read_text())
#: Fields of configurations by model type, of which a key of the file names one or several.
GIVEN: dict[str, Any] = {name: _settings[types] for types in _settings for name in types.split(", ")}
_pe = GIVEN["pe_video_encoder"]  # whose vision is timm's, but for a configuration of another kind
_pe["vision_config"] = transformers.ViTConfig(**_pe["vision_config"])

#: Sizes by the name of the configuration's field: the first expression that fits the whole name decides.
SIZES: list[tuple[str, int]] = [
    (r"(?:\w+_)?vocab_size(?:_\w+)?|n_token|vocabulary_size", 64),
    (r"num_key_value_heads|(?:\w+_)?num_kv_heads|n_head_kv", 2),
    (r"(?:\w+_)?(?:num_attention_heads|num_heads|attention_heads|n_heads?|num_key_value_heads)|nhead", 4),
    (r"moe_intermediate_size|(?:\w*expert\w*)_intermediate_size", 16),
    (r"(?:\w+_)?(?:intermediate_size|ffn_dim|d_ff|ffn_hidden_size|mlp_dim|dim_feedforward|d_inner)", 48),
    (r"qk_rope_head_dim|qk_nope_head_dim|rotary_dim|d_kv|v_head_dim", 8),
    (r"(?:\w+_)?head_dim|d_head", 8),
    (r"q_lora_rank|kv_lora_rank|o_lora_rank", 16),
    (r"(?:\w+_)?(?:hidden_size|d_model|embed_dim|hidden_dim|n_embd|embedding_size|projection_dim)|dim", 32),
    (r"(?:\w+_)?(?:num_hidden_layers|encoder_layers|decoder_layers|num_layers|n_layers?|depth)|layers", 2),
    (r"(?:\w+_)?(?:max_position_embeddings|n_positions|max_source_positions|max_target_positions)", 64),
    (r"num_(?:local_|routed_)?experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok(?:en)?|moe_topk|moe_k|top_k_experts", 2),
    (r"n_group|topk_group|num_expert_group", 1),
    (r"sliding_window|sliding_window_size", 4),
    (r"local_attention", 6),
    (r"attention_chunk_size", 5),
    (r"image_size", 32),
    (r"patch_size", 8),
]
_SIZES = [(re.compile(pattern), size) for pattern, size in SIZES]

#: Lists of numbers by the field's name: what each of them becomes.
LISTS: list[tuple[str, int]] = [
    (r"\w*(?:depths?|num_blocks|encoder_blocks|num_layers|(?:layers|blocks)_per_stage|stage_blocks)", 2),
    (r"\w*(?:num_heads|num_attention_heads|num_groups)(?:_per_stage)?", 4),
    (r"\w*(?:hidden_sizes|channels|_dims?|hidden_dims|filters|neck_hidden_sizes|embed_dims?)\w*", 32),
]
_LISTS = [(re.compile(pattern), size) for pattern, size in LISTS]
#: Numbers that only the further ways make small.
COUNTS = {"num_queries": 6, "num_filters": 8, "upsample_groups": 32, "n_filters": 8, "num_denoising": 6}
#: Single numbers of more than 64 whose names no expression in SIZES knows.
_WIDTHS = re.compile(r"\w*(?:channels|dim|width|hidden|_size|features|filters|_ratio)\w*")
_NO_WIDTHS = re.compile(r"\w*(?:image|patch|window|crop|vocab|chunk|context|kernel|input_size|sampling)\w*")
#: Ways to make a configuration small: by single names, lists too, and every number that may be a width.
WAYS = ("names", "lists", "widths")


def size_of(name: str) -> int | None:
    return next((size for pattern, size in _SIZES if pattern.fullmatch(name)), None)


def _attribute(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # Transformers' own error for a field that differs by layer
        return config.__dict__.get(name)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(entry) for entry in value)
    return isinstance(value, (bool, int, str, float))


def _set_by_its_owner(part: PreTrainedConfig) -> dict[str, Any]:
    """What the configuration around `part` gives it beside `part`'s own defaults, sizes left out."""
    own = vars(type(part)())
    given: dict[str, Any] = {}
    if stages := vars(part).get("_out_indices"):
        given["out_indices"] = list(stages)
        if "num_hidden_layers" in own:  # a layer for each output
            given["num_hidden_layers"] = layers = max(2, len(stages))
            given["out_indices"] = [*range(layers - len(stages) + 1, layers + 1)]
    return given | {
        name: value
        for name, value in vars(part).items()
        if not name.startswith("_")
        and _is_plain(value)
        and size_of(name) is None
        and not any(pattern.fullmatch(name) for pattern, _ in _LISTS)
        and name in own
        and own[name] != value
        and "token" not in name
        and name not in ("model_type", "transformers_version")
    }


def _lists_and_widths(name: str, value: Any, way: str) -> Any:
    """A value for the fields that SIZES does not know, or None."""
    if isinstance(value, (list, tuple)) and value and all(type(entry) is int for entry in value):
        small = next((size for pattern, size in _LISTS if pattern.fullmatch(name)), None)
        if small is None:
            return None
        kept = {1, 2, 3} if "channels" in name else {1, 2}  # of an image, say
        return type(value)(entry if entry in kept else min(small, max(entry, 4)) for entry in value)
    if name in COUNTS and type(value) is int:
        return COUNTS[name]
    if way == "widths" and type(value) is int and value > 64:
        return 32 if _WIDTHS.fullmatch(name) and not _NO_WIDTHS.fullmatch(name) else None
    return None


def _fields(default: PreTrainedConfig, way: str) -> dict[str, Any]:
    """The fields of a configuration to make small, and their values."""
    kind = type(default)
    fields: dict[str, Any] = {}
    for name in vars(default):
        if isinstance(getattr(kind, name, None), property):
            continue
        value, size = _attribute(default, name), size_of(name)
        if isinstance(value, PreTrainedConfig) and name in GIVEN.get(kind.model_type, {}):
            continue
        if isinstance(value, PreTrainedConfig):
            given = {} if way == "names" else _set_by_its_owner(value)
            fields[name] = shrunk(type(value), way, **given)
        elif type(value) is int and value > 0 and size is not None:
            fields[name] = min(size, value)
        elif name == "image_size" and isinstance(value, (list, tuple)):
            fields[name] = [32 for _ in value]
        elif way != "names" and (small := _lists_and_widths(name, value, way)) is not None:
            fields[name] = small
    heads = [name for name in ("num_attention_heads", "num_heads", "n_head") if name in fields]
    if "num_key_value_heads" in fields and any(
        _attribute(default, name) == _attribute(default, "num_key_value_heads") for name in heads
    ):
        fields["num_key_value_heads"] = fields[heads[0]]
    kinds = (
        None
        if isinstance(getattr(kind, "layer_types", None), property)
        else default.__dict__.get("layer_types")
    )
    if kinds and all(isinstance(entry, str) and "attention" in entry for entry in kinds):
        fields["layer_types"] = list(dict.fromkeys(kinds))  # one layer of each kind
        fields["num_hidden_layers"] = len(fields["layer_types"])
    ropes = _attribute(default, "rope_parameters")
    if isinstance(ropes, dict) and (sections := ropes.get("mrope_section")):
        half = (
            fields.get("head_dim") or fields.get("hidden_size", 32) // fields.get("num_attention_heads", 4)
        ) // 2
        sections = [half - (half // 3) * (len(sections) - 1)] + [half // 3] * (len(sections) - 1)
        fields["rope_parameters"] = {**ropes, "mrope_section": sections}
    if _attribute(default, "apply_spec_augment"):  # masks more frames in training than so short a sound has
        fields["apply_spec_augment"] = False
    token = 64
    for name in sorted(vars(default)):
        value = _attribute(default, name)
        if (
            re.fullmatch(r"\w*token_(id|index)", name)
            and isinstance(value, int)
            and "vocab_size" in str(fields)
        ):
            if name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
                fields[name] = {"pad": 0, "bos": 1, "eos": 2, "dec": 1}[name[:3]]
            elif value >= 50:
                token -= 1
                fields[name] = token
    return fields


def shrunk(kind: type[PreTrainedConfig], way: str = WAYS[0], **given: Any) -> PreTrainedConfig:
    """The defaults of `kind`, small. `given` fields go in as they are."""
    try:
        default = kind()
    except Exception:  # the defaults fail their own checks
        default = kind(**GIVEN.get(kind.model_type, {}))
    fields = _fields(default, way)
    failed: Exception | None = None
    for dropped in ((), ("layer_types",), ("layer_types", "head_dim"), ("image_size", "patch_size")):
        try:
            kept = {name: value for name, value in fields.items() if name not in dropped}
            return kind(**kept | GIVEN.get(kind.model_type, {}) | given)
        except Exception as error:  # whatever a configuration's own checks raise
            failed = failed or error
    assert failed is not None
    raise failed


#: Classes that Transformers maps no model type to, or maps another one first, by what they are for.
FIRST = {
    "layoutxlm": "LayoutLMv2Model",
    "nougat": "VisionEncoderDecoderModel",
    "sapiens2": "Sapiens2ForSemanticSegmentation",  # its head is a family
}


def _source(config: type[PreTrainedConfig]) -> str:
    return config.__module__.replace(".configuration_", ".modeling_")


def classes(model_type: str) -> Iterator[type[PreTrainedModel]]:
    """The model classes for a type's configuration, logits first, and for its nameless parts last."""
    config = CONFIG_MAPPING[model_type]
    tables = [key for key in vars(modeling_auto) if re.fullmatch(r"MODEL_(FOR|WITH)\w+_MAPPING_NAMES", key)]
    first = ["MODEL_FOR_CAUSAL_LM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_FOR_MASKED_LM", "MODEL"]
    names = [FIRST.get(model_type)] + [
        getattr(modeling_auto, table, {}).get(model_type)
        for table in [f"{name}_MAPPING_NAMES" for name in first]
    ]
    try:
        module = importlib.import_module(_source(config))
    except ModuleNotFoundError as error:
        if "modeling_" not in str(error):  # a package that the model needs
            raise
        # A configuration that other families' classes take.
        others = []
        names += [getattr(modeling_auto, table).get(model_type) for table in tables]
    else:
        own = [(name, kind) for name, kind in vars(module).items() if _is_model(kind)]
        others = sorted((name for name, kind in own if kind.config_class is config), key=_without_head)
        parts = (set(config.sub_configs.values()) if config.sub_configs else set()) - {
            *CONFIG_MAPPING.values()
        }
        others += [name for name, kind in own if kind.config_class in parts]
    named = [name for name in names if isinstance(name, str)]
    # Bases have no forward of their own.
    for name in dict.fromkeys([*named, *others]):
        kind = (others and getattr(module, name, None)) or getattr(transformers, name, None)
        if kind is not None and not name.endswith("PreTrainedModel"):
            yield kind


def _is_model(kind: Any) -> bool:
    return inspect.isclass(kind) and issubclass(kind, PreTrainedModel)


def _without_head(name: str) -> tuple[bool, str]:
    return "For" in name, name


def part_for(kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedConfig:
    """`config`, or the part of it that `kind` is for."""
    parts = [part for part in vars(config).values() if type(part) is kind.config_class]
    return parts[0] if parts and type(parts[0]) not in CONFIG_MAPPING.values() else config


def sources(model_type: str) -> list[str]:
    """The source files of the type's own models, or of the first class that others lend it."""
    try:
        found = [importlib.import_module(_source(CONFIG_MAPPING[model_type]))]
    except ModuleNotFoundError as error:
        if "modeling_" not in str(error):
            raise
        found = [importlib.import_module(kind.__module__) for kind in [*classes(model_type)][:1]]
    return [str(module.__file__) for module in found]


def floats(output: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of floating point inside an output, by path."""
    parts = (
        output.items()
        if isinstance(output, dict)
        else enumerate(output)
        if isinstance(output, (list, tuple))
        else ()
    )
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield "", output
    for name, part in parts:
        for path, tensor in floats(part):
            yield f"{name}.{path}", tensor

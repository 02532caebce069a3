"""Every model family of the installed Transformers, tiny: configurations, inputs, and how outcomes compare.

A family is a model type of Transformers' own list. Its configuration is the defaults', with every size that
is known by name made small (`shrunk`); a model is any class that Transformers maps the type to.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

BATCH, ROWS = 3, 14
PADS = (0, 3, 6)  # tokens of padding in each row of the batch

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

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_MOE = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
}
#: Fields by the configuration's model type, where defaults are missing or do not shrink by themselves.
GIVEN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "paddleocr_vl_text"),
        {"rope_parameters": _MROPE},
    ),
    **dict.fromkeys(
        ("glm4v_text", "glm_image_text", "glm_ocr_text", "qwen2_5_omni_talker"), {"rope_parameters": _MROPE}
    ),
    "glm4v_moe_text": {
        "rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 0, 0]}
    },
    "deepseek_v2": _MOE,
    "dots1": {**_MOE, "moe_intermediate_size": 16, "n_shared_experts": 1},
    "mistral4": {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 16},
    "hunyuan_vl_text": {"head_dim": 8, "rope_parameters": {**_MROPE, "mrope_section": [1, 1, 1, 1]}},
    "zamba": {"num_hidden_layers": 3, "attn_layer_period": 2, "attn_layer_offset": 1},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [16, 16]},
    "esm": {"vocab_size": 64, "mask_token_id": 4, "pad_token_id": 0},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "xmod": {"default_language": "en_XX"},
    "step3p7_text": {"sliding_window": 4},
    "step3p5": {"sliding_window": 4},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "dense"]},
    "dinov3_vit": {"hidden_size": 64},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "granite_speech5_encoder": {"context_size": 8},
    "cohere_compass_text": {
        "rope_parameters": {kind: _ROPE for kind in ("full_attention", "sliding_attention")}
    },
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "num_hidden_layers": 2},
    "lfm3": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "longcat_flash": {"qk_head_dim": 16, "head_dim": 8},
    "lilt": {"hidden_size": 48},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
    "bros": {"dim_bbox_projection": 8, "dim_bbox_sinusoid_emb_2d": 8, "dim_bbox_sinusoid_emb_1d": 2},
    "mobilebert": {"true_hidden_size": 32, "intra_bottleneck_size": 32},
    "time_series_transformer": {"prediction_length": 4},
    "kyutai_speech_to_text": {"num_codebooks": 2},
}


def size_of(name: str) -> int | None:
    return next((size for pattern, size in _SIZES if pattern.fullmatch(name)), None)


def _attribute(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # Transformers' own error for a field that differs by layer
        return config.__dict__.get(name)


def _fields(default: PreTrainedConfig) -> dict[str, Any]:
    """The fields of a configuration to make small, and their values."""
    kind = type(default)
    fields: dict[str, Any] = {}
    for name in vars(default):
        if isinstance(getattr(kind, name, None), property):
            continue
        value, size = _attribute(default, name), size_of(name)
        if isinstance(value, PreTrainedConfig):
            fields[name] = shrunk(type(value))
        elif type(value) is int and value > 0 and size is not None:
            fields[name] = min(size, value)
        elif name == "image_size" and isinstance(value, (list, tuple)):
            fields[name] = [32 for _ in value]
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
    small = 64
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
                small -= 1
                fields[name] = small
    return fields


def shrunk(kind: type[PreTrainedConfig], **given: Any) -> PreTrainedConfig:
    """The defaults of `kind`, small. `given` fields go in as they are."""
    fields = _fields(kind())
    failed: Exception | None = None
    for dropped in ((), ("layer_types",), ("layer_types", "head_dim"), ("image_size", "patch_size")):
        try:
            kept = {name: value for name, value in fields.items() if name not in dropped}
            return kind(**kept | GIVEN.get(kind.model_type, {}) | given)
        except Exception as error:  # whatever a configuration's own checks raise
            failed = failed or error
    assert failed is not None
    raise failed


def classes(model_type: str) -> Iterator[type[PreTrainedModel]]:
    """The model classes for a type's configuration, those with logits first."""
    config = CONFIG_MAPPING[model_type]
    first = ["MODEL_FOR_CAUSAL_LM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_FOR_MASKED_LM", "MODEL"]
    module = importlib.import_module(config.__module__.replace(".configuration_", ".modeling_"))
    names = [getattr(modeling_auto, f"{name}_MAPPING_NAMES").get(model_type) for name in first]
    named = [name for name in names if isinstance(name, str)]
    others = [
        name
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and issubclass(kind, PreTrainedModel) and kind.config_class is config
    ]
    # Bases have no forward of their own.
    for name in dict.fromkeys([*named, *sorted(others, key=lambda name: ("For" in name, name))]):
        kind = getattr(module, name, None)
        if kind is not None and not name.endswith("PreTrainedModel"):
            yield kind


def padding(side: str) -> Tensor:
    mask = torch.ones(BATCH, ROWS, dtype=torch.int64)
    for row, pads in enumerate(PADS):
        if side == "left":
            mask[row, :pads] = 0
        elif side == "right":
            mask[row, ROWS - pads :] = 0
    return mask


def field(config: Any, names: tuple[str, ...]) -> Any:
    """The first of `names` that the configuration or one inside it has."""
    for name in names:
        if isinstance(value := getattr(config, name, None), (int, list, tuple)):
            return value
    for part in vars(config).values():
        if isinstance(part, PreTrainedConfig) and (value := field(part, names)) is not None:
            return value
    return None


def candidates(model: PreTrainedModel, side: str) -> Iterator[dict[str, Any]]:
    """Arguments for the model's forward, by the names it takes: the first that eager takes are used."""
    takes = inspect.signature(model.forward).parameters
    config = model.config
    text: dict[str, Any] = {}
    if "input_ids" in takes:
        ids = torch.randint(5, 48, (BATCH, ROWS)) * padding(side)
        last = padding(side).cumsum(1).argmax(1)
        ids[torch.arange(BATCH), last] = 2  # pooled by the end's token, and by the highest
        text["input_ids"] = ids
        if "attention_mask" in takes:
            text["attention_mask"] = padding(side)
        if "decoder_input_ids" in takes:
            text["decoder_input_ids"] = torch.randint(5, 48, (BATCH, 6))
        if "bbox" in takes:
            text["bbox"] = torch.tensor([1, 2, 5, 7]).expand(BATCH, ROWS, 4)
    fixed = {"use_cache": False} if "use_cache" in takes else {}
    if text:
        yield text | fixed
    channels = field(config, ("num_channels", "in_channels", "in_chans")) or 3
    size = field(config, ("image_size",)) or 32
    high, wide = (size, size) if isinstance(size, int) else (size[0], size[-1])
    mels = field(config, ("num_mel_bins", "feature_size", "input_feat_per_channel")) or 16
    frames = 2 * (field(config, ("max_source_positions",)) or 32)
    images = torch.randn(BATCH, channels, high, wide) if isinstance(channels, int) else None
    seen: list[dict[str, Any]] = []
    if "pixel_values" in takes and images is not None:
        seen.append({"pixel_values": images})
        seen.append(
            {"pixel_values": images[:, None].expand(-1, field(config, ("num_frames",)) or 1, -1, -1, -1)}
        )
    if "pixel_values_videos" in takes and images is not None:
        frame = field(config, ("num_frames", "frames_per_clip")) or 2
        seen.append({"pixel_values_videos": images[:, None].expand(-1, frame, -1, -1, -1)})
    for name in ("input_values", "input_features", "audio_values", "features"):
        if name in takes:
            sound = (
                {"attention_mask": padding(side).repeat_interleave(200, 1)}
                if "attention_mask" in takes
                else {}
            )
            wave = torch.randn(BATCH, ROWS * 200)
            seen += [{name: wave} | sound, {name: wave}, {name: wave[:, None]}]
            for shape in ((BATCH, mels, frames), (BATCH, frames, mels)):
                seen.append({name: torch.randn(shape)})
                length = shape[1] if shape[2] == mels else shape[2]
                pads = torch.ones(BATCH, length, dtype=torch.int64)
                pads[1, -8:], pads[2, -16:] = (0, 0) if side == "right" else (1, 1)
                for mask in ("attention_mask", "input_features_mask"):
                    if mask in takes:
                        seen.insert(-1, {name: seen[-1][name], mask: pads})
    if "past_values" in takes:
        length = field(config, ("context_length",)) or 32
        wide = field(config, ("num_input_channels", "input_size")) or 1
        seen += [
            {"past_values": torch.randn(BATCH, length)},
            {"past_values": torch.randn(BATCH, length, wide)},
        ]
    grids = [name for name in ("grid_thw", "image_grid_thw", "grid_hws") if name in takes]
    if grids:
        patch = field(config, ("patch_size",)) or 8
        wide = channels * patch * patch * (field(config, ("temporal_patch_size",)) or 1)
        first = "pixel_values" if "pixel_values" in takes else "hidden_states"
        grid = torch.tensor([[1, 4, 4], [1, 4, 8]])
        seen.append({first: torch.randn(48, wide), grids[0]: grid})
        seen.append({first: torch.randn(48, channels, patch, patch), grids[0]: grid})
        seen.append({first: torch.randn(48, wide), grids[0]: grid[:, 1:]})
    for more in seen:
        yield text | more | fixed


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

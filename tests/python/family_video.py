"""Video models that keep a session: their sizes, their films, and the call frame by frame."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import torch
from family_basics import padding, tokens
from family_settings import TINY, VISION
from family_sizes import MASKS, SAM2_VISION

FRAMES = 3
_GRID = 4  # patches along a side of an image
#: Its memory has 64 channels, whatever is asked for, and fewer than its images.
_MEMORY = {
    "num_maskmem": 3,
    "memory_attention_hidden_size": 128,
    "memory_attention_num_layers": 2,
    "memory_attention_rope_feat_sizes": [_GRID, _GRID],
    "memory_encoder_output_channels": 64,
    "memory_encoder_hidden_size": 128,
    "mask_downsampler_embed_dim": 128,
    "memory_fuser_embed_dim": 128,
    "memory_fuser_intermediate_dim": 48,
    "mask_decoder_config": {**MASKS, "hidden_size": 128},
}


def _images(size: int) -> dict[str, Any]:
    prompts = {"hidden_size": 128, "image_size": size, "patch_size": size // _GRID}
    return {"image_size": size, "prompt_encoder_config": prompts}


_PERCEIVER = {
    "memory_attention_mlp_hidden_size": 48,
    "memory_attention_rope_k_sizes": [2, 2],
    "perceiver_resampler_num_latents": 4,
    "perceiver_resampler_num_latents_2d": 4,
    "perceiver_resampler_hidden_size": 64,
    "perceiver_resampler_mlp_intermediate_size": 16,
    "perceiver_resampler_attention_head_dim": 64,
}
_SAM3 = {
    "model_type": "sam3_vision_model",
    "fpn_hidden_size": 128,
    "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    "backbone_config": {
        **VISION,
        "model_type": "sam3_vit_model",
        "window_size": 2,
        "global_attn_indexes": [1],
        "pretrain_image_size": 32,
    },
}
_DETR = {"hidden_size": 128, "num_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
#: Fields of configurations by model type.
GIVEN: dict[str, dict[str, Any]] = {
    "sam2_video": {
        **_MEMORY,
        **_images(64),
        "vision_config": SAM2_VISION,
        "memory_attention_feed_forward_hidden_size": 48,
    },
    "sam3_tracker_video": {
        **_MEMORY,
        **_images(32),
        "vision_config": _SAM3,
        "memory_attention_feed_forward_hidden_size": 48,
    },
    "sam3_video": {
        "detector_config": {
            "vision_config": _SAM3,
            **{f"{part}_config": _DETR for part in ("geometry_encoder", "detr_encoder", "detr_decoder")},
            "mask_decoder_config": {"hidden_size": 128, "num_attention_heads": 4},
            "text_config": {**TINY, "model_type": "clip_text_model", "projection_dim": 32},
        },
        "tracker_config": {
            **_MEMORY,
            **_images(32),
            "vision_config": _SAM3,
            "memory_attention_feed_forward_hidden_size": 48,
        },
        "low_res_mask_size": 16,
        "score_threshold_detection": 0.0,  # every query is an object, so that there is something to follow
        "new_det_thresh": 0.0,
        "det_nms_thresh": 0.0,
    },
    "edgetam_video": {**_MEMORY, **_images(64), "vision_config": SAM2_VISION, **_PERCEIVER},
}


def session(config: Any, side: str) -> dict[str, Any]:
    """A film whose first frame has two points on one object."""
    name, size = config.model_type, config.image_size
    kind = type(config).__name__.removesuffix("Config") + "InferenceSession"
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    film = getattr(module, kind)(torch.randn(FRAMES, 3, size, size), size, size, dtype=torch.float32)
    if name == "sam3_video":  # it finds its objects by text
        prompt = film.add_prompt("a cat")
        film.prompt_input_ids[prompt] = tokens("none")[:1]
        film.prompt_attention_masks[prompt] = padding("none")[:1]
    else:
        points = {
            "point_coords": size * torch.rand(1, 1, 2, 2),
            "point_labels": torch.ones(1, 1, 2, dtype=torch.int32),
        }
        film.add_point_inputs(film.obj_id_to_idx(1), 0, points)
        film.obj_with_new_inputs = [1]
    return {"inference_session": film}


def run(model: Any, arguments: dict[str, Any]) -> list[Any]:
    """The outputs of all frames: each looks back to those before it, which the session keeps."""
    film = copy.deepcopy(arguments["inference_session"])
    return [model(film, frame_idx=frame) for frame in range(FRAMES)]

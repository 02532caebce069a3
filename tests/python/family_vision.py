"""Arguments by model type, for models of images that take more than names tell."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import torch
from family_basics import (
    BATCH,
    ROWS,
    Make,
    behind,
    by_type,
    field,
    image,
    ints,
    ones,
    padding,
    randn,
    text,
    tokens,
)

FRAMES = 3


def _session(config: Any, side: str) -> dict[str, Any]:
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


def call(model: Any, arguments: dict[str, Any]) -> Any:
    """The model's outputs: of one call, or of one for each frame of a film."""
    if "inference_session" not in arguments:
        return model(**arguments)
    film = copy.deepcopy(arguments["inference_session"])
    return [model(film, frame_idx=frame) for frame in range(FRAMES)]


def _siglip2(config: Any, side: str) -> dict[str, Any]:
    vision, padded = getattr(config, "vision_config", config), side == "right"
    given = {
        "pixel_values": randn(16, 3 * vision.patch_size**2),
        "pixel_attention_mask": padding("right", 16) if padded else ones(16),
        "spatial_shapes": torch.tensor([[4, 4], [2, 6], [2, 5]] if padded else [[4, 4], [2, 8], [8, 2]]),
    }
    return given | (text(side) if vision is not config else {})


def _qformer(config: Any, side: str) -> dict[str, Any]:
    images = image(config.vision_config.image_size)
    given = text(side, config.image_token_index, 2)
    if config.model_type == "instructblipvideo":  # two frames of one query token each
        images = images[:, None].expand(-1, 1, -1, -1, -1)
    more = {"qformer_input_ids": ints(ROWS), "qformer_attention_mask": padding("none")}
    return {"pixel_values": images, **more, **given}


def _flattened_patches(config: Any, side: str) -> dict[str, Any]:
    """Each behind its row and column; those of padding are zeros."""
    vision, mask = getattr(config, "vision_config", config), padding(side)
    rows = randn(ROWS, 2 + vision.patch_embed_hidden_size)
    rows[..., 0] = rows[..., 1] = torch.arange(ROWS) + 1
    given = {"flattened_patches": rows * mask[..., None], "attention_mask": mask}
    return given | ({"decoder_input_ids": ints(6)} if vision is not config else {})


def _kosmos2(config: Any, side: str) -> dict[str, Any]:
    places = torch.zeros(BATCH, ROWS, dtype=torch.int64)
    places[:, 6 : 6 + config.latent_query_num] = 1  # where no side has padding
    images = image(config.vision_config.image_size)
    return {"pixel_values": images, **text(side), "image_embeds_position_mask": places}


def _placed_patches(config: Any, side: str) -> dict[str, Any]:
    """Patches of gemma4's images: 6 x 6, and for padding none past 3 x 6 in the last."""
    places = torch.cartesian_prod(torch.arange(6), torch.arange(6)).expand(BATCH, 36, 2).clone()
    if side == "right":
        places[2, 18:] = -1
    return {"pixel_values": torch.rand(BATCH, 36, 3 * config.patch_size**2), "pixel_position_ids": places}


def _image_tokens(count: int, *shape: int) -> Make:
    """A text each with an image of `shape` in it, of `count` tokens."""

    def make(config: Any, side: str) -> dict[str, Any]:
        given = text(side, config.image_token_id, count)
        return {"pixel_values": randn(*shape), **given}

    return make


def _patches_and_sound(config: Any, side: str) -> dict[str, Any]:
    """A text each with one patch of an image and one frame of a sound, where no side has padding."""
    given = text(side, config.image_token_id)
    given["input_ids"][:, 7] = config.audio_token_id
    return {
        **given,
        "pixel_values": torch.rand(BATCH, 1, 3 * config.vision_config.model_patch_size**2),
        "image_position_ids": ones(1, 2),
        "input_features": randn(1, config.audio_config.audio_embed_dim),
        "input_features_mask": ones(1).bool(),
        "mm_token_type_ids": (torch.arange(ROWS) == 6).long().repeat(BATCH, 1),
    }


def _frames_and_sound(config: Any, side: str) -> dict[str, Any]:
    """Frames, with padding on the right at most, and a text and a sound where the model takes them."""
    film = {"pixel_values_videos": randn(ROWS, 3, 32, 32), "padding_mask_videos": behind(side)}
    if "audio" in config.model_type:
        film["input_values"] = randn(1, 1920 * ROWS)
        film["padding_mask"] = behind(side).repeat_interleave(1920, 1)
    return film if config.model_type.endswith("encoder") else film | text(side)


#: By model types, with `c` for the configuration and `s` for the side of padding.
ARGUMENTS = by_type(
    {
        "siglip2, siglip2_vision_model": _siglip2,
        "mllama_vision_model": lambda c, s: {
            "pixel_values": randn(1, c.max_num_tiles, 3, c.image_size, c.image_size),
            "aspect_ratio_ids": torch.tensor([[1], [2], [3]]),
            "aspect_ratio_mask": ones(1, c.max_num_tiles),
        },
        # Patches of two images in one row, as the processors of MiniCPM-V lay them.
        "minicpm_ocr_vision, minicpmv4_6_vision, minicpmv4_7_vision": lambda c, s: {
            "pixel_values": torch.randn(1, 3, c.patch_size, 48 * c.patch_size),
            "target_sizes": torch.tensor([[4, 4], [4, 8]], dtype=torch.int32),
        },
        "video_llama_3_vision": lambda c, s: {
            "pixel_values": torch.randn(48, 3 * c.patch_size**2),
            "grid_thw": torch.tensor([[1, 4, 4], [1, 4, 8]]),
            "merge_sizes": torch.tensor([2, 1]),
        },
        "instructblip, instructblipvideo": _qformer,
        "pix2struct, pix2struct_vision_model, kosmos_2_5_vision_model": _flattened_patches,
        "lightglue, superglue, efficientloftr": lambda c, s: {
            "pixel_values": torch.rand(BATCH, 2, 3, 64, 64)
        },
        "grounding-dino, mm-grounding-dino": lambda c, s: {"pixel_values": image(64), **text(s)},
        "kosmos-2": _kosmos2,
        "idefics": lambda c, s: {
            "pixel_values": image(c.vision_config.image_size, BATCH, 1),
            "image_attention_mask": ones(ROWS, 1),
            **text(s),
        },
        "idefics2_perceiver": lambda c, s: {
            "context": randn(ROWS, c.hidden_size),
            "attention_mask": padding(s),
        },
        "sam3_detr_encoder, sam3_lite_text_detr_encoder": lambda c, s: {
            "text_features": randn(ROWS, c.hidden_size),
            "text_mask": padding("right" if s == "left" else s).bool(),
            "vision_features": [randn(c.hidden_size, 4, 4)],
            "vision_pos_embeds": [randn(c.hidden_size, 4, 4)],
        },
        "sam3_detr_decoder, sam3_lite_text_detr_decoder": lambda c, s: {
            "text_features": randn(ROWS, c.hidden_size),
            "text_mask": padding("right" if s == "left" else s).bool(),
            "vision_features": randn(16, c.hidden_size),
            "vision_pos_encoding": randn(16, c.hidden_size),
            "spatial_shapes": torch.tensor([[4, 4]]),
        },
        "sam3_mask_decoder, sam3_lite_text_mask_decoder": lambda c, s: {
            "decoder_queries": randn(6, c.hidden_size),
            "backbone_features": [randn(c.hidden_size, size, size) for size in (16, 8, 4)],
            "encoder_hidden_states": randn(16, c.hidden_size),
            "prompt_features": randn(ROWS, c.hidden_size),
            "prompt_mask": padding("right" if s == "left" else s).bool(),
        },
        "sam, sam_hq, sam2, edgetam, sam3_tracker": lambda c, s: {
            "pixel_values": image(size if isinstance(size := field(c, ("image_size",)), int) else size[0]),
            "input_points": 8.0 * torch.rand(BATCH, 1, 2, 2),
            "input_labels": ones(1, 2),
        },
        "sam2_video, sam3_tracker_video, sam3_video, edgetam_video": _session,
        "fast_vlm": _image_tokens(4, 3, 64, 64),
        "perception_lm": _image_tokens(4, 1, 3, 32, 32),
        "pe_video, pe_video_encoder, pe_audio_video, pe_audio_video_encoder": _frames_and_sound,
        "pp_chart2table": _image_tokens(1, 3, 32, 32),
        "gemma4_unified": _patches_and_sound,
        "omdet-turbo": lambda c, s: {
            "pixel_values": image(c.image_size),
            "classes_input_ids": tokens(s),
            "classes_attention_mask": padding(s),
            "tasks_input_ids": tokens(s),
            "tasks_attention_mask": padding(s),
            "classes_structure": ones(),
        },
        "gemma4_vision": _placed_patches,
        "inkling_vision": lambda c, s: {"pixel_values": randn(c.temporal_patch_size, *[c.patch_size] * 2, 3)},
        "inkling2_vision": lambda c, s: {
            "pixel_values": torch.randn(12, *[c.patch_size * c.spatial_merge_size] * 2, 3),
            "image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 4]]),
        },
        "pp_ocrv5_mobile_rec, pp_ocrv5_server_rec, pp_ocrv6_small_rec, pp_ocrv6_tiny_rec": lambda c, s: {
            "pixel_values": torch.randn(1, 3, 96, 64)
        },
        "oneformer": lambda c, s: {"pixel_values": image(64), "task_inputs": ints(c.task_seq_len)},
        "tvp": lambda c, s: {"pixel_values": image(c.max_img_size, 1, 2), "input_ids": tokens("none")[:1]},
        "unlimited_ocr_vision_encoder": lambda c, s: {"patch_embeds": randn(c.hidden_size, 4, 4)},
        "vitmatte": lambda c, s: {"pixel_values": randn(4, 32, 32)},
        "florence_vision": lambda c, s: {"hidden_states": image(64)},
        "deepseek_ocr2_encoder": lambda c, s: {
            "inputs_embeds": randn(ROWS, c.hidden_size),
            "num_patches": ROWS // 2,
        },
        "depth_pro, chmv2": lambda c, s: {"pixel_values": image(64)},
        "molmo2_vision": lambda c, s: {"pixel_values": randn(16, 3 * c.patch_size**2)},
        "molmo2_adapter": lambda c, s: {
            "image_features": randn(16, c.hidden_size * len(c.vision_feature_layer)),
            "pooled_patches_idx": torch.arange(48).reshape(12, 4),
        },
        "deformable_detr, d_fine, pp_doclayout_v3, pp_doclayout_v4": lambda c, s: {
            "pixel_values": image(128)
        },
    }
)

"""Arguments by model type, for models of images that take more than their parameters' names tell."""

from __future__ import annotations

from typing import Any

import torch
from family_basics import BATCH, ROWS, Make, field, image, image_of, padding, part, text, tokens


def _siglip2(config: Any, side: str) -> dict[str, Any]:
    vision = part(config, "vision_config")
    given = {
        "pixel_values": torch.randn(BATCH, 16, 3 * vision.patch_size**2),
        "pixel_attention_mask": padding("right" if side == "left" else side, 16),
        "spatial_shapes": torch.tensor([[4, 4], [2, 6], [2, 5]]),
    }
    if side != "right":
        given["pixel_attention_mask"] = torch.ones(BATCH, 16, dtype=torch.int64)
        given["spatial_shapes"] = torch.tensor([[4, 4], [2, 8], [8, 2]])
    return given | (text(side) if vision is not config else {})


def _mllama_vision(config: Any, side: str) -> dict[str, Any]:
    tiles = config.max_num_tiles
    return {
        "pixel_values": torch.randn(BATCH, 1, tiles, 3, config.image_size, config.image_size),
        "aspect_ratio_ids": torch.tensor([[1], [2], [3]]),
        "aspect_ratio_mask": torch.ones(BATCH, 1, tiles, dtype=torch.int64),
    }


def _target_sizes(config: Any, side: str) -> dict[str, Any]:
    """Patches of two images in one row, as the processors of MiniCPM-V lay them."""
    patch = config.patch_size
    return {
        "pixel_values": torch.randn(1, 3, patch, 48 * patch),
        "target_sizes": torch.tensor([[4, 4], [4, 8]], dtype=torch.int32),
    }


def _grids(config: Any, side: str) -> dict[str, Any]:
    wide = 3 * config.patch_size**2
    return {
        "pixel_values": torch.randn(48, wide),
        "grid_thw": torch.tensor([[1, 4, 4], [1, 4, 8]]),
        "merge_sizes": torch.tensor([2, 1]),
    }


def _qformer(config: Any, side: str) -> dict[str, Any]:
    images = image(config.vision_config.image_size)
    given = text(side)
    given["input_ids"][:, 6:8] = config.image_token_index  # where no side has padding
    if config.model_type == "instructblipvideo":  # two frames of one query token each
        images = images[:, None].expand(-1, 1, -1, -1, -1)
    return {
        "pixel_values": images,
        "qformer_input_ids": torch.randint(5, 48, (BATCH, ROWS)),
        "qformer_attention_mask": padding("none"),
        **given,
    }


def _flattened_patches(config: Any, side: str) -> dict[str, Any]:
    vision = part(config, "vision_config")
    rows = torch.randn(BATCH, ROWS, 2 + vision.patch_embed_hidden_size)
    place = torch.arange(ROWS) + 1
    rows[..., 0], rows[..., 1] = place, place
    mask = padding(side)
    given = {"flattened_patches": rows * mask[..., None], "attention_mask": mask}
    return given | ({"decoder_input_ids": torch.randint(5, 48, (BATCH, 6))} if vision is not config else {})


def _kosmos_patches(config: Any, side: str) -> dict[str, Any]:
    rows = torch.randn(BATCH, ROWS, 2 + config.patch_embed_hidden_size)
    rows[..., 0] = rows[..., 1] = torch.arange(ROWS) + 1
    return {"flattened_patches": rows * padding(side)[..., None], "attention_mask": padding(side)}


def _two_images(config: Any, side: str) -> dict[str, Any]:
    return {"pixel_values": torch.rand(BATCH, 2, 3, 64, 64)}


def _image_and_text(size: int = 32) -> Make:
    return lambda config, side: {"pixel_values": image(size), **text(side)}


def _kosmos2(config: Any, side: str) -> dict[str, Any]:
    places = torch.zeros(BATCH, ROWS, dtype=torch.int64)
    places[:, 6 : 6 + config.latent_query_num] = 1  # where no side has padding
    return {
        "pixel_values": image(config.vision_config.image_size),
        **text(side),
        "image_embeds_position_mask": places,
    }


def _idefics(config: Any, side: str) -> dict[str, Any]:
    return {
        "pixel_values": image(config.vision_config.image_size, BATCH, 1),
        "image_attention_mask": torch.ones(BATCH, ROWS, 1, dtype=torch.int64),
        **text(side),
    }


def _context(config: Any, side: str) -> dict[str, Any]:
    return {"context": torch.randn(BATCH, ROWS, config.hidden_size), "attention_mask": padding(side)}


def _sam3_detr(encoder: bool) -> Make:
    def make(config: Any, side: str) -> dict[str, Any]:
        wide = config.hidden_size
        text = {
            "text_features": torch.randn(BATCH, ROWS, wide),
            "text_mask": padding("right" if side == "left" else side).bool(),
        }
        if encoder:
            image = torch.randn(BATCH, wide, 4, 4)
            return {"vision_features": [image], "vision_pos_embeds": [torch.randn(BATCH, wide, 4, 4)], **text}
        return {
            "vision_features": torch.randn(BATCH, 16, wide),
            "vision_pos_encoding": torch.randn(BATCH, 16, wide),
            "spatial_shapes": torch.tensor([[4, 4]]),
            **text,
        }

    return make


def _sam3_masks(config: Any, side: str) -> dict[str, Any]:
    wide = config.hidden_size
    return {
        "decoder_queries": torch.randn(BATCH, 6, wide),
        "backbone_features": [torch.randn(BATCH, wide, size, size) for size in (16, 8, 4)],
        "encoder_hidden_states": torch.randn(BATCH, 16, wide),
        "prompt_features": torch.randn(BATCH, ROWS, wide),
        "prompt_mask": padding("right" if side == "left" else side).bool(),
    }


def _points(config: Any, side: str) -> dict[str, Any]:
    size = field(config, ("image_size",))
    return {
        "pixel_values": image(size if isinstance(size, int) else size[0]),
        "input_points": 8.0 * torch.rand(BATCH, 1, 2, 2),
        "input_labels": torch.ones(BATCH, 1, 2, dtype=torch.int64),
    }


def _placed_patches(config: Any, side: str) -> dict[str, Any]:
    """Patches of gemma4's images: 6 x 6, and for padding none past 3 x 6 in the last."""
    places = torch.cartesian_prod(torch.arange(6), torch.arange(6)).expand(BATCH, 36, 2).clone()
    if side == "right":
        places[2, 18:] = -1
    return {
        "pixel_values": torch.rand(BATCH, 36, 3 * config.patch_size**2),
        "pixel_position_ids": places,
    }


def _inkling(config: Any, side: str) -> dict[str, Any]:
    size = config.patch_size
    return {"pixel_values": torch.randn(BATCH, config.temporal_patch_size, size, size, 3)}


def _inkling2(config: Any, side: str) -> dict[str, Any]:
    size = config.patch_size * config.spatial_merge_size
    return {
        "pixel_values": torch.randn(12, size, size, 3),
        "image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 4]]),
    }


def _lines(config: Any, side: str) -> dict[str, Any]:
    return {"pixel_values": torch.randn(1, 3, 96, 64)}


def _task(config: Any, side: str) -> dict[str, Any]:
    return {"pixel_values": image(64), "task_inputs": torch.randint(5, 48, (BATCH, config.task_seq_len))}


def _tvp(config: Any, side: str) -> dict[str, Any]:
    return {"pixel_values": image(config.max_img_size, 1, 2), "input_ids": tokens("none")[:1]}


def _patch_embeds(config: Any, side: str) -> dict[str, Any]:
    return {"patch_embeds": torch.randn(BATCH, config.hidden_size, 4, 4)}


def _crops(config: Any, side: str) -> dict[str, Any]:
    return {"pixel_values": torch.randn(BATCH, 16, 3 * config.patch_size**2)}


def _pooled(config: Any, side: str) -> dict[str, Any]:
    return {
        "image_features": torch.randn(BATCH, 16, config.hidden_size * len(config.vision_feature_layer)),
        "pooled_patches_idx": torch.arange(48).reshape(12, 4),
    }


def _as_hidden_states(config: Any, side: str) -> dict[str, Any]:
    return {"hidden_states": image(64)}


def _image_prefix(config: Any, side: str) -> dict[str, Any]:
    return {"inputs_embeds": torch.randn(BATCH, ROWS, config.hidden_size), "num_patches": ROWS // 2}


def _rgba(config: Any, side: str) -> dict[str, Any]:
    return {"pixel_values": torch.randn(BATCH, 4, 32, 32)}


def _image_tokens(count: int, *shape: int) -> Make:
    """A text each with an image of `shape` in it, of `count` tokens where no side has padding."""

    def make(config: Any, side: str) -> dict[str, Any]:
        given = text(side)
        given["input_ids"][:, 6 : 6 + count] = config.image_token_id
        return {"pixel_values": torch.randn(BATCH, *shape), **given}

    return make


def _classes(config: Any, side: str) -> dict[str, Any]:
    return {
        "pixel_values": image(config.image_size),
        "classes_input_ids": tokens(side),
        "classes_attention_mask": padding(side),
        "tasks_input_ids": tokens(side),
        "tasks_attention_mask": padding(side),
        "classes_structure": torch.ones(BATCH, dtype=torch.int64),
    }


def _patches_and_sound(config: Any, side: str) -> dict[str, Any]:
    """A text each with one patch of an image and one frame of a sound, where no side has padding."""
    given = text(side)
    given["input_ids"][:, 6], given["input_ids"][:, 7] = config.image_token_id, config.audio_token_id
    kinds = torch.zeros(BATCH, ROWS, dtype=torch.int64)
    kinds[:, 6] = 1
    return {
        **given,
        "pixel_values": torch.rand(BATCH, 1, 3 * config.vision_config.model_patch_size**2),
        "image_position_ids": torch.ones(BATCH, 1, 2, dtype=torch.int64),
        "input_features": torch.randn(BATCH, 1, config.audio_config.audio_embed_dim),
        "input_features_mask": torch.ones(BATCH, 1, dtype=torch.bool),
        "mm_token_type_ids": kinds,
    }


def _film(config: Any, side: str) -> dict[str, Any]:
    """Frames, with padding on the right at most, and a text and a sound where the model takes them."""
    after = "right" if side == "right" else "none"
    film = {
        "pixel_values_videos": torch.randn(BATCH, ROWS, 3, 32, 32),
        "padding_mask_videos": padding(after),
    }
    if "audio" in config.model_type:
        film["input_values"] = torch.randn(BATCH, 1, 1920 * ROWS)
        film["padding_mask"] = padding(after).repeat_interleave(1920, 1)
    return film if config.model_type.endswith("encoder") else film | text(side)


#: By model type.
ARGUMENTS: dict[str, Make] = {
    "siglip2": _siglip2,
    "siglip2_vision_model": _siglip2,
    "mllama_vision_model": _mllama_vision,
    **dict.fromkeys(("minicpm_ocr_vision", "minicpmv4_6_vision", "minicpmv4_7_vision"), _target_sizes),
    "video_llama_3_vision": _grids,
    **dict.fromkeys(("instructblip", "instructblipvideo"), _qformer),
    **dict.fromkeys(("pix2struct", "pix2struct_vision_model"), _flattened_patches),
    "kosmos_2_5_vision_model": _kosmos_patches,
    **dict.fromkeys(("lightglue", "superglue", "efficientloftr"), _two_images),
    **dict.fromkeys(("grounding-dino", "mm-grounding-dino"), _image_and_text(64)),
    "kosmos-2": _kosmos2,
    "idefics": _idefics,
    "idefics2_perceiver": _context,
    **dict.fromkeys(("sam3_detr_encoder", "sam3_lite_text_detr_encoder"), _sam3_detr(True)),
    **dict.fromkeys(("sam3_detr_decoder", "sam3_lite_text_detr_decoder"), _sam3_detr(False)),
    **dict.fromkeys(("sam3_mask_decoder", "sam3_lite_text_mask_decoder"), _sam3_masks),
    **dict.fromkeys(("sam", "sam_hq", "sam2", "edgetam", "sam3_tracker"), _points),
    "fast_vlm": _image_tokens(4, 3, 64, 64),
    "perception_lm": _image_tokens(4, 1, 3, 32, 32),
    **dict.fromkeys(("pe_video", "pe_video_encoder", "pe_audio_video", "pe_audio_video_encoder"), _film),
    "pp_chart2table": _image_tokens(1, 3, 32, 32),
    "gemma4_unified": _patches_and_sound,
    "omdet-turbo": _classes,
    "gemma4_vision": _placed_patches,
    "inkling_vision": _inkling,
    "inkling2_vision": _inkling2,
    **dict.fromkeys(
        (
            "pp_ocrv5_mobile_rec",
            "pp_ocrv5_server_rec",
            "pp_ocrv6_small_rec",
            "pp_ocrv6_tiny_rec",
        ),
        _lines,
    ),
    "oneformer": _task,
    "tvp": _tvp,
    "unlimited_ocr_vision_encoder": _patch_embeds,
    "vitmatte": _rgba,
    "florence_vision": _as_hidden_states,
    "deepseek_ocr2_encoder": _image_prefix,
    "depth_pro": image_of(64),
    "chmv2": image_of(64),
    "molmo2_vision": _crops,
    "molmo2_adapter": _pooled,
    **dict.fromkeys(("deformable_detr", "d_fine", "pp_doclayout_v3", "pp_doclayout_v4"), image_of(128)),
}

"""Fields of configurations by model type, for families whose parts must fit one another."""

from __future__ import annotations

from typing import Any

from family_settings import HIERA, TINY, VISION
from transformers import ViTConfig

_ATOMS = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "intermediate_size": 48,
    "num_spatial_rope_pairs_per_axis": 1,
    "num_uid_rope_pairs": 1,
}
_SHARED_KEYS = {
    **TINY,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 4,
}
SAM2_VISION = {
    "model_type": "sam2_vision_model",
    "fpn_hidden_size": 128,
    "backbone_channel_list": [64, 48, 32, 16],
    "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    "backbone_config": {**HIERA, "model_type": "sam2_hiera_det_model"},
}
_BIGVGAN = {
    "mel_dim": 16,
    "upsample_initial_channel": 32,
    "upsample_rates": [3, 2],
    "upsample_kernel_sizes": [7, 4],
}
MASKS = {"mlp_dim": 48, "num_attention_heads": 4, "iou_head_hidden_dim": 32}
_DECODER = {**TINY, "num_key_value_heads": 2}
_CONVNEXT = {
    "model_type": "convnext",
    "hidden_sizes": [8, 16, 16, 32],
    "depths": [1, 1, 1, 1],
}
_WORDS = {**TINY, "model_type": "modernbert", "global_attn_every_n_layers": 2, "local_attention": 6}


def _frames() -> ViTConfig:
    return ViTConfig(**{**VISION, "num_labels": 32})


#: By model type.
GIVEN: dict[str, dict[str, Any]] = {
    "esmfold2": {
        "hidden_size": 32,
        "pairwise_hidden_size": 16,
        "single_inputs_size": 32 + 2 * 33 + 1,
        "pair_transition_intermediate_size": 32,
        "num_loops": 1,
        "folding_trunk_num_hidden_layers": 1,
        "parcae_num_coda_layers": 1,
        "sliding_window": 8,
        "atom_encoder": {**_ATOMS, "output_dim": 32},
        "structure_head": {
            "num_distogram_bins": 8,
            "diffusion_module": {
                "hidden_size": 32,
                "fourier_dim": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "intermediate_size": 32,
                "pair_intermediate_size": 32,
                "atom_encoder": {**_ATOMS, "output_dim": 32},
            },
        },
        "confidence_head": {"num_hidden_layers": 1, "distogram_bins": 8},
        "msa_encoder": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8},
        "lm_encoder": {"num_hidden_layers": 1, "lm_dropout": 0.0},
    },
    "gemma4_assistant": {
        "text_config": {
            **_SHARED_KEYS,
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "use_double_wide_mlp": False,
            "enable_moe_block": False,
            "num_kv_shared_layers": 2,
        },
        "backbone_hidden_size": 32,
    },
    "gemma4_unified_assistant": {
        "text_config": {**_SHARED_KEYS, "model_type": "gemma4_unified_text", "num_kv_shared_layers": 2},
        "backbone_hidden_size": 32,
    },
    "qwen2_5_omni_bigvgan": _BIGVGAN,
    "qwen2_5_omni_token2wav": {
        "dit_config": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "head_dim": 8,
            "emb_dim": 16,
            "block_size": 4,
            "look_ahead_layers": [0],
            "look_backward_layers": [1],
            "num_embeds": 64,
            "mel_dim": 16,
            "enc_emb_dim": 16,
            "enc_dim": 16,
            "enc_channels": [16, 16, 16, 16, 48],
            "enc_attention_channels": 8,
            "enc_se_channels": 8,
        },
        "bigvgan_config": _BIGVGAN,
    },
    "edgetam": {
        "vision_config": SAM2_VISION,
        "mask_decoder_config": {**MASKS, "hidden_size": 128},
        "prompt_encoder_config": {"hidden_size": 128, "image_size": 64, "patch_size": 16},
    },
    "fast_vlm": {
        "vision_config": {**_CONVNEXT, "hidden_size": 32},
        "text_config": {**_DECODER, "model_type": "qwen2"},
        "image_token_index": 60,
    },
    "perception_lm": {
        "vision_config": {**VISION, "model_type": "vit", "patch_size": 16, "model_args": {"embed_dim": 32}},
        "text_config": {**_DECODER, "model_type": "llama"},
        "image_token_id": 60,
        "video_token_id": 61,
    },
    "gemma4_unified": {
        "vision_config": {"output_proj_dims": 32, "mm_embed_dim": 32, "mm_posemb_size": 8, "patch_size": 2},
        "audio_config": {"audio_embed_dim": 16},
    },
    "sapiens2": {"head_config": {"upsample_out_channels": [16], "conv_out_channels": [16]}},
    "timm_wrapper": {"architecture": "resnet18"},
    "timm_backbone": {"backbone": "resnet18", "out_indices": [1, 2]},
    "pe_video_encoder": {"vision_config": _frames()},
    "omdet-turbo": {
        "backbone_config": {
            "model_type": "swin",
            "image_size": 64,
            "embed_dim": 8,
            "depths": [1, 1, 1, 1],
            "num_heads": [2, 2, 2, 2],
            "window_size": 2,
            "out_indices": [2, 3, 4],
        },
        "text_config": {**TINY, "model_type": "clip_text_model", "hidden_size": 48},
        "image_size": 64,
        "apply_layernorm_after_vision_backbone": False,  # timm's Swin puts channels last
        "encoder_in_channels": [16, 32, 64],
        "vision_features_channels": [32, 32, 32],
        "text_projection_in_dim": 48,
        "text_projection_out_dim": 48,
        "class_embed_dim": 48,
        "encoder_hidden_dim": 32,
        "decoder_hidden_dim": 32,
        "task_encoder_hidden_dim": 48,
        "num_queries": 6,
    },
}

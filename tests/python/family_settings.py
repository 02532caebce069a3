"""Fields of configurations by model type, where the defaults are missing or do not shrink by name."""

from __future__ import annotations

from typing import Any

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_MOE = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
}
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}
VISION = {**TINY, "image_size": 32, "patch_size": 8}
HIERA = {
    "hidden_size": 16,
    "embed_dim_per_stage": [16, 32, 48, 64],
    "num_attention_heads_per_stage": [2, 2, 2, 2],
    "blocks_per_stage": [1, 1, 2, 1],
    "global_attention_blocks": [3],
    "window_positional_embedding_background_size": [2, 2],
    "window_size_per_stage": [8, 4, 2, 1],
    "image_size": [64, 64],
}
_RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16, 24, 32],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
}
_DBRX_FFN = {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2}
_IMAGE_TOKENS = {f"IMGIMGA{letter}Z": 50 + place for place, letter in enumerate("ABCDEFGH")}
_EMU3_TOKENS = {f"<|visual token {place:06d}|>": 40 + place for place in range(8)}
_QUERIES = {"num_query_tokens": 2, "image_token_index": 60, "video_token_index": 60}
_LONG_KERNELS = {
    f"{kind}_{part}": [kernel, 1, [side // 2 for side in kernel]]
    for kind, shape in (
        ("vertical_long_to_small_conv", (1, 0)),
        ("horizontal_small_to_long_conv", (0, 1)),
        ("symmetric_conv_long", (1, 1)),
    )
    for part, size in (("longratio", 7), ("midratio", 5), ("shortratio", 3))
    for kernel in [[size if long else 1 for long in shape]]
}
_PP_OCR = {
    "neck_out_channels": 32,
    "scale_factor_list": [1, 2, 4, 8],
    "kernel_list": [3, 2, 2],
    "intraclass_block_config": {"reduce_channel": [1, 1, 0], "return_channel": [1, 1, 0], **_LONG_KERNELS},
}
_LCNET = {
    "model_type": "pp_lcnet_v4",
    "block_configs": [
        [[3, 8, 8, 1, True]],
        [[3, 8, 8, 2, False]],
        [[3, 8, 16, 2, True]],
        [[3, 16, 16, 2, True]],
    ],
    "stem_channels": [3, 8, 8],
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
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
    "zamba": {
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 5,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "use_mamba_kernels": False,
    },
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [16, 16],
        "rope_parameters": {**_MROPE, "mrope_section": [1, 1, 2]},
    },
    "esm": {"vocab_size": 64, "mask_token_id": 4, "pad_token_id": 0},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "xmod": {"default_language": "en_XX"},
    "step3p7_text": {"sliding_window": 4},
    "step3p5": {"sliding_window": 4},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "dense"]},
    "dinov3_vit": {"hidden_size": 64},
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
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "num_hidden_layers": 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_headdim": 8,
    },
    "lfm3": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "longcat_flash": {"qk_head_dim": 16, "head_dim": 8},
    "lilt": {"hidden_size": 48},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
    "bros": {"hidden_size": 64},
    "mobilebert": {"true_hidden_size": 32, "intra_bottleneck_size": 32},
    **dict.fromkeys(
        ("time_series_transformer", "autoformer", "informer"),
        {"prediction_length": 4, "context_length": 16, "lags_sequence": [1, 2], "num_time_features": 2},
    ),
    "kyutai_speech_to_text": {"num_codebooks": 2},
    "blt": {"encoder_hash_byte_group_vocab": 32, "encoder_hash_byte_group_size": [2, 3]},
    "bridgetower": {
        "hidden_size": 128,
        "text_config": {**TINY, "hidden_size": 128},
        "vision_config": {**TINY, "hidden_size": 128, "image_size": 32, "patch_size": 8},
    },
    "bridgetower_vision_model": {"hidden_size": 128},
    "chameleon": {"vocabulary_map": {"<image>": 63, **_IMAGE_TOKENS}},
    "emu3": {"vocabulary_map": {"<image>": 63, **_EMU3_TOKENS}},
    "clvp_encoder": {"hidden_size": 128, "projection_dim": 128},
    **dict.fromkeys(
        ("detr", "conditional_detr", "dab-detr", "deformable_detr", "table-transformer"),
        {"backbone_config": {**_RESNET, "out_features": ["stage4"]}, "num_queries": 6},
    ),
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": _DBRX_FFN,
    },
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    "dots3_note_vision_encoder": {
        "mlp_layer_types": ["dense", "sparse"],
        "pyramid_num_routed": [0, 4],
        "num_local_experts": 4,
        "adapter_in_dim": 32,
        "adapter_out_dim": 32,
    },
    "dots3_note_audio_encoder": {
        "adapter_input_size": 32,
        "adapter_out_dim": 32,
        "downsample_hidden_size": 16,
        "head_dim": 8,
    },
    "efficientloftr": {
        "stage_num_blocks": [1, 1, 1, 1],
        "out_features": [16, 16, 32, 64],
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    },
    "pp_ocrv5_server_det": _PP_OCR,
    "pp_ocrv6_medium_det": {**_PP_OCR, "backbone_config": _LCNET},
    "pp_ocrv6_small_det": {"layer_list_out_channels": [8, 8, 16, 16], "backbone_config": _LCNET},
    "eomt": {"num_blocks": 1, "num_queries": 6},
    "eomt_dinov3": {"num_blocks": 1, "num_queries": 6},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8, "hidden_size": 32, "num_attention_heads": 4}},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "perceiver": {"d_latents": 32, "d_model": 32, "num_latents": 8, "num_self_attends_per_block": 2},
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0], [1, 1]],
        "downsample_rate": "1/2",
        "spatial_target_layers": [0, 1, 0, 1],
        "vision_config": {**VISION, "model_type": "clip_vision_model", "hidden_size": 128},
    },
    **dict.fromkeys(("instructblip", "instructblipvideo"), _QUERIES),
    "kosmos-2": {"latent_query_num": 2},
    "janus_vqgan": {"base_channels": 32, "num_patches": 2, "channel_multiplier": [1, 1, 1, 1, 2]},
    "lw_detr": {"projector_scale_factors": [1.0]},
    "mllama_vision_model": {"intermediate_layers_indices": [0, 1]},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    **dict.fromkeys(
        ("nemotron_asr_streaming_encoder", "nemotron3_5_asr_encoder"),
        {"sliding_window": 71, "subsampling_conv_channels": 8},
    ),
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ngram_vocab_size_base": 64,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 2,
        "hc_lowrank": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "sam3_vision_model": {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]},
    "align": {"projection_dim": 64},
    "align_vision_model": {"depth_coefficient": 0.5},
    "idefics": {"use_resampler": True},
    "chmv2": {
        "backbone_config": {
            **VISION,
            "model_type": "dinov3_vit",
            "num_hidden_layers": 4,
            "hidden_size": 64,
            "out_indices": [1, 2, 3, 4],
            "return_class_token": True,
        }
    },
    "depth_pro": {
        "patch_size": 32,
        "scaled_images_ratios": [0.5, 1],
        "scaled_images_overlap_ratios": [0.0, 0.25],
        "scaled_images_feature_dims": [32, 32],
        "intermediate_hook_ids": [1, 0],
        "intermediate_feature_dims": [32, 32],
        "fusion_hidden_size": 32,
    },
    "vits": {
        "vocab_size": 64,
        "flow_size": 32,
        "spectrogram_bins": 17,
        "upsample_initial_channel": 16,
        "prior_encoder_num_flows": 2,
        "posterior_encoder_num_wavenet_layers": 2,
        "duration_predictor_filter_channels": 16,
        "depth_separable_num_layers": 1,
        "duration_predictor_num_flows": 2,
        "prior_encoder_num_wavenet_layers": 2,
    },
    "audio-spectrogram-transformer": {"max_length": 48, "num_mel_bins": 32},
    "clap_audio_model": {
        "patch_embeds_hidden_size": 8,
        "hidden_size": 64,
        "num_attention_heads": [2, 2, 4, 4],
        "depths": [2, 1, 1, 1],
        "spec_size": 128,
        "num_mel_bins": 32,
        "window_size": 2,
    },
    "dots3_note_text": {
        "per_layer_config": {
            1: {
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "q_lora_rank": 16,
                "kv_lora_rank": 16,
                "head_dim": 24,
                "qk_nope_head_dim": 16,
                "v_head_dim": 8,
                "qk_rope_head_dim": 8,
            }
        },
        "index_n_heads": 4,
        "index_head_dim": 16,
    },
    "phi4_multimodal_audio": {
        "ext_pw_out_channel": 32,
        "depthwise_separable_out_channel": 32,
        "nemo_conv_channels": 32,
    },
    **dict.fromkeys(("neucodec", "xcodec2"), {"quantization_dim": 64}),
    "sam2_vision_model": {
        "backbone_channel_list": [64, 48, 32, 16],
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    },
    **dict.fromkeys(("sam_vision_model", "sam_hq_vision_model"), {"num_pos_feats": 16}),
    **dict.fromkeys(("sam_prompt_encoder", "sam_hq_prompt_encoder"), {"image_embedding_size": 4}),
    "sam_hq_mask_decoder": {"vit_dim": 32},
    "superglue": {
        "hidden_size": 64,
        "keypoint_detector_config": {"model_type": "superpoint", "descriptor_decoder_dim": 64},
        "keypoint_encoder_sizes": [16, 32],
        "gnn_layers_types": ["self", "cross"],
    },
    "tvp": {
        "backbone_config": {**_RESNET, "out_features": ["stage4"]},
        "max_img_size": 128,
        "visual_prompt_size": 8,
        "num_frames": 2,
    },
    "oneformer": {"text_encoder_width": 32, "text_encoder_num_layers": 1, "text_encoder_vocab_size": 64},
    **dict.fromkeys(
        (
            "vibevoice_acoustic_tokenizer",
            "vibevoice_acoustic_tokenizer_encoder",
            "vibevoice_acoustic_tokenizer_decoder",
        ),
        {"num_filters": 2, "depths": [1] * 7},
    ),
    "xclip_vision_model": {"num_frames": 3},
    "llama4_vision_model": {
        "vision_output_dim": 32,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
        "intermediate_size": 128,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8},
    "moonshine_streaming": {"num_key_value_heads": 4, "decoder_num_attention_heads": 4},
    "muse_spark_audio": {
        "num_hidden_layers": 2,
        "patch_sizes": [2, 2],
        "hidden_sizes": [32, 32],
        "depths": [1, 1],
    },
    "nemotron_h": {"n_groups": 1, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8},
    "pix2struct_text_model": {"initializer_range": 0.02},
    "shieldgemma2": {"yes_token_index": 10, "no_token_index": 11},
    "vitmatte": {
        "fusion_hidden_sizes": [32, 16, 16, 8],
        "convstream_hidden_sizes": [8, 8, 16],
        "backbone_config": {**VISION, "model_type": "vitdet", "patch_size": 16, "num_channels": 4},
    },
    "upernet": {
        "backbone_config": {**_RESNET, "out_features": ["stage1", "stage2", "stage3", "stage4"]},
        "auxiliary_in_channels": 24,
        "auxiliary_channels": 8,
        "hidden_size": 16,
    },
    **dict.fromkeys(("sam2_hiera_det_model", "edgetam_hiera"), HIERA),
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 16},
    "nougat": {
        "encoder": {
            "model_type": "donut-swin",
            "image_size": [32, 32],
            "patch_size": 4,
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 4,
        },
        "decoder": {
            "model_type": "mbart",
            "d_model": 16,
            "is_decoder": True,
            "add_cross_attention": True,
            "decoder_layers": 1,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 16,
            "vocab_size": 64,
        },
    },
}

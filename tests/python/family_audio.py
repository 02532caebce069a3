"""Arguments by model type, for models of sound, series and text that take more than names tell."""

from __future__ import annotations

from typing import Any

import torch
from family_basics import BATCH, ROWS, Make, behind, by_type, image, ints, ones, padding, randn, text


def _time_series(config: Any, side: str) -> dict[str, Any]:
    past, future = config.context_length + max(config.lags_sequence), config.prediction_length
    return {
        "past_values": randn(past),
        "past_time_features": randn(past, config.num_time_features),
        "past_observed_mask": torch.ones(BATCH, past),
        "future_values": randn(future),
        "future_time_features": randn(future, config.num_time_features),
    }


def _codebooks(config: Any, side: str) -> dict[str, Any]:
    decoder = getattr(config, "decoder", config)
    rows = torch.randint(5, 48, (BATCH * decoder.num_codebooks, ROWS))
    if decoder is config:
        return {"input_ids": rows, "attention_mask": padding(side)}
    return {**text(side), "decoder_input_ids": rows}


def _mono(length: int = 3200) -> Make:
    return lambda config, side: {"input_values": torch.randn(2, 1, length)}


def _protein(config: Any, side: str) -> dict[str, Any]:
    """Chains of residues of one atom each, two to a row: padded on the right alone, as the model asks."""
    from transformers.models.esmfold2.modeling_esmfold2 import EsmFold2AtomInputs

    places = torch.arange(ROWS).expand(BATCH, ROWS)
    chain = (places >= ROWS // 2).long()
    residues = torch.randint(2, 22, (BATCH, ROWS))
    atoms = EsmFold2AtomInputs(
        ref_pos=randn(ROWS, 3),
        ref_charge=torch.zeros(BATCH, ROWS),
        atom_attention_mask=behind(side).bool(),
        ref_element=torch.randint(1, 16, (BATCH, ROWS)),
        ref_atom_name_chars=torch.randint(0, 32, (BATCH, ROWS, config.max_chars)),
        ref_space_uid=places,
        atom_to_token=places,
    )
    return {
        "token_index": places,
        "residue_index": places - chain * (ROWS // 2),
        **{name: chain for name in ("asym_id", "sym_id", "entity_id")},
        "mol_type": torch.zeros(BATCH, ROWS, dtype=torch.int64),
        "res_type": residues,
        "token_bonds": torch.zeros(BATCH, ROWS, ROWS, 1),
        "attention_mask": behind(side).bool(),
        "atom_inputs": atoms,
        "input_ids": residues,
    }


def _assistant(config: Any, side: str) -> dict[str, Any]:
    """One token of a draft, over keys and values that the model it helps has kept."""
    helped = config.text_config
    rows = (helped.num_key_value_heads, ROWS, helped.head_dim)
    return {
        "inputs_embeds": randn(1, 2 * config.backbone_hidden_size),
        "position_ids": torch.full((BATCH, 1), ROWS - 1),
        "attention_mask": padding(side),
        "shared_kv_states": {kind: (randn(*rows), randn(*rows)) for kind in helped.layer_types},
    }


#: By model types, with `c` for the configuration and `s` for the side of padding.
ARGUMENTS = by_type(
    {
        "time_series_transformer, autoformer, informer": _time_series,
        "decision_transformer": lambda c, s: {
            "states": randn(ROWS, c.state_dim),
            "actions": randn(ROWS, c.act_dim),
            "rewards": randn(ROWS, 1),
            "returns_to_go": randn(ROWS, 1),
            "timesteps": torch.arange(ROWS).expand(BATCH, ROWS),
            "attention_mask": padding(s),
        },
        "jev": lambda c, s: {
            "input_ids": torch.randint(5, 48, (1, ROWS)),
            "marks": torch.tensor([[5, 9]]),
            "num_options": torch.tensor([[2, 2]]),
            "question_type_ids": torch.tensor([[0, 0]]),
        },
        # Mel frames of all sounds in one row, and the frames of each.
        "qwen2_5_omni_audio_encoder, qwen3_omni_moe_audio_encoder": lambda c, s: {
            "input_features": torch.randn(c.num_mel_bins, 40 + 24 + 32),
            "feature_lens": torch.tensor([40, 24, 32]),
        },
        "xcodec, mimi, pocket_tts_audio_tokenizer": _mono(),
        "phi4_multimodal_audio": lambda c, s: {
            "hidden_states": randn(8 * ROWS, c.input_size),
            "mask": behind(s).repeat_interleave(8, 1).bool(),
        },
        "rag": lambda c, s: {
            "input_ids": ints(ROWS),
            "context_input_ids": torch.randint(5, 48, (BATCH * c.n_docs, ROWS)),
            "context_attention_mask": torch.ones(BATCH * c.n_docs, ROWS, dtype=torch.int64),
            "doc_scores": randn(c.n_docs),
            "decoder_input_ids": ints(6),
        },
        "fun_asr_nano_encoder": lambda c, s: {
            "input_features": randn(ROWS, c.num_mel_bins * c.num_stacked_frames),
            "input_features_mask": padding(s),
        },
        "gemma3n_audio": lambda c, s: {
            "audio_mel": randn(8 * ROWS, c.input_feat_size),
            "audio_mel_mask": behind(s).repeat_interleave(8, 1) == 0,
        },
        "inkling_audio": lambda c, s: {
            "audio_input_ids": torch.randint(0, c.mel_vocab_size, (BATCH, ROWS, c.n_mel_bins))
        },
        "moshi_depth": lambda c, s: {
            "input_ids": ints(c.num_codebooks),
            "attention_mask": ones(c.num_codebooks),
            "last_hidden_state": randn(1, c.input_size),
        },
        "musicgen, musicgen_melody, musicgen_melody_decoder": _codebooks,
        "clap": lambda c, s: {"input_features": randn(1, 64, c.audio_config.num_mel_bins), **text(s)},
        "voxtral_realtime": lambda c, s: {
            "input_features": randn(c.audio_config.num_mel_bins, 8 * ROWS),
            **text(s),
        },
        "qwen2_5_omni_dit": lambda c, s: {
            "hidden_states": randn(ROWS, c.mel_dim),
            "condition_vector": randn(ROWS, c.mel_dim),
            "speaker_embedding": randn(ROWS, c.enc_emb_dim),
            "quantized_code": torch.randint(0, c.num_embeds, (BATCH, ROWS // c.repeats)),
            "time_step": torch.rand(BATCH),
            "apply_cfg": False,
        },
        "dots3_note_audio_encoder": lambda c, s: {
            "input_features": randn(c.feature_size, 64),
            "chunk_sample_lengths": torch.tensor([64, 48, 64]) * 160,
        },
        "speecht5_hifigan": lambda c, s: {"spectrogram": randn(ROWS, c.model_in_dim)},
        "audio-spectrogram-transformer": lambda c, s: {"input_values": randn(c.max_length, c.num_mel_bins)},
        "mimi_decoder, pocket_tts_audio_tokenizer_decoder": lambda c, s: {
            "latents": randn(getattr(c, "latent_dim", c.hidden_size), ROWS)
        },
        "muse_glimmer_assistant": lambda c, s: {
            "noise_embeds": randn(6, c.hidden_size),
            "context_hidden_states": randn(8, c.hidden_size * len(c.target_layer_ids)),
            "attention_mask": padding("left" if s == "left" else "none", 14),
        },
        "esmfold2": _protein,
        "gemma4_assistant, gemma4_unified_assistant": _assistant,
        "qwen2_5_omni_token2wav": lambda c, s: {
            "code": torch.randint(0, c.dit_config.num_embeds, (1, ROWS // c.dit_config.repeats)),
            "conditioning": torch.randn(1, c.dit_config.enc_emb_dim),
            "reference_mel": torch.randn(1, ROWS, c.dit_config.mel_dim),
            "num_steps": 3,
        },
        "qwen2_5_omni_bigvgan": lambda c, s: {"mel_spectrogram": randn(c.mel_dim, ROWS)},
        "pi0": lambda c, s: {
            "state": randn(c.max_state_dim),
            "noise": randn(c.chunk_size, c.max_action_dim),
            "timestep": torch.rand(BATCH),
            "actions": randn(c.chunk_size, c.max_action_dim),
            "pixel_values": image(32, BATCH, 1),
            "pixel_attention_mask": ones(1).bool(),
            **text(s),
        },
        "neucodec, xcodec2": lambda c, s: {
            "input_values": torch.randn(2, 1, 3200),
            "input_features": torch.randn(2, 10, c.semantic_model_config.feature_projection_input_dim),
        },
        "vibevoice_acoustic_tokenizer": _mono(6400),
        "vibevoice_acoustic_tokenizer_encoder": lambda c, s: {"hidden_states": torch.randn(2, 1, 6400)},
        "vibevoice_acoustic_tokenizer_decoder": lambda c, s: {
            "hidden_states": torch.randn(2, c.hidden_size, ROWS)
        },
    }
)

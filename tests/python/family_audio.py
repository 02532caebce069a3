"""Arguments by model type, for models of sound, series and text that take more than names tell."""

from __future__ import annotations

from typing import Any

import torch
from family_basics import BATCH, ROWS, Make, image, padding, part, text


def _time_series(config: Any, side: str) -> dict[str, Any]:
    past = config.context_length + max(config.lags_sequence)
    return {
        "past_values": torch.randn(BATCH, past),
        "past_time_features": torch.randn(BATCH, past, config.num_time_features),
        "past_observed_mask": torch.ones(BATCH, past),
        "future_values": torch.randn(BATCH, config.prediction_length),
        "future_time_features": torch.randn(BATCH, config.prediction_length, config.num_time_features),
    }


def _decisions(config: Any, side: str) -> dict[str, Any]:
    return {
        "states": torch.randn(BATCH, ROWS, config.state_dim),
        "actions": torch.randn(BATCH, ROWS, config.act_dim),
        "rewards": torch.randn(BATCH, ROWS, 1),
        "returns_to_go": torch.randn(BATCH, ROWS, 1),
        "timesteps": torch.arange(ROWS).expand(BATCH, ROWS),
        "attention_mask": padding(side),
    }


def _marks(config: Any, side: str) -> dict[str, Any]:
    return {
        "input_ids": torch.randint(5, 48, (1, ROWS)),
        "marks": torch.tensor([[5, 9]]),
        "num_options": torch.tensor([[2, 2]]),
        "question_type_ids": torch.tensor([[0, 0]]),
    }


def _frames(lengths: str) -> Make:
    """Mel frames of all sounds in one row, and the frames of each."""

    def make(config: Any, side: str) -> dict[str, Any]:
        count = torch.tensor([40, 24, 32])
        return {"input_features": torch.randn(config.num_mel_bins, int(count.sum())), lengths: count}

    return make


def _mono(length: int = 3200) -> Make:
    return lambda config, side: {"input_values": torch.randn(2, 1, length)}


def _mels_of_phi4(config: Any, side: str) -> dict[str, Any]:
    mask = padding("right" if side == "right" else "none").repeat_interleave(8, 1).bool()
    return {"hidden_states": torch.randn(BATCH, 8 * ROWS, config.input_size), "mask": mask}


def _rag(config: Any, side: str) -> dict[str, Any]:
    docs = config.n_docs
    return {
        "input_ids": torch.randint(5, 48, (BATCH, ROWS)),
        "context_input_ids": torch.randint(5, 48, (BATCH * docs, ROWS)),
        "context_attention_mask": torch.ones(BATCH * docs, ROWS, dtype=torch.int64),
        "doc_scores": torch.randn(BATCH, docs),
        "decoder_input_ids": torch.randint(5, 48, (BATCH, 6)),
    }


def _stacked_mels(config: Any, side: str) -> dict[str, Any]:
    wide = config.num_mel_bins * config.num_stacked_frames
    return {"input_features": torch.randn(BATCH, ROWS, wide), "input_features_mask": padding(side)}


def _gemma3n_audio(config: Any, side: str) -> dict[str, Any]:
    padded = padding("right" if side == "right" else "none").repeat_interleave(8, 1) == 0
    return {"audio_mel": torch.randn(BATCH, 8 * ROWS, config.input_feat_size), "audio_mel_mask": padded}


def _mel_tokens(config: Any, side: str) -> dict[str, Any]:
    return {"audio_input_ids": torch.randint(0, config.mel_vocab_size, (BATCH, ROWS, config.n_mel_bins))}


def _depth(config: Any, side: str) -> dict[str, Any]:
    rows = config.num_codebooks
    return {
        "input_ids": torch.randint(5, 48, (BATCH, rows)),
        "attention_mask": torch.ones(BATCH, rows, dtype=torch.int64),
        "last_hidden_state": torch.randn(BATCH, 1, config.input_size),
    }


def _codebooks(config: Any, side: str) -> dict[str, Any]:
    decoder = part(config, "decoder")
    rows = torch.randint(5, 48, (BATCH * decoder.num_codebooks, ROWS))
    if decoder is config:
        return {"input_ids": rows, "attention_mask": padding(side)}
    return {**text(side), "decoder_input_ids": rows}


def _clap(config: Any, side: str) -> dict[str, Any]:
    mels = config.audio_config.num_mel_bins
    return {"input_features": torch.randn(BATCH, 1, 64, mels), **text(side)}


def _voxtral_realtime(config: Any, side: str) -> dict[str, Any]:
    return {"input_features": torch.randn(BATCH, config.audio_config.num_mel_bins, 8 * ROWS), **text(side)}


def _dit(config: Any, side: str) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(BATCH, ROWS, config.mel_dim),
        "condition_vector": torch.randn(BATCH, ROWS, config.mel_dim),
        "speaker_embedding": torch.randn(BATCH, ROWS, config.enc_emb_dim),
        "quantized_code": torch.randint(0, config.num_embeds, (BATCH, ROWS // config.repeats)),
        "time_step": torch.rand(BATCH),
        "apply_cfg": False,
    }


def _spectrogram(config: Any, side: str) -> dict[str, Any]:
    return {"input_values": torch.randn(BATCH, config.max_length, config.num_mel_bins)}


def _latents(config: Any, side: str) -> dict[str, Any]:
    return {"latents": torch.randn(BATCH, getattr(config, "latent_dim", config.hidden_size), ROWS)}


def _noise(config: Any, side: str) -> dict[str, Any]:
    wide = config.hidden_size
    return {
        "noise_embeds": torch.randn(BATCH, 6, wide),
        "context_hidden_states": torch.randn(BATCH, 8, wide * len(config.target_layer_ids)),
        "attention_mask": padding("left" if side == "left" else "none", 14),
    }


def _robot(config: Any, side: str) -> dict[str, Any]:
    return {
        "state": torch.randn(BATCH, config.max_state_dim),
        "noise": torch.randn(BATCH, config.chunk_size, config.max_action_dim),
        "timestep": torch.rand(BATCH),
        "actions": torch.randn(BATCH, config.chunk_size, config.max_action_dim),
        "pixel_values": image(32, BATCH, 1),
        "pixel_attention_mask": torch.ones(BATCH, 1, dtype=torch.bool),
        **text(side),
    }


def _wave_and_mels(config: Any, side: str) -> dict[str, Any]:
    mels = config.semantic_model_config.feature_projection_input_dim
    return {
        "input_values": torch.randn(2, 1, 3200),
        "input_features": torch.randn(2, 10, mels),
    }


def _channels_first(length: int) -> Make:
    def make(config: Any, side: str) -> dict[str, Any]:
        return {"hidden_states": torch.randn(2, 1 if length > ROWS else config.hidden_size, length)}

    return make


def _audio_chunks(config: Any, side: str) -> dict[str, Any]:
    wide = config.feature_size
    return {
        "input_features": torch.randn(BATCH, wide, 64),
        "chunk_sample_lengths": torch.tensor([64, 48, 64]) * 160,
    }


def _mels(config: Any, side: str) -> dict[str, Any]:
    return {"spectrogram": torch.randn(BATCH, ROWS, config.model_in_dim)}


def _protein(config: Any, side: str) -> dict[str, Any]:
    """Chains of residues of one atom each, two to a row: padded on the right alone, as the model asks."""
    from transformers.models.esmfold2.modeling_esmfold2 import EsmFold2AtomInputs

    mask = padding("right" if side == "right" else "none").bool()
    places = torch.arange(ROWS).expand(BATCH, ROWS)
    chain = (places >= ROWS // 2).long()
    residues = torch.randint(2, 22, (BATCH, ROWS))
    atoms = EsmFold2AtomInputs(
        ref_pos=torch.randn(BATCH, ROWS, 3),
        ref_charge=torch.zeros(BATCH, ROWS),
        atom_attention_mask=mask,
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
        "attention_mask": mask,
        "atom_inputs": atoms,
        "input_ids": residues,
    }


def _assistant(config: Any, side: str) -> dict[str, Any]:
    """One token of a draft, over keys and values that the model it helps has kept."""
    text = config.text_config
    rows = (BATCH, text.num_key_value_heads, ROWS, text.head_dim)
    return {
        "inputs_embeds": torch.randn(BATCH, 1, 2 * config.backbone_hidden_size),
        "position_ids": torch.full((BATCH, 1), ROWS - 1),
        "attention_mask": padding(side),
        "shared_kv_states": {kind: (torch.randn(rows), torch.randn(rows)) for kind in text.layer_types},
    }


def _codes(config: Any, side: str) -> dict[str, Any]:
    sizes = config.dit_config
    return {
        "code": torch.randint(0, sizes.num_embeds, (1, ROWS // sizes.repeats)),
        "conditioning": torch.randn(1, sizes.enc_emb_dim),
        "reference_mel": torch.randn(1, ROWS, sizes.mel_dim),
        "num_steps": 3,
    }


def _mel_spectrogram(config: Any, side: str) -> dict[str, Any]:
    return {"mel_spectrogram": torch.randn(BATCH, config.mel_dim, ROWS)}


#: By model type.
ARGUMENTS: dict[str, Make] = {
    **dict.fromkeys(("time_series_transformer", "autoformer", "informer"), _time_series),
    "decision_transformer": _decisions,
    "jev": _marks,
    **dict.fromkeys(("qwen2_5_omni_audio_encoder", "qwen3_omni_moe_audio_encoder"), _frames("feature_lens")),
    **dict.fromkeys(("xcodec", "mimi", "pocket_tts_audio_tokenizer"), _mono()),
    "phi4_multimodal_audio": _mels_of_phi4,
    "rag": _rag,
    "fun_asr_nano_encoder": _stacked_mels,
    "gemma3n_audio": _gemma3n_audio,
    "inkling_audio": _mel_tokens,
    "moshi_depth": _depth,
    **dict.fromkeys(("musicgen", "musicgen_melody", "musicgen_melody_decoder"), _codebooks),
    "clap": _clap,
    "voxtral_realtime": _voxtral_realtime,
    "qwen2_5_omni_dit": _dit,
    "dots3_note_audio_encoder": _audio_chunks,
    "speecht5_hifigan": _mels,
    "audio-spectrogram-transformer": _spectrogram,
    **dict.fromkeys(("mimi_decoder", "pocket_tts_audio_tokenizer_decoder"), _latents),
    "muse_glimmer_assistant": _noise,
    "esmfold2": _protein,
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), _assistant),
    "qwen2_5_omni_token2wav": _codes,
    "qwen2_5_omni_bigvgan": _mel_spectrogram,
    "pi0": _robot,
    **dict.fromkeys(("neucodec", "xcodec2"), _wave_and_mels),
    "vibevoice_acoustic_tokenizer": _mono(6400),
    "vibevoice_acoustic_tokenizer_encoder": _channels_first(6400),
    "vibevoice_acoustic_tokenizer_decoder": _channels_first(ROWS),
}

"""Arguments for the forward pass of any model, by the names that it takes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import family_audio
import family_vision
import torch
from family_basics import BATCH, ROWS, field, padding, tokens
from transformers import PreTrainedModel


def _text(takes: Any, side: str) -> dict[str, Any]:
    text: dict[str, Any] = {}
    if "input_ids" not in takes:
        return text
    text["input_ids"] = tokens(side)
    if "attention_mask" in takes:
        text["attention_mask"] = padding(side)
    if "decoder_input_ids" in takes:
        text["decoder_input_ids"] = torch.randint(5, 48, (BATCH, 6))
    if "bbox" in takes:
        text["bbox"] = torch.tensor([1, 2, 5, 7]).expand(BATCH, ROWS, 4)
    return text


def _images(takes: Any, config: Any, model_width: int) -> Iterator[dict[str, Any]]:
    channels = field(config, ("num_channels", "in_channels", "in_chans")) or 3
    size = field(config, ("image_size",)) or 32
    high, wide = (size, size) if isinstance(size, int) else (size[0], size[-1])
    if isinstance(channels, int):
        images = torch.randn(BATCH, channels, high, wide)
        if "pixel_values" in takes:
            yield {"pixel_values": images}
            frames = field(config, ("num_frames",)) or 1
            yield {"pixel_values": images[:, None].expand(-1, frames, -1, -1, -1)}
        if "pixel_values_videos" in takes:
            frames = field(config, ("num_frames", "frames_per_clip")) or 2
            yield {"pixel_values_videos": images[:, None].expand(-1, frames, -1, -1, -1)}
    else:
        channels = 3
    grids = [name for name in ("grid_thw", "image_grid_thw", "grid_hws") if name in takes]
    if grids:
        patch = field(config, ("patch_size",)) or 8
        wide = channels * patch * patch * (field(config, ("temporal_patch_size",)) or 1)
        first = "pixel_values" if "pixel_values" in takes else "hidden_states"
        grid = torch.tensor([[1, 4, 4], [1, 4, 8]])
        for rows in (torch.randn(48, wide), torch.randn(48, channels, patch, patch)):
            yield {first: rows, grids[0]: grid}
            yield {first: rows[None], grids[0]: grid}
        yield {first: torch.randn(48, model_width), grids[0]: grid}
        yield {first: torch.randn(48, wide), grids[0]: grid[:, 1:]}


def _first_width(model: PreTrainedModel) -> int:
    """The size of the last dimension that the model's first layer of weights takes, if that tells."""
    for module in model.modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.LayerNorm)):
            return getattr(module, "in_features", 0) or module.normalized_shape[-1]
    return 32


def _sounds(takes: Any, config: Any, side: str, first: int) -> Iterator[dict[str, Any]]:
    mels = field(config, ("num_mel_bins", "feature_size", "input_feat_per_channel")) or 16
    frames = 2 * (field(config, ("max_source_positions",)) or 32)
    masks = [m for m in ("attention_mask", "input_features_mask", "padding_mask") if m in takes]
    for name in ("input_values", "input_features", "audio_values", "features"):
        if name not in takes:
            continue
        wave = torch.randn(BATCH, ROWS * 200)
        mask = padding(side).repeat_interleave(200, 1)
        yield {name: wave} | ({"attention_mask": mask} if "attention_mask" in takes else {})
        yield {name: wave}
        yield {name: wave[:, None]}
        for shape, length in (
            ((BATCH, mels, frames), frames),
            ((BATCH, frames, mels), frames),
            ((BATCH, 64, first), 64),
            ((BATCH, mels, 200), 200),
            ((BATCH, 1, frames, mels), frames),
        ):
            sound = torch.randn(shape)
            pads = torch.ones(BATCH, length, dtype=torch.int64)
            pads[1, -8:], pads[2, -16:] = (0, 0) if side == "right" else (1, 1)
            for name_of_mask in masks:
                yield {name: sound, name_of_mask: pads}
            yield {name: sound}


def _series(takes: Any, config: Any) -> Iterator[dict[str, Any]]:
    if "past_values" in takes:
        length = field(config, ("context_length",)) or 32
        wide = field(config, ("num_input_channels", "input_size")) or 1
        yield {"past_values": torch.randn(BATCH, length)}
        yield {"past_values": torch.randn(BATCH, length, wide)}


def _states(takes: Any, config: Any, side: str) -> Iterator[dict[str, Any]]:
    """Hidden states, for parts of models: with the padding's mask, and for what attends to an encoder."""
    wide = field(config, ("hidden_size", "d_model", "hidden_dim"))
    if not isinstance(wide, int):
        return
    mask = {"attention_mask": padding(side)} if "attention_mask" in takes else {}
    states = torch.randn(BATCH, ROWS, wide)
    beside = (
        {"encoder_hidden_states": torch.randn(BATCH, 10, wide)} if "encoder_hidden_states" in takes else {}
    )
    for name in ("input_ids", "hidden_states", "inputs_embeds", "query_embeds"):
        if name in takes:
            rows = tokens(side) if name == "input_ids" else states
            yield {name: rows} | mask | beside
            yield {name: rows} | beside


def candidates(model: PreTrainedModel, side: str) -> Iterator[dict[str, Any]]:
    """Arguments for the model's forward, by the names it takes: the first that eager takes are used."""
    takes = inspect.signature(model.forward).parameters
    config = model.config
    fixed = {"use_cache": False} if "use_cache" in takes else {}
    make = (family_vision.ARGUMENTS | family_audio.ARGUMENTS).get(config.model_type)
    known = make(config, side) if make else {}
    if known and {*known} <= {*takes}:  # and not of another class of the type
        yield known | fixed
        return
    text = _text(takes, side)
    if text:
        yield text | fixed
    first = _first_width(model)
    seen = [*_images(takes, config, first), *_sounds(takes, config, side, first), *_series(takes, config)]
    for more in seen:
        yield text | more | fixed
        if not text and "decoder_input_ids" in takes:
            yield more | {"decoder_input_ids": torch.randint(5, 48, (BATCH, 6))} | fixed
    for more in _states(takes, config, side):
        yield more | fixed

"""Make a batch for any model from the arguments of its forward."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from architectures.small_config import IMAGE_SIZE, VOCABULARY
from architectures.subjects import Subject
from architectures.tried_inputs import TRIED_TASKS, tried_batch

__all__ = ["batch_for", "loss_of"]

SEQUENCES, TOKENS = 2, 48
_FIRST_WORD = 4


def batch_for(subject: Subject, model: nn.Module) -> dict[str, Any]:
    """Return a batch of two: tokens, images or sound, with labels where the class takes them.

    A classifier of texts gets a padding token, where it has none: its embedding, which is made by now, does not pad with it.
    """
    if subject.task in TRIED_TASKS:
        return tried_batch(subject.task, model)
    config: Any = model.config
    names = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(_FIRST_WORD, _vocabulary(config), (SEQUENCES, TOKENS), generator=generator)
    if subject.task == "sequence classification":
        # What is classified is the last token that is not padding, or the end of the sequence.
        text = config.get_text_config()
        text.pad_token_id = 0 if text.pad_token_id is None else text.pad_token_id
        end = getattr(text, "eos_token_id", None)
        words[:, -1] = end if isinstance(end, int) and end else _FIRST_WORD
    batch: dict[str, Any] = {}
    labels: torch.Tensor | None = words.clone()
    # A text model that can take sound or images as well trains on text alone.
    takes_words = "input_ids" in names and "decoder_input_ids" not in names
    if takes_words:
        batch["input_ids"] = words
    elif "input_values" in names:
        batch["input_values"] = torch.randn(_sound_shape(config), generator=generator)
    elif "input_features" in names:
        batch["input_features"] = torch.randn(_feature_shape(config), generator=generator)
        if "attention_mask" in names:
            batch["attention_mask"] = torch.ones(batch["input_features"].shape[:2], dtype=torch.long)
    elif "pixel_values_videos" in names:
        batch["pixel_values_videos"] = torch.randn(_image_shape(subject, config), generator=generator)
    elif "pixel_values" in names and "input_ids" not in names:
        batch["pixel_values"] = torch.randn(_image_shape(subject, config), generator=generator)
    else:
        batch["input_ids"] = words
    if subject.task in ("CTC", "speech seq2seq", "seq2seq LM") and not takes_words:
        labels = words[:, :12].clone()
    if subject.task == "token classification":
        labels = words % 2
    elif "classification" in subject.task:
        labels = torch.tensor([0, 1])
    elif subject.task == "semantic segmentation":
        labels = torch.randint(0, 2, (SEQUENCES, IMAGE_SIZE, IMAGE_SIZE), generator=generator)
    elif subject.task in ("masked images", "depth estimation"):
        labels = None
    if "decoder_input_ids" in names and ("labels" not in names or labels is None):
        batch["decoder_input_ids"] = words
    if "bool_masked_pos" in names:
        num_patches = (IMAGE_SIZE // config.patch_size) ** 2
        batch["bool_masked_pos"] = torch.arange(num_patches).expand(SEQUENCES, -1) % 2 == 0
    if "start_positions" in names:
        batch |= {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])}
    if "labels" in names and labels is not None:
        batch["labels"] = labels
    return batch


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss of the output, or the mean square of all that can be trained in it."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss.mean()
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    values = [leaf.float().square().mean() for leaf in leaves if leaf.requires_grad and leaf.is_floating_point()]
    return torch.stack(values).sum()


def _vocabulary(config: Any) -> int:
    return int(getattr(config.get_text_config(), "vocab_size", None) or VOCABULARY)


def _sound_shape(config: Any) -> tuple[int, ...]:
    if config.model_type == "audio-spectrogram-transformer":
        return (SEQUENCES, config.max_length, config.num_mel_bins)
    return (SEQUENCES, 4000)


def _feature_shape(config: Any) -> tuple[int, ...]:
    names = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim")
    bins = next((size for name in names if (size := getattr(config, name, None))), 16)
    if config.model_type == "whisper":
        return (SEQUENCES, bins, 2 * config.max_source_positions)
    return (SEQUENCES, 64, bins)


def _image_shape(subject: Subject, config: Any) -> tuple[int, ...]:
    channels = getattr(config, "num_channels", 3)
    size = getattr(config, "image_size", IMAGE_SIZE)
    height, width = (size, size) if isinstance(size, int) else size
    if subject.task == "video classification":
        return (SEQUENCES, getattr(config, "num_frames", 4), channels, height, width)
    return (SEQUENCES, channels, height, width)

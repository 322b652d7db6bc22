"""Batches for models that take more than one kind of input, or targets of their own: the first that the model takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from architectures.small_config import IMAGE_SIZE, VOCABULARY

__all__ = ["TRIED_TASKS", "tried_batch"]

SEQUENCES, TOKENS = 2, 48
_FIRST_WORD = 4
_OBJECTS = 2
Inputs = dict[str, Any]


def tried_batch(task: str, model: nn.Module) -> Inputs:
    """Return the first batch of the task that the model takes.

    Raises:
        Exception: what the model raises for the first batch, where it takes none.
    """
    errors = []
    for batch in TRIED_TASKS[task](model):
        try:
            if callable(batch):
                batch = batch()
            torch.manual_seed(0)
            with torch.no_grad():
                output = model(**batch)
        except Exception as error:
            errors.append(error)
            continue
        if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(output)):
            return batch
    raise errors[0] if errors else TypeError("forward has none of the arguments that batches are made of")


def _multimodal(model: nn.Module) -> Iterator[Callable[[], Inputs]]:
    """Text with an image, or a sound, in every sequence."""
    names = inspect.signature(model.forward).parameters
    for kind, inputs in (("image", _images), ("audio", _sounds)):
        for media in inputs(model.config, names):
            yield lambda media=media, kind=kind: _with_text(model, names, kind, media)


def _with_text(model: nn.Module, names: Mapping[str, Any], kind: str, media: Inputs) -> Inputs:
    """Return the media with a text that has a token for each of their features."""
    count = _feature_count(model, kind, media)
    words = _words(TOKENS + count)
    places = torch.zeros_like(words, dtype=torch.bool)
    places[:, _FIRST_WORD : _FIRST_WORD + count] = True
    fields = [f"{kind}_token_id", f"{kind}_token_index", f"{kind}_token", "boi_token_id"]
    token = next((id for field in fields if isinstance(id := getattr(model.config, field, None), int)), None)
    batch = {**media, "input_ids": words, "attention_mask": torch.ones_like(words)}
    if token is not None:
        words[words == token] = _FIRST_WORD + 1
        words[places] = token
    for name in ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"):
        batch[name] = places.long()
    batch["image_embeds_position_mask"] = places.long()
    batch["qformer_input_ids"] = _words(TOKENS)
    batch["labels"] = torch.where(places, -100, words)
    if "decoder_input_ids" in names and hasattr(model.config, "decoder"):
        batch["labels"] = _words(12)
    return {name: value for name, value in batch.items() if name in names}


def _feature_count(model: nn.Module, kind: str, media: Inputs) -> int:
    """Return how many features the model makes of the media of one sequence; 0 if it does not say."""
    method = f"get_{kind}_features"
    owner = next((owner for owner in (model, model.base_model) if hasattr(owner, method)), None)
    if owner is None:
        return int(getattr(model.config, "num_image_tokens", 0))
    taken = inspect.signature(getattr(owner, method)).parameters
    arguments = {name: value for name, value in media.items() if name in taken or "args" in taken}
    if "qformer_input_ids" in taken:
        arguments["qformer_input_ids"] = _words(TOKENS)
    with torch.no_grad():
        output = getattr(owner, method)(**arguments)
    features = getattr(output, "pooler_output", None)
    if features is None:
        features = output if isinstance(output, (torch.Tensor, list, tuple)) else output.last_hidden_state
    leaves = [leaf for leaf in tree_leaves(features) if isinstance(leaf, torch.Tensor)]
    if (mask := getattr(output, "attention_mask", None)) is not None:
        return int(mask.sum()) // SEQUENCES
    return sum(leaf.shape[:-1].numel() for leaf in leaves) // SEQUENCES


def _images(config: Any, names: Mapping[str, Any]) -> Iterator[Inputs]:
    """Yield one image for each sequence, in the layouts that processors make."""
    vision = next((part for name in ("vision_config", "vq_config") if (part := getattr(config, name, None))), config)
    pixels = next((name for name in ("pixel_values", "image_pixel_values", "flattened_patches") if name in names), None)
    if pixels is None:
        return
    channels = next(
        (size for name in ("num_channels", "in_channels", "in_chans") if (size := getattr(vision, name, 0))), 3
    )
    size = _first_size(getattr(vision, "image_size", None))
    patch = _first_size(getattr(vision, "patch_size", None), 16)
    if "image_grid_thw" in names or "image_grid_hw" in names:
        side = 2 * int(getattr(vision, "spatial_merge_size", None) or 2)
        depth = int(getattr(vision, "temporal_patch_size", None) or 1)
        grid = torch.tensor([[1, side, side]] * SEQUENCES)
        grids = {"image_grid_thw": grid, "image_grid_hw": grid[:, 1:]}
        grids["image_merge_sizes"] = torch.full((SEQUENCES,), side // 2)
        for before, after in (
            ((), (channels * depth * patch**2,)),
            ((), (channels, patch, patch)),
            ((1,), (channels, patch, patch)),
        ):
            yield _named(names, {pixels: torch.randn(*before, SEQUENCES * side**2, *after), **grids})
    side = size // patch
    sizes = {
        "image_sizes": torch.tensor([[size, size]] * SEQUENCES),
        "aspect_ratio_ids": torch.ones(SEQUENCES, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(SEQUENCES, 1, getattr(vision, "max_num_tiles", 1), dtype=torch.long),
        "spatial_shapes": torch.tensor([[side, side]] * SEQUENCES),
        "target_sizes": torch.tensor([[side, side]] * SEQUENCES),
        "high_res_pixel_values": torch.randn(SEQUENCES, channels, size, size),
        "bbox": torch.zeros(SEQUENCES, TOKENS, 4, dtype=torch.long),
        "image_attention_mask": torch.ones(SEQUENCES, TOKENS, 1, dtype=torch.long),
    }
    if "aspect_ratio_mask" in names:
        sizes["aspect_ratio_mask"][:, :, 1:] = 0
        tiles = getattr(vision, "max_num_tiles", 4)
        sizes["cross_attention_mask"] = torch.ones(SEQUENCES, TOKENS, 1, tiles, dtype=torch.long)
        yield _named(names, {pixels: torch.randn(SEQUENCES, 1, tiles, channels, size, size), **sizes})
    for tiles in ((), (1,), (3,), (5,)):
        image = {pixels: torch.randn(SEQUENCES, *tiles, channels, size, size)}
        yield _named(names, {**image, **sizes})
        yield image
    patches = torch.randn(SEQUENCES, side**2, channels * patch**2)
    sizes["pixel_attention_mask"] = torch.ones(SEQUENCES, side**2, dtype=torch.long)
    sizes["image_position_ids"] = torch.cartesian_prod(torch.arange(side), torch.arange(side)).expand(SEQUENCES, -1, -1)
    yield _named(names, {pixels: patches, **sizes})
    rows = torch.cartesian_prod(torch.arange(1.0, side + 1), torch.arange(1.0, side + 1)).expand(SEQUENCES, -1, -1)
    yield _named(names, {pixels: torch.cat([rows, patches], dim=2), **sizes})


def _sounds(config: Any, names: Mapping[str, Any]) -> Iterator[Inputs]:
    """Yield one sound for each sequence: features in either order, or samples."""
    audio = next((part for name in ("audio_config", "encoder_config") if (part := getattr(config, name, None))), config)
    fields = ("num_mel_bins", "n_mels", "input_dim", "input_size", "mel_bins")
    bins = next((size for field in fields if isinstance(size := getattr(audio, field, None), int)), 16)
    length = 2 * int(getattr(audio, "max_source_positions", None) or 32)
    for name, shapes in (
        ("input_features", [(bins, length), (length, bins)]),
        ("audio_input_features", [(length, bins)]),
        ("input_values", [(4000,), (1, 4000)]),
    ):
        for shape in shapes if name in names else ():
            mask = torch.ones(SEQUENCES, max(shape), dtype=torch.long)
            masks = dict.fromkeys(("input_features_mask", "feature_attention_mask", "padding_mask"), mask)
            yield _named(names, {name: torch.randn(SEQUENCES, *shape), **masks})


def _detection(model: nn.Module) -> Iterator[Inputs]:
    """Images with boxes, classes and masks, and a text where the class takes one."""
    names = inspect.signature(model.forward).parameters
    target = {
        "class_labels": torch.arange(_OBJECTS) % 2,
        "boxes": torch.tensor([[0.5, 0.5, 0.5, 0.5], [0.3, 0.3, 0.2, 0.2]]),
        "masks": torch.rand(_OBJECTS, IMAGE_SIZE, IMAGE_SIZE).gt(0.5).float(),
    }
    words = _caption(model)
    batch = {
        "labels": [dict(target) for _ in range(SEQUENCES)],
        "mask_labels": [target["masks"]] * SEQUENCES,
        "class_labels": [target["class_labels"]] * SEQUENCES,
        "task_inputs": _words(77).float(),
        "text_inputs": _words(4 * 77).view(SEQUENCES, 4, 77),
        "input_ids": words,
        "attention_mask": torch.ones_like(words),
        "classes_input_ids": words,
        "tasks_input_ids": words,
        "input_points": torch.full((SEQUENCES, 1, 1, 2), 8.0),
        "input_labels": torch.ones(SEQUENCES, 1, 1, dtype=torch.long),
    }
    size = _first_size(getattr(getattr(model.config, "vision_config", None) or model.config, "image_size", None))
    for side in dict.fromkeys((size, 64, 128)):
        images = torch.randn(SEQUENCES, 3, side, side)
        mask = torch.rand(_OBJECTS, side, side).gt(0.5).float()
        sized = {"mask_labels": [mask] * SEQUENCES, "labels": [{**target, "masks": mask} for _ in range(SEQUENCES)]}
        pixels = {"pixel_values": images, "pixel_values_videos": images[:, None]}
        for left_out in ((), ("labels",)):
            yield {name: v for name, v in _named(names, {**batch, **sized, **pixels}).items() if name not in left_out}


def _contrast(model: nn.Module) -> Iterator[Inputs]:
    """Images and their captions."""
    names = inspect.signature(model.forward).parameters
    words = _caption(model)
    text = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    for images in _images(model.config, names):
        yield _named(names, {**images, **text, "return_loss": True})
    yield _named(names, {**text, "pixel_values_videos": torch.randn(SEQUENCES, 4, 3, IMAGE_SIZE, IMAGE_SIZE)})


def _series(model: nn.Module) -> Iterator[Inputs]:
    """Past and future values of two series, or of as many as there are channels."""
    config: Any = model.config
    names = inspect.signature(model.forward).parameters
    lags = max(getattr(config, "lags_sequence", None) or [0])
    past, future = (
        int(getattr(config, "context_length", 32) or 32) + lags,
        int(getattr(config, "prediction_length", 24)),
    )
    channels = (int(getattr(config, "num_input_channels", 1)),) if hasattr(config, "num_input_channels") else ()
    features = int(getattr(config, "num_time_features", 0))
    yield _named(
        names,
        {
            "past_values": torch.randn(SEQUENCES, past, *channels),
            "future_values": torch.randn(SEQUENCES, future, *channels),
            "past_time_features": torch.randn(SEQUENCES, past, features),
            "future_time_features": torch.randn(SEQUENCES, future, features),
            "past_observed_mask": torch.ones(SEQUENCES, past, *channels),
            "freq": torch.zeros(SEQUENCES, 1, dtype=torch.long),
        },
    )
    yield {"past_values": torch.randn(SEQUENCES, past), "future_values": torch.randn(SEQUENCES, future)}


def _speech(model: nn.Module) -> Iterator[Inputs]:
    """Text with the spectrogram or the codes to say."""
    config: Any = model.config
    names = inspect.signature(model.forward).parameters
    words = _words(TOKENS, int(getattr(config, "vocab_size", VOCABULARY)))
    bins = int(getattr(config, "num_mel_bins", 16))
    durations = torch.ones(SEQUENCES, TOKENS + 1, dtype=torch.long)
    text = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    yield _named(
        names,
        {
            **text,
            "spectrogram_labels": torch.randn(SEQUENCES, TOKENS, bins),
            "duration_labels": durations[:, :TOKENS],
            "pitch_labels": torch.randn(SEQUENCES, TOKENS, 1),
            "energy_labels": torch.randn(SEQUENCES, TOKENS, 1),
        },
    )
    speaker = torch.randn(SEQUENCES, int(getattr(config, "speaker_embedding_dim", 0) or 1))
    yield _named(names, {**text, "labels": torch.randn(SEQUENCES, TOKENS, bins), "speaker_embeddings": speaker})
    codes = int(getattr(config, "num_codebooks", 4))
    many = torch.randint(_FIRST_WORD, 16, (SEQUENCES, TOKENS, codes))
    yield _named(names, {"input_ids": many, "labels": many})
    decoder = _named(names, {**text, "decoder_input_ids": torch.randint(_FIRST_WORD, 16, (SEQUENCES * codes, TOKENS))})
    yield decoder
    yield _named(names, text)


def _answers(model: nn.Module) -> Iterator[Inputs]:
    """Text with boxes, an image or both, and the place of the answer or its class."""
    names = inspect.signature(model.forward).parameters
    words = _words(TOKENS)
    text = {
        "input_ids": words,
        "attention_mask": torch.ones_like(words),
        "start_positions": torch.tensor([1, 2]),
        "end_positions": torch.tensor([3, 4]),
        "bbox": torch.zeros(SEQUENCES, TOKENS, 4, dtype=torch.long),
        "image": torch.randn(SEQUENCES, 3, IMAGE_SIZE, IMAGE_SIZE),
    }
    targets = (
        torch.rand(SEQUENCES, max(int(getattr(model.config, "num_labels", 2)), 2)),
        torch.zeros_like(words),
        words,
    )
    for images in (*_images(model.config, names), {}):
        for labels in targets:
            yield _named(names, {**images, **text, "labels": labels})


def _caption(model: nn.Module) -> torch.Tensor:
    """Return a text that is not too long for the model."""
    text: Any = model.config.get_text_config()
    return _words(min(TOKENS, int(getattr(text, "max_position_embeddings", TOKENS))))


def _first_size(size: Any, default: int = IMAGE_SIZE) -> int:
    if isinstance(size, Mapping):
        size = next(iter(size.values()))
    if isinstance(size, (list, tuple)):
        size = size[0]
    return int(size or default)


def _words(length: int, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(_FIRST_WORD, vocabulary, (SEQUENCES, length), generator=torch.Generator().manual_seed(0))


def _named(names: Mapping[str, Any], values: Inputs) -> Inputs:
    return {name: value for name, value in values.items() if name in names}


TRIED_TASKS: Mapping[str, Callable[[nn.Module], Iterator[Any]]] = {
    "multimodal LM": _multimodal,
    "object detection": _detection,
    "zero-shot detection": _detection,
    "universal segmentation": _detection,
    "mask generation": _detection,
    "keypoints": _detection,
    "zero-shot classification": _contrast,
    "time series": _series,
    "text to spectrogram": _speech,
    "text to waveform": _speech,
    "document QA": _answers,
    "visual QA": _answers,
}

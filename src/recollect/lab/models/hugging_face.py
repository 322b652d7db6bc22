"""Load and save Hugging Face checkpoints of the reference models: a folder with `config.json` and safetensors.

Tensors are converted one by one: only one at a time is in memory twice.
"""

import json
import re
from collections import UserDict
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recollect.errors import CheckpointError, UnsupportedModelError
from recollect.extras import needed
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.hugging_face_architecture import Architecture, WeightRule
from recollect.lab.models.hugging_face_decoders import ARCHITECTURES

with needed("safetensors", by="a Hugging Face checkpoint"):
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def read_config(folder: str | Path) -> tuple[str, TransformerConfig]:
    """Read the `config.json` of a checkpoint: its `model_type`, and our configuration."""
    path = Path(folder) if Path(folder).suffix == ".json" else Path(folder) / "config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise CheckpointError(
            f"{path}: cannot be read ({problem}), expected the folder of a Hugging Face model."
        ) from None
    model_type = fields.get("model_type")
    if fields.get("quantization_config") is not None:
        raise UnsupportedModelError(
            f"{path}: the weights are quantized (quantization_config), expected unquantized ones. Convert them to bf16 first."
        )
    return model_type, _architecture(model_type).read(fields)


def load_hugging_face(folder: str | Path, *, compute_dtype: torch.dtype | None = None) -> GPTModel:
    """Build the reference model of a Hugging Face checkpoint, with its weights, in fp32.

    Its logits equal Hugging Face's up to rounding. The folder has `config.json`, and `model.safetensors` or its shards with
    their index.

    Raises:
        CheckpointError: a file or tensor is missing, damaged, of the wrong shape, or belongs to no part of the model.
    """
    model_type, config = read_config(folder)
    rules = list(_architecture(model_type).rules(config))
    theirs = _Tensors(Path(folder))
    with torch.no_grad():
        _check_names(theirs, rules, config, _architecture(model_type).ignored, folder)
        with torch.device("meta"):
            model = GPTModel(config, compute_dtype=compute_dtype)
        model = model.to_empty(device=torch.get_default_device())  # weights to be read need no random values first
        if config.share_embeddings_and_output_weights:
            model.output_layer.weight = model.embedding.word_embeddings.weight
        for buffer in model.buffers():
            buffer.zero_()  # as in a new model; a checkpoint need not hold them
        state = model.state_dict()
        for rule in (one for one in rules if not one.is_extra):
            name, tensor = rule.ours, rule.read(theirs)
            if state[name].shape != tensor.shape:
                raise CheckpointError(
                    f"checkpoint in {folder}: {name!r} has shape {list(tensor.shape)}, expected "
                    f"{list(state[name].shape)} by its config.json."
                )
            state[name].copy_(tensor)
    return model


def save_hugging_face(
    model: GPTModel,
    model_type: str,
    folder: str | Path,
    *,
    shard_bytes: int = 5_000_000_000,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a checkpoint that Hugging Face's classes load; their architecture may not be able to be this model."""
    architecture = _architecture(model_type)
    fields = architecture.write(model.config)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    fields["torch_dtype"] = str(dtype or model.output_layer.weight.dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    state = model.state_dict()
    tensors = [pair for rule in architecture.rules(model.config) for pair in rule.write(state[rule.ours])]
    shards = _shards(tensors, shard_bytes)
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = _SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        # A file does not hold views: each tensor is written as its own copy.
        copies = {name: tensor.detach().to(dtype or tensor.dtype, copy=True).contiguous() for name, tensor in shard}
        save_file(copies, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(copies, file)
    if len(shards) > 1:
        total = {"total_size": sum(tensor.nbytes for _, tensor in tensors)}
        text = json.dumps({"metadata": total, "weight_map": index}, indent=2)
        (folder / _INDEX).write_text(text + "\n", encoding="utf-8")


def _check_names(
    theirs: Iterable[str], rules: list[WeightRule], config: TransformerConfig, ignored: str, folder: str | Path
) -> None:
    """Check that every tensor belongs to the model; others would be dropped silently."""
    known = {name for rule in rules for layout in rule.layouts for names in layout.names() for name in names}
    if config.share_embeddings_and_output_weights:
        known.add("lm_head.weight")  # some checkpoints hold the tied matrix twice
    unknown = sorted(name for name in theirs if name not in known and not re.fullmatch(ignored, name))
    if unknown:
        raise CheckpointError(
            f"checkpoint in {folder}: {len(unknown)} of its tensors belong to no part of the model, such as {unknown[0]!r}; "
            "expected those of its config.json. Is one of the two from a different model?"
        )


def _architecture(model_type: str | None) -> Architecture:
    if model_type not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"config.json: model_type is {model_type!r}, expected one of {', '.join(ARCHITECTURES)}."
        )
    return ARCHITECTURES[model_type]


def _shards(tensors: list[tuple[str, Tensor]], shard_bytes: int) -> list[list[tuple[str, Tensor]]]:
    shards: list[list[tuple[str, Tensor]]] = [[]]
    filled_bytes = 0
    for name, tensor in tensors:
        if shards[-1] and filled_bytes + tensor.nbytes > shard_bytes:
            shards.append([])
            filled_bytes = 0
        shards[-1].append((name, tensor))
        filled_bytes += tensor.nbytes
    return shards


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): str(file) for name, file in index["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise CheckpointError(
            f'{path}: cannot be read ({problem!r}), expected {{"weight_map": {{tensor name: file name}}}}.'
        ) from None


def _opened(folder: Path, file: str) -> Any:
    try:
        return safe_open(folder / file, framework="pt")
    except (OSError, SafetensorError) as problem:
        raise CheckpointError(f"{folder / file}: cannot be read ({problem}), expected safetensors.") from None


class _Tensors(UserDict[str, Any]):
    """The tensors of a checkpoint by name, read on lookup; `data` has their files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = cache(partial(_opened, folder))
        index = folder / _INDEX
        super().__init__(_read_index(index) if index.exists() else dict.fromkeys(self._file(_SINGLE).keys(), _SINGLE))

    def __getitem__(self, name: str) -> Tensor:
        file = self.data[name]
        try:
            tensor: Tensor = self._file(file).get_tensor(name)
        except SafetensorError as problem:
            raise CheckpointError(
                f"{self._folder / file}: {name!r} cannot be read ({problem}), expected it there by the index."
            ) from None
        return tensor

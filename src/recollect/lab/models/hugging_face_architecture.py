"""Describe each Hugging Face architecture by one record: how to read and write `config.json` and weights.

Tensors are renamed, split, stacked or transposed, never changed. Each rule makes one of our tensors and reads only what it
needs, so a checkpoint may be larger than memory.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from recollect.errors import CheckpointError, UnsupportedModelError
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.gpt import GPTModel

Weights: TypeAlias = Mapping[str, str | tuple[str, ...]]
# A layer of the decoder or of multi-token prediction, which has further parts around it.
_IN_LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.(?:transformer_layer\.)?(.*)")

# Settings of training, which do not change a model's results: `config.json` has no such fields.
_NOT_IN_FILE = frozenset(
    {"hidden_dropout", "core_attention", "moe_grouped_gemm", "moe_aux_loss_coeff", "moe_router_load_balancing_type"}
    | {"moe_router_bias_update_rate", "mtp_loss_scaling_factor", "moe_router_dtype", "separate_projections"}
)


@dataclass(frozen=True, slots=True)
class Layout:
    """One way a checkpoint may hold one of our tensors."""

    parts: tuple[str, ...]
    """Names of the tensors whose rows, concatenated, give ours; with `num_experts`, "{}" stands for the expert."""
    num_experts: int = 0
    """How many such tensors ours stacks; 0: it is not a stack."""
    is_transposed: bool = False
    """Their columns are our rows."""

    def names(self) -> list[list[str]]:
        if not self.num_experts:
            return [list(self.parts)]
        return [[part.format(expert) for part in self.parts] for expert in range(self.num_experts)]


@dataclass(frozen=True, slots=True)
class WeightRule:
    """How a checkpoint holds one of our tensors."""

    ours: str
    """Its name here."""
    layouts: tuple[Layout, ...]
    """All can be read, the first is written."""
    rows: tuple[int, ...] = ()
    """Rows of each part; () if there is only one, or they are equal."""
    is_extra: bool = False
    """A second copy in the checkpoint: written, but not read."""

    def read(self, theirs: Mapping[str, Tensor]) -> Tensor:
        """Return our tensor, or theirs itself if nothing has to change."""
        for layout in self.layouts:
            if layout.names()[0][0] in theirs:
                experts = [_joined([_found(theirs, name) for name in names]) for names in layout.names()]
                found = torch.stack(experts) if layout.num_experts else experts[0]
                return found.mT if layout.is_transposed else found
        known = " or ".join(repr(layout.names()[0][0]) for layout in self.layouts)
        raise CheckpointError(
            f"checkpoint: has no {known}, expected it for {self.ours!r}. Is it from a different architecture?"
        )

    def write(self, ours: Tensor) -> Iterator[tuple[str, Tensor]]:
        layout = self.layouts[0]
        if layout.is_transposed:
            ours = ours.mT
        experts = ours.unbind() if layout.num_experts else (ours,)
        for tensor, names in zip(experts, layout.names(), strict=True):
            parts = tensor.split(self.rows) if self.rows else tensor.chunk(len(names))
            yield from zip(names, parts, strict=True)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _found(theirs: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in theirs:
        raise CheckpointError(f"checkpoint: has no {name!r}, expected it next to the related tensors. Is it complete?")
    return theirs[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One of Hugging Face's architectures, such as Llama."""

    name: str
    """For messages."""
    model_type: str
    """As in `config.json`."""
    class_name: str
    """Their class of the whole model."""
    default: TransformerConfig
    """The model whose `config.json` omits all of these fields; it gives their defaults."""
    weights: Callable[[TransformerConfig], Weights]
    """Their modules, or tensors, for each of our modules, by our names; within a layer, without its path.
    Several together are ours; with "{}" for the number of an expert, there are such for each."""
    same: Mapping[str, str]
    """Their field by ours, where both mean the same."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of theirs, and the only value that our models support."""
    repeated: Mapping[str, str] = field(default_factory=dict)
    """Their fields that must equal the field of ours with the given name."""
    activation: str | None = None
    """Their field for the activation."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Our activations by their names; if one has two names, the first is written."""
    read_more: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]] = lambda _fields, _ours: {}
    """Reads fields that no table above describes, from their fields and ours so far."""
    write_more: Callable[[TransformerConfig], dict[str, Any]] = lambda _config: {}
    """The reverse."""
    ignored: str = ""
    """A pattern for tensors that a checkpoint may hold and that no part of a model needs."""
    prefixes: tuple[str, ...] = ("model.",)
    """Prefixes of all names except the LM head's; any is read, the first is written."""
    layers: str = "layers"
    """Where the layers are, behind the prefix."""
    is_transposed: bool = False
    """Whether the columns of their linear layers' matrices are our rows."""
    also: Mapping[str, str] = field(default_factory=dict)
    """Tensors that may replace the others, by ours."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Duplicates of tensors in each layer of multi-token prediction, by ours."""

    def rules(self, config: TransformerConfig) -> Iterator[WeightRule]:
        """Yield a rule for each tensor of a model, in layer order, then the rules for copies."""
        with torch.device("meta"):
            state = GPTModel(config).state_dict()
        weights = self.weights(config)
        group = config.num_query_groups * config.kv_channels
        qkv = (config.num_attention_heads * config.kv_channels, group, group)
        for ours, tensor in state.items():
            if ours == "output_layer.weight":
                if not config.share_embeddings_and_output_weights:
                    yield WeightRule(ours, (Layout(("lm_head.weight",)),))
                continue
            layer, name = "", ours
            if found := _IN_LAYER.fullmatch(ours):
                part, number, name = found.groups()
                layer = f"{self.layers}.{int(number) + config.num_layers * (part == 'mtp')}."
            is_transposed = self.is_transposed and "linear" in name and tensor.dim() == 2
            places = [_parts(weights, name), *([(self.also[name],)] if name in self.also else [])]
            layouts = [
                Layout(tuple(f"{prefix}{layer}{part}" for part in parts), experts, is_transposed)
                for parts in places
                for prefix in self.prefixes
                for experts in [(config.num_moe_experts or 0) if "{}" in parts[0] else 0]
            ]
            yield WeightRule(ours, tuple(layouts), qkv if len(places[0]) == len(qkv) else ())
        for number in range(config.num_layers, config.num_layers + (config.mtp_num_layers or 0)):
            for ours, theirs in self.copies.items():
                copy = Layout((f"{self.prefixes[0]}{self.layers}.{number}.{theirs}",))
                yield WeightRule(ours, (copy,), is_extra=True)

    def read(self, fields: Mapping[str, Any]) -> TransformerConfig:
        require(fields, self.fixed)
        default = self.default.given()
        ours = {name: fields.get(theirs, default.get(name)) for name, theirs in self.same.items()}
        require(fields, {theirs: ours[name] for theirs, name in self.repeated.items()})
        if self.activation is not None and self.activation in fields:
            word = fields[self.activation]
            if word not in self.words:
                words = ", ".join(sorted(self.words))
                raise UnsupportedModelError(f"config.json: {self.activation} is {word!r}, expected one of {words}.")
            ours["activation_func"] = self.words[word]
        if self.default.position_embedding_type == "rope":
            ours["rotary_base"] = _rotary_base(fields, self.default.rotary_base)
        return self.default.changed(**ours, **self.read_more(fields, ours))

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        fields: dict[str, Any] = {theirs: getattr(config, name) for name, theirs in self.same.items()}
        fields |= {"model_type": self.model_type, "architectures": [self.class_name], **self.fixed}
        fields |= {theirs: getattr(config, name) for theirs, name in self.repeated.items()}
        if self.activation is not None:
            by_ours = {ours: theirs for theirs, ours in reversed(list(self.words.items()))}
            fields[self.activation] = by_ours[config.activation_func]
        if self.default.position_embedding_type == "rope":
            fields["rope_theta"] = config.rotary_base
        fields |= self.write_more(config)
        read = self.read(fields)
        for name in (one.name for one in dataclasses.fields(config) if one.name not in _NOT_IN_FILE):
            ours, theirs = getattr(config, name), getattr(read, name)
            if ours != theirs:
                raise UnsupportedModelError(
                    f"TransformerConfig.{name}: got {ours!r}, expected {theirs!r}, because Hugging Face's {self.name} "
                    "has no other."
                )
        return fields


def _parts(weights: Weights, name: str) -> tuple[str, ...]:
    module, _, kind = name.rpartition(".")
    found, end = (weights[name], "") if name in weights else (weights[module], f".{kind}")
    return tuple(part + end for part in ((found,) if isinstance(found, str) else found))


def require(fields: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Check that fields of `config.json`, where they are there, have the only value that our models support."""
    for name, value in values.items():
        if name in fields and fields[name] != value:
            raise UnsupportedModelError(
                f"config.json: {name} is {fields[name]!r}, expected {value!r}, the only value that the reference models "
                "support."
            )


def _rotary_base(fields: Mapping[str, Any], default: float) -> float:
    """Return the base of the rotary frequencies; transformers 5 keeps it in a dictionary."""
    parameters = fields.get("rope_parameters") or {}
    scaling = fields.get("rope_scaling") or {}
    kind = {**scaling, **parameters}.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        raise UnsupportedModelError(
            f"config.json: the rotary frequencies are scaled ({kind!r}), expected 'default': the reference models train on "
            "sequences no longer than the frequencies were made for. Remove the field to load the weights unchanged."
        )
    return float(parameters.get("rope_theta", fields.get("rope_theta", default)))

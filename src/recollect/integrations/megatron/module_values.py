"""Find the values of a layer that each of Megatron's module names stands for.

A value's name begins with the path of the module that computed it, so most parts are modules, found by name anywhere on that
path: the reference models use Megatron's names, Hugging Face's models their own. docs/megatron.md has both.

megatron-core's own layers have the reference models' names, but for `mla_up_proj` (`linear_q_up_proj`, `linear_kv_up_proj`,
and the ops of attention before its core) and `moe_act` (`silu` and its like in `experts`, with the routing weight).

The other names (`gdn_norm_out`, `gdp_in_proj`, `gdp_qkv`, `mhc`) stand for parts that none of these models has.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from recollect.plans.value_names import collective_kind
from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile

_ATTENTIONS = frozenset({"self_attn", "attn", "self_attention", "attention"})
_MLPS = frozenset({"mlp", "block_sparse_moe", "feed_forward"})
_EXPERTS = frozenset({"experts", "router"})
_SHARED_EXPERTS = frozenset({"shared_experts", "shared_expert"})
_ACTIVATIONS = frozenset({"act_fn", "activation_func", "act"})
# As megatron-core's experts compute them, in no separate module, or fused with the gate.
_ACTIVATION_OPS = frozenset({"silu", "gelu", "relu"})
_FUSED_ACTIVATIONS = ("SwiGLU", "GeGLU", "GeLU")
_AFTER_ACTIVATION = frozenset({"mul", "_to_copy"})
_DROPOUTS = frozenset({"dropout", "resid_dropout", "hidden_dropout"})
_ATTENTION_NORMS = frozenset({"input_layernorm", "ln_1"})
_NORMS = _ATTENTION_NORMS | {"pre_mlp_layernorm", "pre_feedforward_layernorm", "ln_2"}
# In models with a second norm before the MLP (Gemma), this one follows the attention, and is not an input of a recomputed
# module.
_NORM_BEFORE_MLP = "post_attention_layernorm"
_LATENT_UP = frozenset({"q_b_proj", "kv_b_proj", "linear_q_up_proj", "linear_kv_up_proj"})
# The first ops of attention kernels, or of their decompositions.
_CORE = ("scaled_dot_product", "flash_attn", "bmm", "softmax")
# Rotation and caches end in one of these; later ops belong to the core.
_BEFORE_CORE = frozenset({"cat", "add", "sub", "copy_", "index_put_", "index_copy_", "stack"})


@dataclass(frozen=True, slots=True)
class _LayerOp:
    """An op with the components of its module path, and its name without the call number."""

    module: tuple[str, ...]
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def is_in(self, names: frozenset[str]) -> bool:
        return not names.isdisjoint(self.module)

    def activates(self) -> bool:
        is_fused = any(word in self.name for word in _FUSED_ACTIVATIONS)
        return self.is_in(_ACTIVATIONS) or self.name in _ACTIVATION_OPS or is_fused


class LayerOps:
    """The ops of a layer by module."""

    def __init__(self, graph: UnitGraph) -> None:
        self.graph = graph
        self.ops: list[_LayerOp] = []
        for op in graph.ops:
            *module, call = op.name.split(".")
            self.ops.append(_LayerOp(tuple(module), call.partition("#")[0], op.inputs, op.outputs))

    @cached_property
    def has_experts(self) -> bool:
        return any(op.is_in(_EXPERTS) for op in self.ops)

    @cached_property
    def attention(self) -> tuple[str, ...]:
        """Path of the attention module; () if there is none."""
        for op in self.ops:
            for depth, component in enumerate(op.module):
                if component in _ATTENTIONS:
                    return op.module[: depth + 1]
        return ()

    @cached_property
    def core(self) -> tuple[int, int]:
        """Indices of the first and last op of attention that the attention module itself computes; (0, -1) if none."""
        own = [index for index, op in enumerate(self.ops) if self.attention and self.is_attentions_own(op)]
        kernels = [index for index in own if any(word in self.ops[index].name for word in _CORE)]
        if not kernels:
            return 0, -1
        before = [index for index in own if index < kernels[0] and self.ops[index].name in _BEFORE_CORE]
        start = min(index for index in own if index > max(before, default=-1))
        last = max(kernels)
        while last + 1 < len(self.ops) and self.is_attentions_own(self.ops[last + 1]):
            last += 1
        return start, last

    @cached_property
    def gathered(self) -> frozenset[int]:
        """The results of all-gathers that may run again, and of the ops that put their parts in order."""
        found: set[int] = set()
        for op in self.ops:
            orders = op.name == "cat" and op.inputs and found.issuperset(op.inputs)
            if orders or collective_kind(op.name).startswith("all_gather"):
                found.update(value for value in op.outputs if not self.graph.values[value].must_keep)
        return frozenset(found)

    @cached_property
    def cast_for_router(self) -> frozenset[int]:
        """The copies in fp32 of the router's inputs: the residual stream and its weight."""
        own = self.values(lambda _, op: "router" in op.module)
        return self.values(lambda _, op: "router" in op.module and op.name == "_to_copy" and own.isdisjoint(op.inputs))

    def is_attentions_own(self, op: _LayerOp) -> bool:
        return op.module in (self.attention, (*self.attention, "attn_dropout"))

    def values(self, is_part: Callable[[int, _LayerOp], bool]) -> frozenset[int]:
        return frozenset(v for index, op in enumerate(self.ops) if is_part(index, op) for v in op.outputs)

    def ops_of(self, values: Iterable[int]) -> frozenset[int]:
        producers = (self.graph.values[value].producer for value in values)
        return frozenset(op for op in producers if op is not None)

    def outputs_of(self, inside: frozenset[int]) -> frozenset[int]:
        read = {v for op in self.ops if inside.isdisjoint(op.outputs) for v in op.inputs}
        returned = {index for index, value in enumerate(self.graph.values) if value.is_output}
        return inside & (read | returned)


def values_of_module(layer: LayerOps, name: str) -> frozenset[int]:
    """Return the indices of the values that a Megatron module computes in a layer; none if the layer lacks it."""
    find = _PARTS.get(name)
    return frozenset(find(layer)) if find is not None else frozenset()


def modules_in(profile: Profile, layers: Collection[str], names: Iterable[str]) -> list[str]:
    graphs = {call.graph for call in profile.calls if call.path in layers}
    found = [LayerOps(profile.graphs[graph]) for graph in graphs]
    return [name for name in names if any(values_of_module(layer, name) for layer in found)]


def _core_attn(layer: LayerOps) -> frozenset[int]:
    named = layer.values(lambda _, op: "core_attention" in op.module)
    if named:
        return named
    start, last = layer.core
    return layer.values(lambda index, op: start <= index <= last and layer.is_attentions_own(op))


def _feed_forward(layer: LayerOps) -> frozenset[int]:
    return layer.values(lambda _, op: op.is_in(_MLPS) and not op.is_in(_DROPOUTS))


def _layernorm(layer: LayerOps) -> frozenset[int]:
    has_own = any(op.is_in(frozenset({"pre_feedforward_layernorm", "pre_mlp_layernorm"})) for op in layer.ops)
    names = _NORMS if has_own else _NORMS | {_NORM_BEFORE_MLP}
    return layer.values(lambda _, op: op.is_in(names))


def _moe_act(layer: LayerOps) -> Iterator[int]:
    """The activation, and in the same module the op that scales its result (a gate, a routing weight) or casts it."""
    activated: set[int] = set()
    for op in layer.ops:
        is_next = op.name in _AFTER_ACTIVATION and not activated.isdisjoint(op.inputs)
        if "experts" in op.module and (is_next or op.activates()):
            yield from op.outputs
            activated.update(op.outputs)


def _expert_fc1(layer: LayerOps) -> frozenset[int]:
    """By its name; or the values that the activation reads from the experts."""
    named = layer.values(lambda _, op: {"experts", "linear_fc1"} <= {*op.module})
    read = {v for op in layer.ops if "experts" in op.module and op.activates() for v in op.inputs}
    return named or layer.values(lambda _, op: "experts" in op.module and not op.activates()) & read


def _mla_up_proj(layer: LayerOps) -> frozenset[int]:
    named = layer.values(lambda _, op: "qkv_up_proj" in op.module)
    if named or not any(op.is_in(_LATENT_UP) for op in layer.ops):
        return named
    start = min(layer.ops_of(_core_attn(layer)), default=0)
    return layer.values(lambda index, op: op.is_in(_LATENT_UP) or (op.module == layer.attention and index < start))


def _attn_norm(layer: LayerOps) -> frozenset[int]:
    return layer.values(lambda _, op: op.is_in(_ATTENTION_NORMS))


def _in_attention(layer: LayerOps, is_part: Callable[[int, int, int], bool]) -> frozenset[int]:
    """Return the values of attention's modules, by op position, and the positions of the core's first and last op."""
    core = layer.ops_of(_core_attn(layer))
    depth = len(layer.attention)
    return layer.values(
        lambda index, op: (
            bool(core)
            and op.module[:depth] == layer.attention
            and len(op.module) > depth
            and not op.is_in(_DROPOUTS)
            and is_part(index, min(core), max(core))
        )
    )


_PARTS: dict[str, Callable[[LayerOps], Iterable[int]]] = {
    "core_attn": _core_attn,
    "mlp": lambda layer: () if layer.has_experts else _feed_forward(layer),
    "moe": lambda layer: _feed_forward(layer) if layer.has_experts else (),
    "shared_experts": lambda layer: layer.values(lambda _, op: op.is_in(_SHARED_EXPERTS)),
    "layernorm": _layernorm,
    "moe_act": _moe_act,
    "mla_up_proj": _mla_up_proj,
    "attn_norm": _attn_norm,
    "mlp_norm": lambda layer: _layernorm(layer) - _attn_norm(layer),
    "qkv_linear": lambda layer: _in_attention(layer, lambda index, first, _: index < first),
    "attn_proj": lambda layer: _in_attention(layer, lambda index, _, last: index > last),
    "expert_fc1": _expert_fc1,
    "fused_group_mlp": lambda layer: layer.values(lambda _, op: "experts" in op.module),
}

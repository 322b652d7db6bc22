"""Apply Megatron's selective module sets to Hugging Face's models, by the part of a layer that each name stands for.

`core_attn`, `mlp`, `moe` and `shared_experts` are ordinary checkpoints of that part (inputs and outputs kept); `layernorm`
and `moe_act` discard the output too (`discarded.py`). Queries, keys and values of `mla_up_proj` are made in the middle of
Hugging Face's attention, where nothing can be put around them: a selective checkpoint of the attention that keeps what
Megatron keeps (latents, attention, output projection) stands for it, and its rows say so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from discarded import Discarded
from peers import ATTENTION, LINEAR, Peer, saving_some_matmuls
from recompute import Forward, Recompute, Replaced, Together
from subject import Step

# Of the five projections of latent attention, in the order of forward: down to the queries' latent vector, down to the latent
# vector of keys and values, and out. The others project up from the latent vectors.
_NOT_UP = (1, 3, 5)


class CoreAttention:
    """Checkpoint `core_attn`, by Hugging Face's interface for attention kernels."""

    def __init__(self, step: Step) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import sdpa_mask

        self._config: Any = step.model.config
        self._name = "sdpa_checkpointed"
        AttentionInterface.register(
            self._name, functools.partial(checkpoint, sdpa_attention_forward, use_reentrant=False)
        )
        AttentionMaskInterface.register(self._name, sdpa_mask)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Use this kernel in a with-block."""
        before = self._config._attn_implementation
        self._config._attn_implementation = self._name
        try:
            yield
        finally:
            self._config._attn_implementation = before


def _checkpointed(modules: Sequence[nn.Module]) -> Recompute:
    if not modules:
        raise ValueError("the model has no such module")
    return Replaced({module: functools.partial(checkpoint, module.forward, use_reentrant=False) for module in modules})


def _experts(layer: nn.Module) -> Any:
    return getattr(layer.mlp, "experts", None)


def dense_mlp(step: Step) -> Recompute:
    """`mlp`: the whole MLP of layers without experts."""
    return _checkpointed([layer.mlp for layer in step.layers.values() if _experts(layer) is None])


def moe(step: Step) -> Recompute:
    """`moe`: router and experts, shared ones too."""
    return _checkpointed([layer.mlp for layer in step.layers.values() if _experts(layer) is not None])


def shared_experts(step: Step) -> Recompute:
    """`shared_experts`: the MLP that all tokens take."""
    shared = [getattr(layer.mlp, "shared_experts", None) for layer in step.layers.values()]
    return _checkpointed([module for module in shared if module is not None])


def layernorm(step: Step) -> Recompute:
    """`layernorm`: both norms of a layer; filled again when the gradient of what follows each is there."""
    forwards: dict[nn.Module, Forward] = {}
    for layer in step.layers.values():
        for norm, reader in ((layer.input_layernorm, layer.self_attn), (layer.post_attention_layernorm, layer.mlp)):
            forwards.update(_discarding(norm, norm.forward, reader))
    return Replaced(forwards)


def _discarding(module: nn.Module, function: Forward, reader: nn.Module) -> dict[nn.Module, Forward]:
    """Discard a module's output after the module that reads it has run."""
    runs: list[Discarded] = []
    return {module: _kept_in(runs, function), reader: _then_discard(reader.forward, runs)}


def _kept_in(runs: list[Discarded], function: Forward) -> Forward:
    """Run a function of one tensor so that its result can be discarded."""

    def run(x: Tensor) -> Tensor:
        runs.append(Discarded(function, x))
        return runs[-1].output

    return run


def _then_discard(reader_forward: Forward, runs: list[Discarded]) -> Forward:
    def read(*args: Any, **kwargs: Any) -> Any:
        output = reader_forward(*args, **kwargs)
        runs.pop().discard(output[0] if isinstance(output, tuple) else output)
        return output

    return read


class MoeAct:
    """`moe_act`: the activation between an expert's two products, discarded once the experts have run."""

    def __init__(self, step: Step) -> None:
        self._gates: dict[nn.Module, Forward] = {}
        forwards: dict[nn.Module, Forward] = {}
        for layer in step.layers.values():
            if (experts := _experts(layer)) is not None:
                runs: list[Discarded] = []
                self._gates[experts] = _kept_in(runs, experts._apply_gate)
                forwards[experts] = _then_discard(experts.forward, runs)
        if not forwards:
            raise ValueError("the model has no experts")
        self._forwards = Replaced(forwards)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Activate it in a with-block."""
        with self._forwards.on():
            for experts, gate in self._gates.items():
                vars(experts)["_apply_gate"] = gate
            try:
                yield
            finally:
                for experts in self._gates:
                    del vars(experts)["_apply_gate"]


def mla_up_proj(step: Step) -> Recompute:
    """`mla_up_proj`: projections up from the latents, rotation and concatenation, as a selective checkpoint."""
    attentions = [layer.self_attn for layer in step.layers.values()]
    return Replaced(saving_some_matmuls(attentions, LINEAR | ATTENTION, lambda number: number in _NOT_UP))


_PARTS: dict[str, Callable[[Step], Recompute]] = {
    "core_attn": CoreAttention,
    "mlp": dense_mlp,
    "moe": moe,
    "shared_experts": shared_experts,
    # Last: those above use a module's original forward, and these two wrap the forwards of the same modules.
    "mla_up_proj": mla_up_proj,
    "moe_act": MoeAct,
    "layernorm": layernorm,
}
_SETS = {
    "dense": ("core_attn", "mlp", "layernorm", "core_attn+mlp", "mlp+layernorm"),
    "moe": ("core_attn", "layernorm", "moe_act", "moe", "moe+layernorm", "moe_act+layernorm"),
    "mla": (
        "shared_experts",
        "moe_act",
        "mla_up_proj",
        "mlp+mla_up_proj",
        "moe",
        "mla_up_proj+moe_act+layernorm",
        "mlp+moe+mla_up_proj",
    ),
}


class _InTurn:
    """Several parts, each made while the previous ones are active, because they wrap the same modules."""

    def __init__(self, step: Step, parts: Sequence[Callable[[Step], Recompute]]) -> None:
        self._made: list[Recompute] = []
        for part in parts:
            with Together(self._made).on():
                self._made.append(part(step))

    @contextmanager
    def on(self) -> Iterator[None]:
        """Activate all of them in a with-block."""
        with Together(self._made).on():
            yield


def megatron_peers(step: Step) -> list[Peer]:
    """Return the sets that people use on this kind of model (recipes of Megatron-Bridge and ROLL)."""
    return [_peer(names) for names in _SETS.get(step.model_name, ())]


def _peer(names: str) -> Peer:
    parts = [_PARTS[name] for name in names.split("+")]
    note = " (mla_up_proj as SAC of the attention)" if "mla_up_proj" in names else ""
    return Peer(f"Megatron {names}{note}", "selective modules", lambda step: _InTurn(step, parts))

"""Peers that go through `torch.compile` (inductor): per block or the whole model, alone or with checkpoints inside.

Each variant compiles a copy of the code of `_run`, because Dynamo keeps what it compiled with the code object, and would
find the graph of one variant when another one runs.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from peers import ATTENTION, GROUPED, LINEAR, MATMUL, Peer
from recompute import Forward, Forwards, Recompute, Replaced, Together
from subject import Step

BACKEND = "inductor"
BUDGETS = (1.0, 0.7, 0.5, 0.3, 0.1)
_SAVE = list(MATMUL | LINEAR | GROUPED | ATTENTION)
_CONTEXTS = functools.partial(create_selective_checkpoint_contexts, _SAVE)


def _run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def _run_checkpointed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    def inner(*args: Any, **kwargs: Any) -> Any:
        return type(module).forward(module, *args, **kwargs)

    return checkpoint(inner, *args, use_reentrant=False, **kwargs)


def _run_selectively(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    def inner(*args: Any, **kwargs: Any) -> Any:
        return type(module).forward(module, *args, **kwargs)

    return checkpoint(inner, *args, use_reentrant=False, context_fn=_CONTEXTS, **kwargs)


def compiled(modules: Mapping[str, nn.Module], name: str, run: Forward = _run, *, backend: str = BACKEND) -> Forwards:
    """Compile the forwards of modules; modules of one class share their code."""
    assert isinstance(run, types.FunctionType)
    copy = types.FunctionType(run.__code__.replace(co_name=f"run_{abs(hash(name))}"), run.__globals__, name)
    copy.__kwdefaults__ = run.__kwdefaults__
    made = torch.compile(copy, dynamic=False, backend=backend)
    return {module: functools.partial(made, module) for module in modules.values()}


class WithBudget:
    """Set the partitioner's `activation_memory_budget` while a variant runs; it is read when the graph is compiled."""

    def __init__(self, inner: Recompute, budget: float) -> None:
        self._inner = inner
        self._budget = budget

    @contextmanager
    def on(self) -> Iterator[None]:
        """Activate both in a with-block."""
        with functorch_config.patch(activation_memory_budget=self._budget), self._inner.on():
            yield


@dataclass(frozen=True)
class _Variants:
    """Makes variants for one backend of `torch.compile`."""

    backend: str

    def per_block(self, name: str, run: Forward = _run, budget: float = 1.0) -> Callable[[Step], Recompute]:
        return lambda step: WithBudget(Replaced(compiled(step.layers, name, run, backend=self.backend)), budget)

    def whole(self, name: str, run_layer: Forward | None = None, budget: float = 1.0) -> Callable[[Step], Recompute]:
        def make(step: Step) -> Recompute:
            layers = {} if run_layer is None else {m: functools.partial(run_layer, m) for m in step.layers.values()}
            model = compiled({"": step.model}, name, backend=self.backend)
            return WithBudget(Together([Replaced(layers), Replaced(model)]), budget)

        return make


def compiled_peers(backend: str = BACKEND) -> list[Peer]:
    """Return all variants for a backend of `torch.compile`; others than inductor are for smoke tests."""
    make = _Variants(backend)
    blocks = [(f"compiled blocks, budget {b}", b) for b in BUDGETS]
    wholes = [(f"compiled whole, budget {b}", b) for b in BUDGETS]
    peers = [Peer(name, "torch.compile per block", make.per_block(name, budget=budget)) for name, budget in blocks]
    peers += [Peer(name, "torch.compile of the model", make.whole(name, budget=budget)) for name, budget in wholes]
    with_checkpoints = [("full", _run_checkpointed), ("SAC matmuls", _run_selectively)]
    for what, run in with_checkpoints:
        name = f"compiled blocks, {what}"
        peers.append(Peer(name, "torch.compile per block, with a checkpoint in each", make.per_block(name, run)))
        name = f"compiled whole, {what}"
        peers.append(Peer(name, "torch.compile of the model, with a checkpoint of each block", make.whole(name, run)))
    return peers

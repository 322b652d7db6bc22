"""Implements the tape: sees each op of a unit's forward, drops what the plan says, and recomputes it for backward.

Two hooks do the work while a unit runs forward. `TapeMode` sees each ATen op below autograd and remembers how each
result to be dropped was made. The saved-tensor hooks then hand autograd a `TapeValue` for every tensor that it wants to
save: one that holds the tensor, or one that only knows how to make it.

NOTE [ Rules of the tape ]
1. Identity. A tensor is recognised by its storage, layout and version; anything not recognised is kept.
2. Mutation. An in-place op makes a new value on the same storage; whatever holds the old content first gets a private
   copy. A change that the tape cannot see raises `MutatedValueError` at replay, and never gives a wrong gradient.
3. Randomness. A random op is kept, or runs again from the generator state that it had.
4. Choices (`topk`, `sort`, ...), data-dependent shapes and collectives are kept (`facts.py`).
5. Tensor subclasses desugar first; their inner tensors are recorded.
6. A leaf whose storage was freed (FSDP2 resharding) must be back before the unit's backward; otherwise it is an error.
7. What runs behind the dispatcher's back is kept: buffers filled by foreign kernels, and whatever runs with gradients
   switched off, because custom autograd Functions and compiled regions may write to results of ops unseen.
8. The only state is the running unit's frame, one per thread: any number of forwards may be in flight.
9. Once a module has run twice, it runs out of the mode's sight if the plan drops none of its values and it writes
   nothing in place: the tape keeps the results of ops it does not see. If it saves nothing dropped, it also runs
   without the hooks. Should it save such a value later, that is kept; should it write to a held tensor, rule 2 applies.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from recollect._torch_private import below_autograd, disable_autocast, untraced
from recollect.engine.policy import Policy
from recollect.engine.subclasses import strided_tensors
from recollect.engine.tape_mode import TapeMode
from recollect.engine.tape_state import RUNS_TO_SETTLE, TapeState
from recollect.engine.values import TapeValue, forget_record, record_of, watch
from recollect.plans.action import Action


class Tape(TapeState):
    """Runs the units of one applied model, and knows which one is running on this thread."""

    def __init__(self, policy: Policy, *, runs_to_settle: int = RUNS_TO_SETTLE) -> None:
        super().__init__(policy, runs_to_settle=runs_to_settle)
        self._local = threading.local()

    @property
    def mode(self) -> TapeMode | None:
        """The mode of the unit running on this thread, if any."""
        return getattr(self._local, "mode", None)

    def new_mode(self, unit_path: str) -> TapeMode:
        """Return a mode for one call of a unit."""
        return TapeMode(self, unit_path)

    def run(self, unit_path: str, forward: Any, args: Any, kwargs: Any) -> Any:
        """Run a unit's forward on the tape."""
        outer = self.mode
        with self._watching(unit_path) if outer is None else _inside(outer, unit_path) as mode:
            output = mode.run_module("", forward, args, kwargs)
        if self.policy.output_action(unit_path) is Action.KEEP:
            self.hold_outputs(unit_path, output)
        return output

    @contextmanager
    def _watching(self, unit_path: str) -> Iterator[TapeMode]:
        mode = self.new_mode(unit_path)
        self._local.mode = mode
        try:
            with saved_tensors_hooks(mode.pack, self.unpack), mode:
                yield mode
            if mode.unsettled:
                self.learn(mode.unsettled)
        finally:
            self._local.mode = None

    def hold_outputs(self, unit_path: str, output: Any) -> None:
        """Keep a unit's output: from here on, its storages are held by whatever needs them."""
        for tensor in strided_tensors(output):
            storage = tensor.untyped_storage()
            record = record_of(storage)
            if record is None:
                continue
            forget_record(storage)
            size, stride, offset, dtype = record.layout
            if record.is_current(tensor._version) and record.base.tensor is None and tensor.dtype == dtype:
                held, version = self.alias(tensor, True)
                with torch.no_grad():
                    record.base.hold(held.as_strided(size, stride, offset), version)
                record.base.label = (unit_path, "", "return")
                watch(record.base, storage)

    @untraced
    def unpack(self, packed: Any) -> torch.Tensor:
        """Give backward a tensor that was saved, recomputing it if it was dropped."""
        if type(packed) is not TapeValue:
            rebuilt: torch.Tensor = packed.rebuild(self.unpack)
            return rebuilt
        value: TapeValue = packed
        if value.tensor is not None:
            return value.fetch()
        # As ops ran in forward: below autograd and autocast, with gradients switched on, which some kernels check.
        with torch.enable_grad(), below_autograd(), disable_autocast():
            tensor: torch.Tensor = value.get()
        return tensor


@contextmanager
def _inside(mode: TapeMode, unit_path: str) -> Iterator[TapeMode]:
    """Run a unit within another one, with its ops under its own names."""
    outer = mode.unit_path, mode.counts
    mode.unit_path, mode.counts = unit_path, {}
    try:
        yield mode
    finally:
        mode.unit_path, mode.counts = outer

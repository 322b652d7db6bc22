"""The tape: sees every op of a unit's forward, forgets what the plan drops, and computes it again when backward asks.

Two hooks do the work while a unit runs forward. `TapeMode` sees each ATen op below autograd and, for a result that is
to be dropped, remembers how it was made. The saved-tensor hooks then hand autograd a `TapeValue` for every tensor that
it wants to save: one that holds the tensor, or one that only knows how to make it.

NOTE [ Rules of the tape ]
1. Identity. A tensor is recognised by its storage, layout and version; what is not recognised is kept.
2. Mutation. An in-place op makes a new value on the same storage. Whoever holds the old content gets a private copy
   first. A change that the tape cannot see raises `MutatedValueError` at replay, never a wrong gradient.
3. Randomness. A random op is kept, or runs again under the generator state that it had.
4. Choices (`topk`, `sort`, ...), shapes that depend on data, and collectives are kept (`facts.py`).
5. Tensor subclasses desugar first; their inner tensors are recorded.
6. A leaf whose storage was freed (FSDP2 resharding) must be back before the unit's backward; else it is an error.
7. What runs behind the dispatcher is kept: buffers filled by foreign kernels, and whatever runs with gradients switched
   off, because custom autograd Functions and compiled regions may write to the results of ops out of sight.
8. No state but the frame of the running unit, per thread: any number of forwards may be in flight.
9. Modules of which the plan drops nothing run out of the mode's sight once they have run twice, unless they write in
   place: to the tape their ops are ones whose results are kept. Those that save nothing dropped run without the hooks
   as well. Should they do so later, it is kept; should they write to what is held, rule 2 finds it.
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
        """The mode of the unit that is running on this thread."""
        return getattr(self._local, "mode", None)

    def new_mode(self, unit_path: str) -> TapeMode:
        """Return the mode for one call of a unit."""
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
        """Keep what a unit returns: from here on its storages are held by whoever needs them."""
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
        """Give backward the tensor that it saved; compute it if it was dropped."""
        if type(packed) is not TapeValue:
            rebuilt: torch.Tensor = packed.rebuild(self.unpack)
            return rebuilt
        value: TapeValue = packed
        if value.tensor is not None:
            return value.fetch()
        # As the ops ran in forward: below autograd and autocast, with gradients switched on, which some kernels look at.
        with torch.enable_grad(), below_autograd(), disable_autocast():
            tensor: torch.Tensor = value.get()
        return tensor


@contextmanager
def _inside(mode: TapeMode, unit_path: str) -> Iterator[TapeMode]:
    """A unit runs within another one: its ops have its own names."""
    outer = mode.unit_path, mode.counts
    mode.unit_path, mode.counts = unit_path, {}
    try:
        yield mode
    finally:
        mode.unit_path, mode.counts = outer

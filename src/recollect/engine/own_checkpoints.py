"""Has plans decide in place of a model's own calls of `torch.utils.checkpoint`, which is one more rule for what to keep.

Where plans or recorders are in place, a checkpoint inside a unit runs its function plainly. So does one around units, and keeps
what is saved between them. PyTorch's own are one that no unit runs in, which no plan reaches, one inside a unit with a
`context_fn`, and one with `use_reentrant=True`, which adds up gradients in a different order than its function.
"""

import functools
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, Final

import torch

from recollect._torch_functions import Checkpoint, CheckpointHooks, have_checkpoints_begin
from recollect._torch_private import top_saved_tensors_hooks, untraced
from recollect.engine.placed_forward import PlacedForward
from recollect.engine.policy import DropAll
from recollect.engine.tape import Tape
from recollect.engine.tape_mode import TapeMode
from recollect.engine.values import TapeValue
from recollect.errors import ConfigWarning
from recollect.warning import warn_user

_TAPE: Final = Tape(DropAll())
_NO_EFFECT: Final = (
    "torch.utils.checkpoint has no effect on layers that recollect plans: the plan decides what they recompute. Call them "
    "without it, and this warning goes away."
)


class _Units(threading.local):
    """How many units are running on this thread, and how many have begun."""

    running = begun = 0


_units = _Units()


@contextmanager
def running_unit() -> Iterator[None]:
    _units.begun += 1
    _units.running += 1
    try:
        yield
    finally:
        _units.running -= 1


@functools.cache
def tell_once(text: str) -> None:
    """Warn of a checkpoint, once in the process: it is called in each layer of each step."""
    warn_user(f"recollect: {text}", ConfigWarning)


class _KeepingMode(TapeMode):
    """Never entered: packs tensors as the tape does those that have no recipe."""

    def known_value(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> TapeValue | None:
        return None


def _outside_units(checkpoint: Checkpoint) -> Checkpoint:
    """Hold saved tensors in both ways until the checkpoint ends, when it is known whether a unit ran in it."""
    begun, mode, saved = _units.begun, _KeepingMode(_TAPE, ""), list[list[Any]]()
    with closing(checkpoint):
        next(checkpoint)
        hooks = top_saved_tensors_hooks()
        if hooks is None:  # The compiler traces it, and there are none.
            yield
            next(checkpoint, None)
            return
        pack, unpack = hooks

        @untraced
        def hold(tensor: torch.Tensor) -> list[Any]:
            saved.append([mode.pack(tensor), pack(tensor)])
            return saved[-1]

        @untraced
        def give(held: list[Any]) -> torch.Tensor:
            return unpack(held[1]) if held[0] is None else _TAPE.unpack(held[0])

        with CheckpointHooks(hold, give):
            yield
        has_units = _units.begun > begun
        for held in saved:
            held[has_units] = None
        saved.clear()  # The graph holds the hooks.
        next(checkpoint, None)
    if has_units:
        tell_once(_NO_EFFECT)


def _begin(checkpoint: Checkpoint, has_context: bool) -> Checkpoint:
    if not PlacedForward.placed or (_units.running and has_context):
        yield from checkpoint
    elif _units.running:
        tell_once(_NO_EFFECT)
        yield
    else:
        yield from _outside_units(checkpoint)


have_checkpoints_begin(_begin)

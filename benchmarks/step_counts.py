"""Count what a training step keeps and recomputes, for any model and any way to recompute.

All counts are of one step into gradients that are there before it begins, after one step that was not counted.

NOTE [ What is counted ]
1. Kept bytes: what is alive when forward has returned the loss, beyond what was alive before the first step (parameters,
   gradients, batch): what backward will use, the loss, and whatever else the model holds. Left out are tables that one step
   makes and all later ones use; a model names their bytes.
2. Peak bytes: the most bytes alive at any moment of forward, loss and backward, beyond the same.
3. Ops of backward: ATen ops that PyTorch dispatches below autograd while `loss.backward()` runs, recompute and gradients
   alike. Left out are ops that compute nothing: those whose results share memory with their arguments (views, `detach`), those
   that only allocate (`empty` and its like), and those that copy, be it into another layout or dtype (`clone`, `_to_copy`,
   `copy_`). What is recomputed is the difference to the same step without recompute.
4. States of random generators are left out of all bytes: with a GPU they are 16 bytes in host memory, on a CPU 5 KB of what is
   measured.
5. FLOP of backward: of matrix products among them, by PyTorch's `FlopCounterMode`.
"""

from __future__ import annotations

import gc
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import recollect
from recollect.engine import draws

_ALLOCATES = ("empty", "new_empty", "resize_", "set_")
_COPIES = frozenset({"clone", "_to_copy", "copy_", "contiguous", "repeat"})


@dataclass(frozen=True, kw_only=True)
class StepCounts:
    """The counts of one step; see NOTE [ What is counted ].

    Attributes:
        digests: SHA-256 of the bytes of the loss and of each gradient, by name.
    """

    kept_bytes: int
    peak_bytes: int
    backward_ops: Counter[str]
    backward_flop: int
    digests: Mapping[str, str]

    def ops_again(self, plain: StepCounts) -> Counter[str]:
        """Return the recomputed ops by name, compared with the step without recompute.

        Raises:
            ValueError: an op runs less often than without recompute, so that the two are not the same step.
        """
        again = Counter(self.backward_ops)
        again.subtract(plain.backward_ops)
        if missing := -again:
            raise ValueError(f"ops_again: these ops run less often than without recompute: {dict(missing)}")
        return +again

    def first_difference(self, plain: StepCounts) -> str | None:
        """Return the name of the first gradient whose bits differ; None if none does."""
        names = {**plain.digests, **self.digests}
        return next((name for name in names if self.digests.get(name) != plain.digests.get(name)), None)


def _grouped_flop(left: Sequence[int], right: Sequence[int], *args: object, **kwargs: object) -> int:
    """FLOP of a grouped product, by the shapes of its factors; PyTorch does not count it. Each row is in one group."""
    return 2 * math.prod(left) * right[-1]


class OpCounter(TorchDispatchMode):
    """Count the ops that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _computes(func):
            self.ops[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def _computes(func: Any) -> bool:
    name = func._schema.name.removeprefix("aten::")
    if name.startswith(_ALLOCATES) or name in _COPIES or name == "_unsafe_view":  # a view that autograd is not told of
        return False
    only_views = all(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    return not (only_views and func._schema.returns)


@contextmanager
def uncounted_generator_states() -> Iterator[None]:
    """In a with-block, keep states of random generators in NumPy's memory, which the meter does not see."""
    torch_get, begin = torch.get_rng_state, draws.Draw.__init__

    def elsewhere(state: Tensor) -> Tensor:
        return torch.from_numpy(state.numpy().copy())

    def begin_elsewhere(draw: draws.Draw, generator: torch.Generator) -> None:
        begin(draw, generator)
        draw.state = elsewhere(draw.state)

    found: tuple[Any, Any] = (torch, draws.Draw)
    found[0].get_rng_state, found[1].__init__ = lambda: elsewhere(torch_get()), begin_elsewhere
    try:
        yield
    finally:
        found[0].get_rng_state, found[1].__init__ = torch_get, begin


def resident_bytes(
    model: nn.Module, forward: Callable[[], Tensor], reset: Callable[[], None], table_bytes: Callable[[], int]
) -> int:
    """Return the bytes alive before a model's first step, and those of tables that steps share; runs that step.

    What one step leaves behind until the next one is not among them.
    """
    _begin(model, reset)
    found = recollect.measure_peak(lambda: None, device="cpu").start_bytes
    forward().backward()
    return found + table_bytes()


def count_step(
    model: nn.Module, forward: Callable[[], Tensor], reset: Callable[[], None], resident_bytes: int
) -> StepCounts:
    """Run a step four times: to warm up, then for its kept bytes, its peak and its ops.

    Args:
        model: whose gradients are added up.
        forward: computes the loss.
        reset: sets the random state, so that all steps are the same.
        resident_bytes: as `resident_bytes` found.
    """
    with uncounted_generator_states():
        return _count_step(model, forward, reset, resident_bytes)


def _begin(model: nn.Module, reset: Callable[[], None]) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    reset()
    gc.collect()


def _count_step(
    model: nn.Module, forward: Callable[[], Tensor], reset: Callable[[], None], resident_bytes: int
) -> StepCounts:
    _begin(model, reset)
    forward().backward()
    _begin(model, reset)
    held = recollect.measure_peak(forward, device="cpu")
    held.result.backward()
    kept_bytes = held.end_bytes - resident_bytes
    del held
    _begin(model, reset)
    peak = recollect.measure_peak(lambda: forward().backward(), device="cpu")
    _begin(model, reset)
    counter, flop = (
        OpCounter(),
        FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: _grouped_flop}),
    )
    with counter:  # Around forward too: the tape runs ops again under the modes that they ran under.
        loss = forward()
        counter.ops.clear()
        with flop:
            loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return StepCounts(
        kept_bytes=kept_bytes,
        peak_bytes=peak.peak_bytes - resident_bytes,
        backward_ops=counter.ops,
        backward_flop=flop.get_total_flops(),
        digests={name: _digest(tensor) for name, tensor in {"the loss": loss.detach(), **found}.items()},
    )


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()

"""Tests whether the recipe of a custom autograd Function's call gives the results of the call, and at what cost."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from recollect._torch_functions import without_modes
from recollect._torch_private import below_autograd, disable_autocast
from recollect.engine.content import has_same_bits
from recollect.engine.function_call import FunctionCall
from recollect.engine.function_run import FunctionRun
from recollect.tensors import tensors_in


class RunsAgain:
    """Runs a recipe, on the arguments of its call.

    `are_equal`: whether all its results so far had the same bits as in the call. A forward that depends on hidden
    state (a counter, a different library's random numbers) gives different results.
    """

    def __init__(self, run: FunctionRun, call: FunctionCall) -> None:
        self._run = run
        self._call = call
        self.are_equal = True

    @property
    def kind(self) -> tuple[Any, ...]:
        """The key that distinguishes calls with different work: the Function, what requires grad, and the results."""
        needs_grad = tuple(tensor.requires_grad for tensor in tensors_in(self._run.args))
        return (self._run.function, needs_grad, tuple(self._call.layouts))

    @contextmanager
    def as_in_backward(self) -> Iterator[None]:
        """Within the block, `__call__` and `compare` run as backward would run them."""
        with without_modes(), torch.enable_grad(), below_autograd(), disable_autocast():
            yield

    def __call__(self) -> list[Any]:
        """Run it; return its results. Parameters are copied, as backward will have to gather them."""
        return self._call(list(self._run.arguments.tensors), False, torch.clone)

    def compare(self, results: list[Any]) -> None:
        self.are_equal &= all(has_same_bits(made.tensor, results[made.slot]) for made in self._run.made)

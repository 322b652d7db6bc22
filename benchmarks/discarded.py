"""Megatron's output-discarding recompute: free an output after its readers have run, and recompute it in backward.

Written from what Megatron-LM's `CheckpointWithoutOutput` does (core/tensor_parallel/random.py). Megatron points the old
output at the recomputed memory, which needs C++; here the recomputed bytes are copied and their own memory is freed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recompute import Forward


class Discarded:
    """One call of a function of tensors, without its graph.

    Attributes:
        output: the result; empty between `discard` and the moment in backward when `hook_tensor` has its gradient.
    """

    def __init__(self, function: Forward, *args: Tensor) -> None:
        self._function = function
        self._args = args
        self.output: Tensor = _WithoutGraph.apply(self, *args)

    def discard(self, hook_tensor: Tensor) -> None:
        """Free the output after its readers have run; backward computes the gradient of `hook_tensor` before theirs."""
        storage = self.output.untyped_storage()
        self._num_bytes = storage.nbytes()
        storage.resize_(0)
        hook_tensor.register_hook(self._fill)

    def compute(self) -> Tensor:
        """Run the function on its arguments."""
        result: Tensor = self._function(*self._args)
        return result

    def _fill(self, gradient: Tensor) -> None:
        self._leaves = [arg.detach().requires_grad_(arg.requires_grad) for arg in self._args]
        with torch.enable_grad():
            self._again = self._function(*self._leaves)
        storage = self.output.untyped_storage()
        storage.resize_(self._num_bytes)
        storage.copy_(
            self._again.untyped_storage()
        )  # copies storages, so that autograd's version counters do not change
        self._again.untyped_storage().resize_(0)

    def backward(self, gradient: Tensor) -> list[Tensor | None]:
        """Return the gradients of the arguments, and accumulate those of parameters."""
        torch.autograd.backward(self._again, gradient)
        gradients = [leaf.grad for leaf in self._leaves]
        del self._again, self._leaves, self._args, self.output
        return gradients


class _WithoutGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Discarded, *args: Tensor) -> Tensor:
        ctx.run = run
        return run.compute()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, *ctx.run.backward(gradient)

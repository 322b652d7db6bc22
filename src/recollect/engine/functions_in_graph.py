"""Looks for custom autograd Functions in the graph of a unit, where PyTorch no longer shows their calls.

Their ops were seen like any others, but not that they may write to an argument out of sight, which the tape may have dropped.
"""

from __future__ import annotations

from typing import Any

import torch

from recollect.engine.function_run import may_run_again
from recollect.errors import UnsupportedModelError
from recollect.plans.paths import unit_words
from recollect.tensors import tensors_held

__all__ = ["check_no_functions"]


def check_no_functions(unit_path: str, args: Any, kwargs: Any, output: Any) -> None:
    """Raise an error if a unit called a Function between these arguments and its output.

    Raises:
        UnsupportedModelError: it did.
    """
    seen: set[Any] = {tensor.grad_fn for tensor in tensors_held((args, kwargs))} | {None}
    pending: list[Any] = [tensor.grad_fn for tensor in tensors_held(output)]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        function: Any = getattr(node, "_forward_cls", None)
        if isinstance(node, torch.autograd.function.BackwardCFunction) and may_run_again(function):
            raise UnsupportedModelError(
                f"{unit_words(unit_path)} calls the autograd Function {function.__name__}, and in torch {torch.__version__} "
                "recollect does not see such calls, so that a plan could give wrong gradients. Install a version of PyTorch "
                f"that recollect is tested with, or leave {unit_words(unit_path)} out of the plan."
            )
        pending += [following for following, _ in node.next_functions]

"""Rules on errors and warnings that PyTorch raises here and now, so that a change of their texts is noticed."""

import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import recollect


def input_() -> Tensor:
    return torch.randn(16, 8, requires_grad=True)


def said(step: Callable[[], object]) -> str:
    """What a step prints that fails or warns: its warnings, and the traceback."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            step()
            error = ""
        except Exception:
            error = traceback.format_exc()
    return "".join(warnings.formatwarning(w.message, w.category, w.filename, w.lineno) for w in caught) + error


def selective(function: Callable[[Tensor], Tensor], x: Tensor, saved: object = torch.ops.aten.mm.default) -> Tensor:
    def policy(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is saved else CheckpointPolicy.PREFER_RECOMPUTE

    return checkpoint(
        function, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy)
    )


def moving_rows() -> None:
    layer, runs = nn.Linear(8, 8), []

    def expert(x: Tensor) -> Tensor:
        runs.append(1)
        return torch.relu(layer(x[: 8 + len(runs)])).sum()

    checkpoint(expert, input_(), use_reentrant=False).backward()


def growing_cache() -> None:
    layer, cache = nn.Linear(8, 8), []

    def attention(x: Tensor) -> Tensor:
        cache.append(layer(x).detach())
        keys = torch.cat(cache, dim=1)
        return torch.softmax(x @ keys.transpose(1, 2), -1) @ keys

    checkpoint(attention, torch.randn(2, 4, 8, requires_grad=True), use_reentrant=False).sum().backward()


def shrinking() -> None:
    sizes = [6, 2]
    checkpoint(lambda x: x[:, : sizes.pop(0)].exp().sum(), input_(), use_reentrant=False).backward()


def other_precision() -> None:
    runs: list[int] = []

    def layer(x: Tensor) -> Tensor:
        runs.append(1)
        return (x.bfloat16() if len(runs) == 1 else x).exp().float()

    checkpoint(layer, input_(), use_reentrant=False).sum().backward()


def other_ops() -> None:
    runs: list[int] = []

    def layer(x: Tensor) -> Tensor:
        runs.append(1)
        return x.exp() if len(runs) > 1 else x.exp().sin().exp()

    checkpoint(layer, input_(), use_reentrant=False).sum().backward()


def frozen() -> None:
    layer = nn.Linear(8, 8).requires_grad_(False)
    checkpoint(layer, torch.randn(2, 8), use_reentrant=True).sum().backward()


def nothing_to_do() -> None:
    checkpoint(lambda x: x.detach(), input_(), use_reentrant=True).sum().backward()


def reentrant_gradient() -> None:
    x = input_()
    torch.autograd.grad(checkpoint(nn.Linear(8, 8), x, use_reentrant=True).sum(), x)


def written_in_place() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    selective(lambda x: (x @ weight).mul_(2).sin(), input_()).sum().backward()


def one_op_more() -> None:
    weight = torch.randn(8, 8)
    runs: list[int] = []

    def layer(x: Tensor) -> Tensor:
        runs.append(1)
        with torch.no_grad():  # as what logs or profiles does
            for _ in runs[1:]:
                x @ weight
        return (x @ weight).sin()

    selective(layer, input_()).sum().backward()


def backward_twice() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    loss = selective(lambda x: (x @ weight).sin(), input_()).sum()
    loss.backward(retain_graph=True)
    loss.backward()


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        ctx.saved_tensors  # noqa: B018
        ctx.saved_tensors  # noqa: B018
        return gradient * 2


def read_twice() -> None:
    checkpoint(lambda x: ReadsTwice.apply(x.sin()), input_(), use_reentrant=False).sum().backward()


def overwritten() -> None:
    y = nn.Linear(8, 8)(input_()).exp()
    y.add_(1)
    y.sum().backward()


STEPS: dict[str, Callable[[], object]] = {
    "metadata-routing": moving_rows,
    "metadata-cache": growing_cache,
    "metadata-other": shrinking,
    "metadata-dtype": other_precision,
    "number-of-tensors": other_ops,
    "no-grad-fn": frozen,
    "no-input-requires-grad": frozen,
    "nothing-to-checkpoint": nothing_to_do,
    "reentrant-by-default": lambda: checkpoint(nn.Linear(8, 8), input_()),
    "reentrant-keywords": lambda: checkpoint(lambda x, mask: x, input_(), use_reentrant=True, mask=None),
    "reentrant-and-grad": reentrant_gradient,
    "selective-mutated": written_in_place,
    "selective-not-found": one_op_more,
    "selective-backward-twice": backward_twice,
    "unpacked-twice": read_twice,
    "changed-in-place": overwritten,
    "host-out-of-memory": lambda: torch.empty(2**48),
}


@pytest.mark.parametrize("rule", STEPS)
def test_raised(rule: str) -> None:
    if rule == "selective-not-found" and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 takes it for a second backward")
    text = said(STEPS[rule])
    found = recollect.diagnose(text)
    # The warning that comes before says why there is no gradient.
    assert [finding.rule for finding in found] == ["no-input-requires-grad" if rule == "no-grad-fn" else rule], text


_READY_TWICE = """
import os, sys, traceback
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

class Twice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(Twice(), find_unused_parameters=True)
try:
    model(torch.randn(16, 8, requires_grad=True)).sum().backward()
except Exception:
    sys.stdout.write(traceback.format_exc())
sys.stdout.flush()
# Without clearing up: the group waits for its threads, one of which may wait for the interpreter's lock.
os._exit(0)
"""


def test_ready_twice() -> None:
    command = [sys.executable, "-W", "ignore", "-c", _READY_TWICE]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    (finding,) = recollect.diagnose(text)
    assert (finding.rule, finding.certainty) == ("ready-twice", "certain")


def test_shapes_are_named() -> None:
    (finding,) = recollect.diagnose(said(moving_rows))
    assert finding.problem.endswith("saved [9, 8] float32, recomputed [10, 8] float32.")

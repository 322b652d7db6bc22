"""Writes that raise no version, one kind each: those of c10d's collectives, and of kernels that get an address."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.fsdp import fully_shard

from blocks import Computes, built
from gradients import DifferentStepsError, assert_same_gradients, gradients
from policies import FULL, NOTHING_KEPT, Random
from recollect.applying import apply_policy
from recollect.errors import MutatedValueError

WIDTH = 8
Write = Callable[[Tensor], Any]


def doubled_by_address(x: Tensor) -> None:
    count = x.untyped_storage().nbytes() // 4
    numbers = (ctypes.c_float * count).from_address(x.untyped_storage().data_ptr())
    numbers[:] = [2 * number for number in numbers]


def received(x: Tensor) -> None:
    other = 1 - dist.get_rank()
    sent = dist.isend(x.clone(), other)
    assert sent is not None
    dist.recv(x, other)
    sent.wait()


def coalesced(x: Tensor) -> None:
    with _coalescing_manager():
        dist.all_reduce(x[0])
        dist.all_reduce(x[1])


COLLECTIVES: dict[str, Write] = {
    "all_reduce": dist.all_reduce,
    "of a view": lambda x: dist.all_reduce(x[1:].view(-1)),
    "asynchronous": lambda x: dist.all_reduce(x, async_op=True).wait(),
    "coalesced": coalesced,
    "all_reduce_coalesced": lambda x: dist.all_reduce_coalesced([x[0], x[1]]),
    "broadcast": lambda x: dist.broadcast(x, 0),
    "reduce": lambda x: dist.reduce(x, 0),
    "all_gather": lambda x: dist.all_gather([x[0], x[1]], x[2].clone()),
    "all_gather_into_tensor": lambda x: dist.all_gather_into_tensor(x[:2], x[2:3].clone()),
    "reduce_scatter": lambda x: dist.reduce_scatter_tensor(x[:2], x.clone()),
    "all_to_all_single": lambda x: dist.all_to_all_single(x, x.clone()),
    "scatter": lambda x: dist.scatter(x[0], [x[1].clone(), x[2].clone()] if dist.get_rank() == 0 else None),
    "gather": lambda x: dist.gather(x[2].clone(), [x[0], x[1]] if dist.get_rank() == 0 else None),
    "receive": received,
    "in-place functional": lambda x: torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_reduce_(x, "sum", dist.group.WORLD.group_name)
    ),
    "of a group object": lambda x: dist.group.WORLD.allreduce([x]).wait(),
}
UNSEEN: dict[str, Write] = {
    "of a backend": lambda x: dist.group.WORLD._get_backend(x.device).allreduce([x]).wait(),
    "by address": doubled_by_address,
}


class Written(torch.autograd.Function):
    """Has its argument written to, and returns it; keeps what it gets, as it gets a function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, write: Write) -> Tensor:
        write(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 2, None


def in_a_function(x: Tensor, write: Write) -> Tensor:
    output: Tensor = Written.apply(x, write)  # type: ignore[no-untyped-call]
    return output


def without_gradients(x: Tensor, write: Write) -> Tensor:
    with torch.no_grad():
        write(x)
    return x


def on_a_detached(x: Tensor, write: Write) -> Tensor:
    write(x.detach())
    return x


HOW = (in_a_function, without_gradients, on_a_detached)


def unit(write: Write, how: Callable[[Tensor, Write], Tensor], reads_before: bool) -> Computes:
    """Writes to a value that is read before and after. [n, d] -> [n, d]."""

    def run(self: Any, x: Tensor) -> Any:
        hidden = self.up(x)
        early = (hidden + 1).tanh() if reads_before else 0
        hidden = how(hidden, write)
        return x + self.down((hidden.sigmoid() * early) if reads_before else hidden.sigmoid())

    return Computes(run, up=nn.Linear(WIDTH, WIDTH), down=nn.Linear(WIDTH, WIDTH))


def between(write: Write) -> Computes:
    """Writes to a unit's output, between units. [n, d] -> scalar."""

    def run(self: Any, x: Tensor) -> Any:
        hidden = self.units[0](x)
        with torch.no_grad():
            write(hidden)
        return self.units[1](hidden).square().sum()

    units = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in "ab")
    return Computes(run, units=nn.ModuleList(units))


def outcome(model: nn.Module, units: list[str], policy: Any) -> str:
    """Whether gradients with a plan are equal to those without, three times; else the first error."""
    batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))

    def loss(output: Tensor) -> Tensor:
        return output.square().sum()

    expected, found = gradients(model, batch, loss), []
    with apply_policy(model, units, policy):
        for _ in range(3):  # All of them, as the other rank takes part.
            try:
                assert_same_gradients(expected, gradients(model, batch, loss))
            except (DifferentStepsError, MutatedValueError) as error:
                found.append(str(error))
    return found[0] if found else "equal"


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "": lambda model: model,
    "DDP": nn.parallel.DistributedDataParallel,
    "FSDP2": fully_shard,
}


def every_kind(num_random: int = 2, num_wrapped: int = 0) -> dict[str, Any]:
    """Every kind, in every way, under the leanest plans and random ones, and wrapped under the leanest: how it came out."""
    found = _outcomes("", (FULL, NOTHING_KEPT, *map(Random, range(num_random))))
    refused = [
        any(outcome != "equal" for outcome in its) for kind, its in found.items() if kind.split(",")[0] in COLLECTIVES
    ]
    # In wrapped models, ranks wait for ever for one that refuses.
    num_refused = torch.tensor(sum(refused))
    dist.all_reduce(num_refused)
    if not num_refused:
        for wrapper in ("DDP", "FSDP2"):
            found |= _outcomes(wrapper, (FULL, *map(Random, range(num_wrapped))))
    return found


def _outcomes(wrapper: str, policies: Sequence[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, write in (COLLECTIVES if wrapper else COLLECTIVES | UNSEEN).items():
        builds: dict[str, Any] = {"between units": (lambda w=write: between(w), ["units.0", "units.1"])}
        for how in HOW:
            for reads_before in (False, True):
                key = f"{how.__name__}{', read before' if reads_before else ''}"
                builds[key] = (lambda w=write, h=how, r=reads_before: unit(w, h, r)), [""]
        for way, (build, units) in builds.items():
            paths = [".".join(filter(None, ("module" if wrapper == "DDP" else "", path))) for path in units]
            found[f"{name}, {way}, {wrapper or 'plain'}"] = [
                outcome(WRAPPED[wrapper](built(build)), paths, policy) for policy in policies
            ]
    return found

"""What the processes of a run exchange in a step: gradients, their norm, and losses. One process exchanges nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from recollect.lab.train.processes import Processes

__all__ = ["Exchange", "exchange_of"]


class Exchange:
    """A step of one process."""

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[object]:
        """Return what a micro-batch runs in."""
        return nullcontext()

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make gradients the mean over the ranks of data parallelism, where backward has not done it."""

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> float:
        """Scale gradients down to a norm, that of all parameters everywhere; return their norm before."""
        return nn.utils.clip_grad_norm_(parameters, max_norm).item()

    def mean(self, value: Tensor) -> float:
        """Return the mean of a number over the ranks of data parallelism."""
        return value.item()

    def mean_of_all(self, losses: Sequence[Tensor], total: int | None) -> float:
        """Return the mean of the losses of all ranks of data parallelism.

        Args:
            losses: of this rank, in the order of its batches; what is there beyond its share of `total` does not count.
            total: number of losses that count, on all ranks; None: all of one rank.
        """
        return torch.stack(list(losses)).mean().item()


class _RanksExchange(Exchange):
    """A step of several processes.

    Args:
        processes: all of them.
        replicas: what DistributedDataParallel wraps, if it does.
    """

    def __init__(self, processes: Processes, replicas: DistributedDataParallel | None) -> None:
        self._group = processes.data_group
        self._place, self._ranks = processes.data_rank, processes.data_ranks
        self._replicas = replicas
        # FSDP2 and DDP reduce in backward.
        self._reduces = self._group is not None and processes.sharding == "none" and replicas is None

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[object]:
        if self._replicas is None or is_last:
            return nullcontext()
        return self._replicas.no_sync()

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        if not self._reduces:
            return
        found = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        waiting = [dist.all_reduce(gradient, group=self._group, async_op=True) for gradient in found]
        for gradient, work in zip(found, waiting, strict=True):
            assert work is not None
            work.wait()
            gradient.div_(self._ranks)

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> float:
        # Norms add up over parameters of the same mesh only.
        gradients: dict[object, list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is not None:
                gradients.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter.grad)
        norms = [nn.utils.get_total_norm(found) for found in gradients.values()]
        norm = math.hypot(*(_whole(one).item() for one in norms))
        if norm > max_norm:
            scale = max_norm / (norm + _EPSILON)
            for found in gradients.values():
                for gradient in found:
                    _local(gradient).mul_(scale)
        return norm

    def mean(self, value: Tensor) -> float:
        return self._sum(value.detach().clone()) / self._ranks

    def mean_of_all(self, losses: Sequence[Tensor], total: int | None) -> float:
        assert total is not None
        own = losses[: len(range(self._place, total, self._ranks))]
        return self._sum(torch.stack([torch.zeros_like(losses[0]), *own]).sum()) / total

    def _sum(self, value: Tensor) -> float:
        if self._group is not None:
            dist.all_reduce(value, group=self._group)
        return value.item()


# As in `torch.nn.utils.clip_grad_norm_`.
_EPSILON = 1e-6


def exchange_of(processes: Processes, trained: nn.Module) -> Exchange:
    """Return what the processes of a run exchange in a step.

    Args:
        processes: all of them.
        trained: what runs in training: the model, or what wraps it.
    """
    if processes.mesh is None:
        return Exchange()
    return _RanksExchange(processes, trained if isinstance(trained, DistributedDataParallel) else None)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

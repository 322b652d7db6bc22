"""The exchanges of a run's processes in a step: gradients, their norm, and losses. One process exchanges nothing.

Processes of a pipeline also exchange activations between stages, and a shared embedding.

Ranks of context parallelism have parts of a batch. Their gradients belong to their parts, times the number of ranks,
and their loss is the loss of all: a mean over the ranks of data and context parallelism is right for either.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from recollect._torch_dtensor import local_part
from recollect.capturing.captured_step import CapturedStep
from recollect.capturing.cuda_graphs import Graphs
from recollect.lab.parallel.expert import ExchangedExperts
from recollect.lab.parallel.mesh import LayoutMesh
from recollect.lab.parallel.pipeline_step import PipelineStep
from recollect.lab.parallel.stages import PipelineRank
from recollect.lab.train.processes import Processes
from recollect.plans.plan import Plan
from recollect.recording.model_step import Step
from recollect.recording.step_recording import Gradients

# As in `torch.nn.utils.clip_grad_norm_`.
_EPSILON = 1e-6


class Exchange:
    """A step of one process."""

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def accumulate(self, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], accumulation: int) -> Tensor:
        """Run forward and backward of micro-batches; leaves gradients of their mean loss."""
        losses: list[Tensor] = []
        for tokens, labels in batches:
            with self.micro_batch(is_last=len(losses) == accumulation - 1):
                # Hold only the loss: otherwise the logits would live through backward.
                loss = model(tokens, labels).loss / accumulation
                loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def losses(self, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
        return [model(tokens, labels).loss for tokens, labels in batches]

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make gradients the mean over the ranks with their own tokens, unless backward has done it."""

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> float:
        """Scale gradients down so that their norm over all processes has this limit; return the norm before."""
        return nn.utils.clip_grad_norm_(parameters, max_norm).item()

    def mean(self, losses: Sequence[Tensor], total: int | None = None) -> float:
        """Return the mean of the losses of all ranks of data parallelism.

        Losses beyond this rank's share of `total` do not count; None: all count.
        """
        return torch.stack(list(losses)).mean().item()


class CapturedExchange(Exchange):
    """A step of one process, of `accumulation` micro-batches like the example, which run as a CUDA graph."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        example: tuple[Tensor, Tensor],
        plan: Plan | None,
        accumulation: int,
        graphs: Callable[[], Graphs],
        log: Callable[[str], object],
    ) -> None:
        gradients: Gradients = "accumulated" if accumulation > 1 else "freed"
        step = Step(model, example, None, optimizer, lambda output: output.loss / accumulation, False, gradients)
        self.captured = CapturedStep(step, plan or Plan({}), graphs=graphs, log=log)

    def accumulate(self, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], accumulation: int) -> Tensor:
        return torch.stack([self.captured(batch) for batch in batches]).sum()


class RanksExchange(Exchange):
    """A step of several processes."""

    def __init__(self, processes: Processes, mesh: LayoutMesh, trained: nn.Module) -> None:
        self._place, self._ranks = processes.data_rank, processes.data_ranks
        self._data, self._gradients, self._replicas = mesh.data, mesh.gradients, mesh.replicas
        self._wrapper = trained if isinstance(trained, DistributedDataParallel) else None
        # FSDP2 and DDP reduce in backward.
        self._reduces = mesh.gradients.size() > 1 and processes.sharding == "none" and self._wrapper is None
        self._of_experts = {
            id(parameter)
            for module in trained.modules()
            if isinstance(module, ExchangedExperts)
            for parameter in module.parameters()
        }

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[object]:
        if self._wrapper is None or is_last:
            return nullcontext()
        return self._wrapper.no_sync()

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        if not self._reduces:
            return
        waiting: list[tuple[Tensor, dist.Work | None]] = []
        for parameter in parameters:
            if parameter.grad is None:
                continue
            # Those of experts are already sums over the ranks that share them.
            mesh = self._replicas if id(parameter) in self._of_experts else self._gradients
            gradient = local_part(parameter.grad)
            work = dist.all_reduce(gradient, group=mesh.get_group(), async_op=True) if mesh.size() > 1 else None
            waiting.append((gradient, work))
        for gradient, work in waiting:
            if work is not None:
                work.wait()
            gradient.div_(self._gradients.size())

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> float:
        own = [parameter for parameter in parameters if parameter.grad is not None]
        norm = self._norm(own)
        if norm > max_norm:
            scale = max_norm / (norm + _EPSILON)
            for parameter in own:
                assert parameter.grad is not None
                local_part(parameter.grad).mul_(scale)
        return norm

    def _norm(self, parameters: Sequence[nn.Parameter]) -> float:
        # Norms add up over parameters of the same mesh only.
        gradients: dict[object, list[Tensor]] = {}
        for parameter in parameters:
            assert parameter.grad is not None
            gradients.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter.grad)
        norms = [nn.utils.get_total_norm(found) for found in gradients.values()]
        return math.hypot(*(one.full_tensor().item() if isinstance(one, DTensor) else one.item() for one in norms))

    def mean(self, losses: Sequence[Tensor], total: int | None = None) -> float:
        total = total or len(losses) * self._ranks
        own = losses[: len(range(self._place, total, self._ranks))]
        return self._sum(torch.stack([torch.zeros_like(losses[0]), *own]).sum()) / total

    def _sum(self, value: Tensor) -> float:
        if self._ranks > 1:
            dist.all_reduce(value, group=self._data.get_group())
        return value.item()


class PipelineExchange(RanksExchange):
    """A step of several processes that share the layers."""

    def __init__(self, processes: Processes, mesh: LayoutMesh, rank: PipelineRank, step: PipelineStep) -> None:
        super().__init__(processes, mesh, rank)
        self.step = step
        self.rank, self._pipeline = rank, mesh.pipeline

    def accumulate(self, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], accumulation: int) -> Tensor:
        """See `Exchange`; the loss is zero where the last stage is not."""
        losses = self.step.gradients(list(batches))
        self._add_shared_gradients()
        zero = torch.zeros((), device=next(self.rank.parameters()).device)
        return torch.stack([zero, *losses]).sum() / accumulation

    def losses(self, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
        own = list(batches)
        return self.step.losses(own) or [torch.zeros((), device=own[0][0].device) for _ in own]

    def _norm(self, parameters: Sequence[nn.Parameter]) -> float:
        copies = set() if self.rank.has_first else {id(parameter) for parameter in self.rank.shared}
        own = super()._norm([parameter for parameter in parameters if id(parameter) not in copies])
        device = parameters[0].device
        squares = torch.tensor(own, dtype=torch.float64, device=device).square()
        dist.all_reduce(squares, group=self._pipeline.get_group())
        return squares.sqrt().item()

    def _sum(self, value: Tensor) -> float:
        dist.all_reduce(value, group=self._pipeline.get_group())
        return super()._sum(value)

    def _add_shared_gradients(self) -> None:
        shared = self.rank.shared
        if not shared:
            return
        group, ranks = self._pipeline.get_group(), self._pipeline.size()
        peer = dist.get_global_rank(group, ranks - 1 if self.rank.has_first else 0)
        own = [_own_rows(parameter) for parameter in shared]
        others = [torch.empty_like(gradient) for gradient in own]
        sent = [dist.P2POp(dist.isend, gradient, peer, group) for gradient in own]
        received = [dist.P2POp(dist.irecv, gradient, peer, group) for gradient in others]
        for work in dist.batch_isend_irecv([*sent, *received]):
            work.wait()
        for gradient, other in zip(own, others, strict=True):
            gradient.add_(other)


def _own_rows(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(parameter, DTensor):
        # An embedding's gradient has all rows, until code requests this rank's rows.
        assert isinstance(gradient, DTensor)
        gradient = gradient.redistribute(placements=parameter.placements)
        parameter.grad = gradient
    return local_part(gradient)

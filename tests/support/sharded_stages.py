"""Pipelines whose stages FSDP2 shards, 2 x 2 processes over gloo, as a program that serves cases.

python sharded_stages.py RANK FOLDER
"""

import gc
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

import recollect
from case_server import join, serve

MICRO_BATCHES = 8
IN_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# PyTorch 2.15 sums and reduces in the dtype of the parameters that are shared, earlier versions in bfloat16.
WITHOUT_REDUCE_DTYPE = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """One pipeline, and the budget of its plans.

    Attributes:
        frees: FSDP2 frees parameters after each forward, its default.
        shape: of a micro-batch.
        widths: of the layers of a stage that is alone on its rank; one of several has the first ones.
        num_measured: steps whose peaks are measured.
    """

    stages_per_rank: int
    budget: str
    policy: MixedPrecisionPolicy = MixedPrecisionPolicy()
    frees: bool = False
    shape: tuple[int, int, int] = (4, 32, 32)
    widths: tuple[int, ...] = (128, 128, 128, 128)
    num_measured: int = 2


CASES = {
    "1F1B": Case(1, "60%"),
    "bf16": Case(1, "60%", IN_BF16),
    "interleaved": Case(2, "60%"),
    "frees": Case(1, "70%", frees=True),
    # The fullest moment is that in which gradients are reduced. On a busy machine gloo's thread is late in most steps.
    "little": Case(1, "100%", shape=(1, 1, 32), num_measured=12),
    "uneven": Case(1, "100%", WITHOUT_REDUCE_DTYPE, shape=(1, 1, 32), widths=(16, 64, 512, 1024), num_measured=12),
}


class Running:
    """The stages of this process, and their schedule."""

    def __init__(self, case: Case, mesh: Any) -> None:
        self.shape, self.num_measured = case.shape, case.num_measured
        self.rank, self.num_stages = mesh["pipeline"].get_local_rank(), 2 * case.stages_per_rank
        self.numbers = range(self.rank, self.num_stages, 2)
        self.modules = [self._module(number, case, mesh["data"]) for number in self.numbers]
        self.stages = [
            PipelineStage(module, number, self.num_stages, torch.device("cpu"), group=mesh["pipeline"].get_group())
            for number, module in zip(self.numbers, self.modules, strict=True)
        ]
        made: Any = Schedule1F1B if case.stages_per_rank == 1 else ScheduleInterleaved1F1B
        self.schedule = made(self.stages if len(self.stages) > 1 else self.stages[0], MICRO_BATCHES, loss_fn=loss_of)
        torch.manual_seed(mesh["data"].get_local_rank())
        self.inputs = (torch.randn(MICRO_BATCHES * case.shape[0], *case.shape[1:]),) if 0 in self.numbers else ()
        self.targets = {"target": torch.zeros(MICRO_BATCHES)} if self.num_stages - 1 in self.numbers else {}

    def _module(self, number: int, case: Case, mesh: Any) -> nn.Module:
        torch.manual_seed(number)
        widths = case.widths[: len(case.widths) // case.stages_per_rank]
        layers = [nn.TransformerEncoderLayer(32, 2, width, batch_first=True) for width in widths]
        stage = nn.Sequential(*layers)
        for module in (*layers, stage):
            fully_shard(module, mesh=mesh, reshard_after_forward=case.frees, mp_policy=case.policy)
        return stage

    def profiles(self, dtype: torch.dtype) -> dict[int, str]:
        """Record the stages of this process; return them as texts, by number."""
        made = {}
        for number, module in zip(self.numbers, self.modules, strict=True):
            micro_batch = torch.randn(self.shape, dtype=dtype if number else None, requires_grad=number > 0)
            with recollect.gathered_stage(module):
                made[number] = recollect.record(
                    module,
                    micro_batch,
                    loss_fn=loss_of if number == self.num_stages - 1 else torch.sum,
                    gradients="accumulated",
                    holds_output=False,
                ).to_json()
        return made

    def _step(self) -> None:
        """Run the schedule once; it returns the outputs of the last stage, as by default, and nobody keeps them."""
        self.schedule.step(*self.inputs, **self.targets)

    def measured(self) -> tuple[list[int], list[bytes]]:
        """Run two steps, and those that are measured; return their peaks, and the gradients."""
        peaks_bytes = []
        for _ in range(2 + self.num_measured):
            torch.manual_seed(1000 + dist.get_rank())
            for module in self.modules:
                module.zero_grad(set_to_none=True)
            gc.collect()
            dist.barrier()
            found = recollect.measure_peak(self._step)
            peaks_bytes.append(found.peak_bytes)
        parameters = [parameter for module in self.modules for parameter in module.parameters()]
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        return peaks_bytes[2:], [gradient.to_local().numpy().tobytes() for gradient in gradients]


def loss_of(output: Tensor, _target: Tensor | None = None) -> Tensor:
    """The loss of the last stage."""
    return output.float().square().mean()


def ran(case: Case, mesh: Any) -> dict[str, Any]:
    """Run a pipeline without plans and with them; return what was predicted and measured."""
    running = Running(case, mesh)
    profiles: dict[int, Any] = {}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, running.profiles(case.policy.param_dtype or torch.float32))
    for found in everywhere:
        profiles.update({number: recollect.Profile.from_json(text) for number, text in found.items()})
    ordered = [profiles[number] for number in sorted(profiles)]
    plain = recollect.predict_pipeline(ordered, running.schedule, [recollect.Plan({})] * len(ordered))
    planned = recollect.plan_pipeline(ordered, running.schedule, case.budget)
    plain_bytes, expected = running.measured()
    for stage, module, number in zip(running.stages, running.modules, running.numbers, strict=True):
        recollect.apply(module, planned.plans[number]).follow(stage)
    planned_bytes, gradients = running.measured()
    return {
        "budget": planned.budget_bytes,
        "slowdown": planned.slowdown,
        "is_equal": gradients == expected,
        "plain": [plain.peaks_bytes[running.rank], plain_bytes],
        "planned": [planned.peaks_bytes[running.rank], planned_bytes],
    }


if __name__ == "__main__":
    join(4)
    the_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    serve(lambda name: ran(CASES[name], the_mesh))

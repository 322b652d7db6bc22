"""The processes of a run: one, or those that torchrun started, and the place of this one among them."""

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from recollect._torch_parallel import has_process_group
from recollect.errors import ConfigError, HardwareError, NotYetError
from recollect.lab.models.config import TransformerConfig
from recollect.lab.parallel.layout import DeviceLayout, Sharding
from recollect.lab.parallel.mesh import LayoutMesh, layout_mesh
from recollect.lab.train.config import TrainConfig
from recollect.lab.train.launched import num_launched
from recollect.lab.train.lost_processes import named_errors
from recollect.lab.train.optimizer_step import resolve_device
from recollect.ranks.group import ALONE, Place, Ranks, group_of


@dataclass(frozen=True, eq=False)
class Processes:
    """The processes of a run, as one of them sees them."""

    layout: DeviceLayout = dataclasses.field(default_factory=DeviceLayout)
    sharding: Sharding = "none"
    ranks: Ranks = ALONE
    mesh: LayoutMesh | None = None
    """The groups that share parts of the model; None for one process."""

    @property
    def is_first(self) -> bool:
        """Whether this process writes the common output: files and progress."""
        return self.ranks.is_first

    @property
    def rank(self) -> int:
        return 0 if self.mesh is None else dist.get_rank()

    @property
    def data_rank(self) -> int:
        return 0 if self.mesh is None else self.mesh.data.get_local_rank()

    @property
    def data_ranks(self) -> int:
        return self.layout.data_parallel_size

    @property
    def random_rank(self) -> int:
        """Place of this process among those that draw their own random numbers.

        They have other batches, other parts of sequences, or other layers.
        """
        if self.mesh is None:
            return 0
        tokens = self.mesh.gradients
        return self.mesh.pipeline.get_local_rank() * tokens.size() + tokens.get_local_rank()

    @property
    def plan_group(self) -> dist.ProcessGroup | None:
        """The processes that run one plan; None for one process."""
        return None if self.mesh is None else dist.group.WORLD

    @property
    def spread(self) -> dict[str, Any]:
        """The layout of the run, as plain values; its random numbers and its plan are valid for this layout only."""
        return {**dataclasses.asdict(self.layout), "sharding": self.sharding}

    @property
    def description(self) -> str:
        if self.mesh is None:
            return ""
        layout = self.layout
        parts = {
            "pipeline": layout.pipeline_model_parallel_size,
            "tensor": layout.tensor_model_parallel_size,
            "context": layout.context_parallel_size,
            "data": self.data_ranks,
        }
        sizes = " x ".join(f"{name} {size}" for name, size in parts.items() if size > 1)
        sequence = ", sequence parallel" if layout.sequence_parallel else ""
        sharers = layout.expert_model_parallel_size
        experts = f", experts shared by {sharers}" if sharers > 1 else ""
        shared = {"none": "", "optimizer": ", optimizer state shared", "all": ", all shared"}[self.sharding]
        return f"Processes: {len(self.ranks.ranks)}, {sizes}{sequence}{experts}{shared}.\n"

    def excess_reason(self, device: torch.device) -> str:
        """Return why a step may take more memory than predicted, and advice; nothing if it may not."""
        is_gloo = self.mesh is not None and device.type == "cpu"
        shares_experts = self.layout.expert_model_parallel_size > 1
        reasons = {
            "ranks that share experts get more rows in some steps than in the recorded one": shares_experts,
            "gloo, which connects processes on CPUs, frees what it sent a moment late": is_gloo,
        }
        found = "; ".join(reason for reason, applies in reasons.items() if applies)
        return f"{found}. Give a budget that is smaller by as much" if found else ""

    def check(self, config: TrainConfig, dimensions: TransformerConfig) -> None:
        """Check that a run can be spread like this, with the same answer in every process."""
        if config.step.distribute_saved_activations and self.layout.tensor_model_parallel_size == 1:
            raise ConfigError(
                rule="distribute-without-tensor-parallel",
                settings={"distribute_saved_activations": True, "tensor_model_parallel_size": 1},
                reason="there are no ranks to distribute to",
                advice="Leave it out, or set tensor_model_parallel_size to 2 or more.",
            )
        if config.step.captures:
            self._check_captures(config)
        if self.mesh is None:
            return
        self.layout.check_model(dimensions, seq_length=config.data.seq_length)
        is_delayed = dimensions.fp8 is not None and dimensions.fp8_recipe == "delayed"
        if is_delayed and len(self.ranks.ranks) > self.layout.pipeline_model_parallel_size:
            raise NotYetError(
                settings={"fp8_recipe": "delayed"},
                needs="histories common to the ranks that share weights; each would have its own",
                advice="Choose a different fp8_recipe, or only pipeline parallelism.",
            )
        ranks, count = self.data_ranks, config.optim.num_micro_batches
        if count % ranks:
            raise ConfigError(
                settings={
                    "global_batch_size": config.optim.batch_size * count,
                    "micro_batch_size": config.optim.batch_size,
                    "data_parallel_size": ranks,
                },
                reason=f"a step's {count} micro-batches are not a multiple of {ranks}, so ranks would have unequal shares",
                advice=f"Choose a multiple of {config.optim.batch_size * ranks} sequences a step.",
            )
        if self.layout.pipeline_model_parallel_size > 1:
            check_pipeline(config, dimensions, self.layout)

    def _check_captures(self, config: TrainConfig) -> None:
        setting, device = {"--cuda-graph-impl": config.step.cuda_graph_impl}, resolve_device(config.step.device)
        if not self.ranks.is_alone:
            raise NotYetError(
                settings={**setting, "processes": len(self.ranks.ranks)},
                needs="graphs with collectives in them",
                advice="Set --cuda-graph-impl to none.",
            )
        if device.type != "cuda":
            raise ConfigError(
                settings={**setting, "--device": str(device)},
                reason="CUDA graphs repeat kernels of a CUDA device",
                advice="Leave --cuda-graph-impl out, or train on one.",
            )


ONE_PROCESS = Processes()
"""A run of one process."""


def num_processes() -> int:
    """How many processes this run has, before they have joined."""
    if has_process_group():
        return dist.get_world_size()
    return num_launched()


@contextmanager
def joined_processes(config: TrainConfig) -> Iterator[Processes]:
    """Within the block, be one of the processes of a run. Alone, nothing happens.

    An error in one process ends all of them, with a message that names it; see `named_errors`.
    """
    if num_processes() == 1:
        config.parallel.layout_of(1)
        yield ONE_PROCESS
        return
    _use_own_device(config)
    with _process_group(config):
        ranks = group_of(range(dist.get_world_size()), "lab.train.train(config)")
        with named_errors(ranks):
            _check_same(config, ranks)
            layout = config.parallel.layout_of(len(ranks.ranks))
            mesh = layout_mesh(layout, "cuda" if _is_on_cuda(config) else "cpu")
            yield Processes(layout, config.parallel.sharding, ranks, mesh)


@contextmanager
def _process_group(config: TrainConfig) -> Iterator[None]:
    """Within the block, have a process group: the existing one, or a new one."""
    if dist.is_initialized():
        yield
        return
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    dist.init_process_group("cpu:gloo,cuda:nccl" if _is_on_cuda(config) else "gloo", timeout=timeout)
    yield
    # Not after an error: the others may be gone, and it would wait for them.
    dist.destroy_process_group()


def _is_on_cuda(config: TrainConfig) -> bool:
    name = config.step.device
    return torch.cuda.is_available() if name == "auto" else name == "cuda"


def _use_own_device(config: TrainConfig) -> None:
    name = config.step.device
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            settings={"device": name},
            reason="each process has its own device",
            advice="Write cuda or cpu, or leave it out.",
        )
    if not _is_on_cuda(config):
        return
    number, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    # All processes of a machine fail: otherwise the rest would wait for those without a device.
    needed = int(os.environ.get("LOCAL_WORLD_SIZE", number + 1))
    if needed > there:
        raise HardwareError(
            f"--device {name}: got {needed} processes on a machine with {there} CUDA devices, expected one "
            f"device for each. Start torchrun with --nproc-per-node {there}, or pass --device cpu."
        )
    torch.cuda.set_device(number)


def _check_same(config: TrainConfig, ranks: Ranks) -> None:
    found: list[dict[str, Any]] = ranks.gather(_settings(dataclasses.asdict(config)), Place.START)
    first = found[0]
    for rank, other in zip(ranks.ranks, found, strict=True):
        for name, value in first.items():
            if other[name] != value:
                raise ConfigError(
                    settings={f"{name} in rank 0": value, f"{name} in rank {rank}": other[name]},
                    reason=f"two values of {name} in one run, whose processes do the same",
                    advice="Start all processes with the same command line.",
                )


def _settings(nested: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in nested.items():
        found |= _settings(value) if isinstance(value, dict) else {name: value}
    return found


def check_pipeline(config: TrainConfig, dimensions: TransformerConfig, layout: DeviceLayout) -> None:
    ranks = layout.pipeline_model_parallel_size
    if config.parallel.sharding == "all":
        raise NotYetError(
            settings={"use_torch_fsdp2": True, "pipeline_model_parallel_size": ranks},
            needs="weights that the stages of a pipeline gather for each micro-batch",
            advice="Use use_distributed_optimizer instead: gradients stay whole until the last micro-batch in either case.",
        )
    is_interleaved = len(layout.layers_of_stages(dimensions.num_layers)) > ranks
    count = config.optim.num_micro_batches // layout.data_parallel_size
    if count < ranks or (is_interleaved and count % ranks):
        multiple = config.optim.batch_size * layout.data_parallel_size * ranks
        needed = f"a multiple of {ranks} for several stages a rank" if is_interleaved else f"at least {ranks}"
        choose = "a multiple of" if is_interleaved else "at least"
        raise ConfigError(
            settings={
                "global_batch_size": config.optim.batch_size * config.optim.num_micro_batches,
                "micro_batch_size": config.optim.batch_size,
                "pipeline_model_parallel_size": ranks,
            },
            reason=f"each pipeline has {count} micro-batches a step, and needs {needed}",
            advice=f"Choose {choose} {multiple} sequences a step.",
        )

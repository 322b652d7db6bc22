"""Tells how PyTorch spreads a model over processes; the private names for that, each with its reason."""

import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from recollect._torch_fsdp import is_flat_sharded, is_fully_sharded, parameter_groups
from recollect._torch_private import accumulates_gradient
from recollect._torch_replicate import awaited_bucket_bytes, begin_replicas, processes_of_replica, replica_states
from recollect.errors import ConfigError, RecordError

# Empty where PyTorch has no torch.distributed.
PROCESS_GROUPS: tuple[type, ...] = (dist.ProcessGroup,) if dist.is_available() else ()

# PyTorch 2.13 has renamed it.
all_gather_rows: Callable[..., object] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def has_process_group() -> bool:
    return dist.is_available() and dist.is_initialized()


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Within the block, act as one rank of a process group without other ranks; its collectives move nothing."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RecordError(
            f"this process is rank {dist.get_rank()} of {dist.get_world_size()} already, expected none of a group: a layout "
            "is recorded without its devices in a separate process."
        )
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        # DTensors cache results of ops, with the groups of a mesh that is gone; the next mesh may be equal to it.
        _clear_sharding_prop_cache()


def group_ranks(arguments: Iterable[Any]) -> tuple[int, ...]:
    """Return the ranks of the group that a collective op gets as an argument, by name or as an object."""
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument)))
    groups: Any = dist.distributed_c10d
    name = next(argument for argument in reversed(list(arguments)) if isinstance(argument, str))
    return tuple(dist.get_process_group_ranks(groups._resolve_process_group(name)))


def receives_as_needed() -> bool:
    """Whether the stages of torch's pipelines allocate receive buffers only when needed: since 2.15."""
    from torch.distributed.pipelining.stage import _RecvInfo

    return hasattr(_RecvInfo, "allocate_buffer")


def is_checkpoint_wrapper(module: nn.Module) -> bool:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

    return isinstance(module, CheckpointWrapper)


def is_data_parallel(module: nn.Module) -> bool:
    """Whether a module is `DistributedDataParallel`, which awaits the hooks of its parameters after each forward."""
    return isinstance(module, DistributedDataParallel)


def runs_in_ddp() -> bool:
    """Whether the forward of a `DistributedDataParallel` is running, which takes gradients from parameters as they come."""
    return DistributedDataParallel._active_ddp_module is not None


def data_parallelism_runs() -> bool:
    """Whether DDP averages a gradient, or FSDP2 gathers parameters or reduces gradients: a unit alone does nothing of this."""
    if accumulates_gradient():
        return True
    # Autograd takes FSDP2's hooks for part of the node that they are before.
    frame: Any = sys._getframe()
    while (frame := frame.f_back) is not None:
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.fsdp._fully_shard"):
            return True
    return False


def passes_ops_on(function: Any) -> bool:
    """Whether a class of autograd Functions is PyTorch's own around collectives, and runs nothing but ops that modes see.

    That is how DTensors change their layout, and how functional collectives get their backward. Such a forward runs with
    gradients switched off, like any other; no kernel that modes do not see writes to what its ops make.
    """
    module, name = function.__module__, function.__name__
    if module == "torch.distributed.tensor._redistribute":
        return bool(name == "Redistribute")
    return bool(module == "torch._library.autograd" and name.startswith("GeneratedBackwardFor__c10d_functional"))


def name_of_group(args: Any, kwargs: Any) -> str:
    """Return the name of the group whose ranks run a collective, from its arguments: an object of c10d's, or the last."""
    boxed = (argument for argument in args if isinstance(argument, torch.ScriptObject))
    group = kwargs["group_name"] if "group_name" in kwargs else next(map(dist.ProcessGroup.unbox, boxed), args[-1])
    return str(getattr(group, "group_name", group))


def has_ended(collective: Any, args: Any, kwargs: Any) -> bool:
    """Whether one of c10d's collectives has ended when it returns: whoever calls it does not wait later."""
    names = [argument.name for argument in collective._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    # PyTorch has renamed it.
    return False in (given.get("async_op"), given.get("asyncOp"))


def megatrons_groups() -> Any:
    """Return `megatron.core.parallel_state`; None unless Megatron has made its groups."""
    state = sys.modules.get("megatron.core.parallel_state")
    return state if state is not None and state.model_parallel_is_initialized() else None


def is_megatrons_buffer(tensor: torch.Tensor) -> bool:
    """Whether a tensor is part of Megatron's buffers for results of collectives, which are filled before each use."""
    groups = megatrons_groups()
    buffers = () if groups is None else groups.get_global_memory_buffer().buffer.values()
    return any(buffer.untyped_storage() is tensor.untyped_storage() for buffer in buffers)


class RankNotes:
    """Short texts that the ranks of a group leave for each other under a key."""

    def __init__(self, key: str, ranks: list[int], store: Any) -> None:
        self.rank = torch.distributed.get_rank()
        self.ranks = ranks
        self._key = key
        self._store = store

    def leave(self, text: str) -> None:
        self._store.set(f"{self._key}/{self.rank}", text)

    def read(self, patience_s: float) -> dict[int, str | None]:
        """Return the texts of the other ranks; None for one that has left none after some seconds."""
        found: dict[int, str | None] = {}
        for rank in self.ranks:
            key = f"{self._key}/{rank}"
            try:
                self._store.wait([key], timedelta(seconds=patience_s))
            except RuntimeError:  # A file's store has no error of its own for this.
                if not self._store.check([key]):
                    found[rank] = None
                    break
            found[rank] = self._store.get(key).decode()
        return found


def notes_of_group(group: str, key: str) -> RankNotes:
    """Return the notes that the ranks of a group share, in the store at which all ranks met."""
    from torch.distributed import distributed_c10d

    process_group = distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined,arg-type]
    if torch.distributed.get_backend(process_group) == "fake":
        # There are no others.
        return RankNotes(key, [torch.distributed.get_rank()], torch.distributed.HashStore())  # type: ignore[attr-defined]
    return RankNotes(key, torch.distributed.get_process_group_ranks(process_group), meeting_place())


def flat_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of the same ranks with one dimension. No public name keeps it a view of the mesh it is a part of."""
    return mesh._flatten("_".join(mesh.mesh_dim_names or ()))


def joined_mesh(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """Return the mesh with the dimensions of two meshes, which are views of one. No public name joins them."""
    try:
        joined: DeviceMesh = DeviceMesh._concatenate([outer, inner])
    except RuntimeError:
        raise ConfigError(
            settings={"mesh": outer.mesh.tolist(), "tensor mesh": inner.mesh.tolist()},
            reason="both are to share one tensor, each along its own dimension",
            advice="Pass two dimensions of one mesh, which have only this rank in common.",
        ) from None
    return joined


def gathered(part: torch.Tensor, num_ranks: int, group: str) -> torch.Tensor:
    """Return the parts of all ranks of a group, one after the other, along the first dimension."""
    return waited_for(torch.ops._c10d_functional.all_gather_into_tensor(part, num_ranks, group))


def gathered_with_gradient(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the parts of all ranks, one after the other along the first dimension; backward adds up what ranks return."""
    # PyTorch 2.13 has renamed it.
    function = getattr(functional, "all_gather_single_autograd", None) or functional.all_gather_tensor_autograd
    return waited_for(function(part, 0, group))


def exchanged_rows(rows: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Send rows to the ranks of a group, a given number to each, and return the rows received, in rank order.

    Gradients go back the same way.
    """
    exchange = functional.all_to_all_single_autograd if rows.is_floating_point() else functional.all_to_all_single
    return waited_for(exchange(rows, received, sent, group))


def summed(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of all ranks' tensors, without a gradient."""
    return waited_for(functional.all_reduce(tensor.detach(), "sum", group))


def waited_for(result: torch.Tensor) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor(result)


def split_backward(loss: torch.Tensor, inputs: Sequence[torch.Tensor], model: nn.Module) -> None:
    """Run backward in two halves as the stages of a zero-bubble pipeline do: gradients of the inputs, then of the parameters.

    Without inputs, as on the first stage, it is one whole backward. No public name runs the halves.
    """
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    if not inputs:
        loss.backward()
        return
    _, groups = stage_backward_input([loss], None, list(inputs), model.parameters())
    stage_backward_weight(model.parameters(), groups)


# Before torch 2.13 the second half does not find the nodes of Functions again.
SPLITS_FUNCTIONS: Final = torch.__version__ >= "2.13"


_STAGE: Final = "torch.distributed.pipelining.stage"


def runs_in_stage() -> bool:
    """Whether a stage of torch's pipelines calls this."""
    return any(True for _ in _stage_functions())


def learns_shapes() -> bool:
    """Whether a stage of torch's pipelines calls this to learn shapes, between steps; before torch 2.13 gradients are off."""
    return _STAGE in sys.modules and "_forward_metadata_inference" in _stage_functions()


def _stage_functions() -> Iterator[str]:
    for frame, _ in traceback.walk_stack(None):
        if frame.f_globals.get("__name__") == _STAGE:
            yield frame.f_code.co_name


def processes_of(model: nn.Module) -> list[Sequence[int]]:
    """Return the groups of processes, by their numbers, that a model's modules and parameters are spread over."""
    found: list[Sequence[int]] = [
        torch.distributed.get_process_group_ranks(module.process_group)
        for module in model.modules()
        if isinstance(module, DistributedDataParallel)
    ]
    found += map(processes_of_replica, replica_states(model))
    meshes = {id(mesh): mesh for p in model.parameters() if (mesh := getattr(p, "device_mesh", None)) is not None}
    for module in model.modules():
        if is_flat_sharded(module):
            found.append(_processes_of_wrapper(module))
        if is_fully_sharded(module):
            # Gathered parameters are not DTensors.
            sharded = (p.sharded_param for group in parameter_groups(module) for p in group.fsdp_params)
            meshes.update((id(p.device_mesh), p.device_mesh) for p in sharded)
    return [*found, *(mesh.mesh.flatten().tolist() for mesh in meshes.values())]


def _processes_of_wrapper(module: Any) -> Sequence[int]:
    """Return the processes of FSDP1's wrapper; no public name tells those that a hybrid strategy replicates shards over."""
    if module._device_mesh is not None:
        return module._device_mesh.mesh.flatten().tolist()
    if hasattr(module, "_inter_node_pg"):
        return range(torch.distributed.get_world_size())
    return torch.distributed.get_process_group_ranks(module.process_group)


def meeting_place() -> Any:
    """Return the store at which all processes met when they initialised PyTorch's groups."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def allows_uneven_inputs(module: nn.Module) -> bool:
    """Whether the loop runs in `model.join()`, where some processes have more batches than others."""
    return isinstance(module, DistributedDataParallel) and bool(module._join_config.enable)


class GradientBuckets:
    """The flat tensors in which `DistributedDataParallel` reduces gradients; it keeps them as long as it lives.

    Args:
        model: with any number of `DistributedDataParallel` in it.
        may_communicate: the processes may agree now on the order in which gradients are reduced, as they would in the forward
            after the first backward. It then does not happen in a recorded or measured step.
    """

    def __init__(self, model: nn.Module, *, may_communicate: bool) -> None:
        if may_communicate:
            begin_replicas(model)
        replicas = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        replicas += [state._ddp for state in replica_states(model) if state.has_initialized]
        for replica in replicas if may_communicate else ():
            if replica.reducer._rebuild_buckets() and replica.logger is not None:
                # It knows their sizes then, and not only from the next forward on.
                replica.logger.set_runtime_stats_and_log()
        self.sizes_bytes = [size for replica in replicas for size in _bucket_sizes(replica)]
        self.sizes_bytes += map(awaited_bucket_bytes, replica_states(model))
        self._unseen_bytes = Counter(self.sizes_bytes)
        self._replicas = replicas

    def views(self) -> list[torch.Tensor]:
        found = [p.grad for replica in self._replicas for p in replica.parameters() if replica.gradient_as_bucket_view]
        views = [gradient for gradient in found if gradient is not None and gradient._is_view()]
        for storage in {id(view.untyped_storage()): view.untyped_storage() for view in views}.values():
            self.claims(storage)
        return views

    def claims(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage that an op reads is a bucket, by its size: no name lists buckets; each is read after backward."""
        is_one = self._unseen_bytes[storage.nbytes()] > 0
        self._unseen_bytes[storage.nbytes()] -= is_one
        return is_one


def _bucket_sizes(module: DistributedDataParallel) -> list[int]:
    parameters, are_sparse = module._build_params_for_reducer()
    logged = module._get_ddp_logging_data()
    sizes = [int(size) for size in (logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"]).split(", ")]
    for parameter, is_sparse in zip(parameters, are_sparse, strict=True):
        # It is reduced in place, without a bucket.
        if is_sparse:
            sizes.remove(parameter.nbytes)
    if module.find_unused_parameters or module.static_graph:
        # Which were used, here and in any process: an int32 each.
        sizes += [4 * len(parameters)] * 2
    return sizes

"""Which processes a model is spread over, which are taken for its group, and whether all of them do the same."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import recollect
from rank_threads import error_of, run_on_threads
from recollect._torch_parallel import processes_of
from recollect.errors import ArgumentError, RecordError
from recollect.ranks import members
from recollect.ranks.group import ALONE, Group
from recollect.ranks.members import Presence, check_alike, ranks_of

CALL = "attach(model, optimizer, budget)"
needs_gloo = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs PyTorch with the gloo backend")


@pytest.fixture
def _four_processes() -> Iterator[None]:
    """The first of four, of which the others are not there."""
    dist.init_process_group("fake", rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


@pytest.mark.usefixtures("_four_processes")
def test_wrappers_and_meshes_say_which_processes_there_are() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert processes_of(linear()) == []
    assert [list(ranks) for ranks in processes_of(DistributedDataParallel(linear()))] == [[0, 1, 2, 3]]
    for options in ({}, {"device_mesh": mesh["dp"]}, {"process_group": mesh.get_group("dp")}):
        made, expected = replicate(linear(), **options), [[0, 2] if options else [0, 1, 2, 3]]
        assert [list(ranks) for ranks in processes_of(made)] == expected, "before the first forward"
        made(torch.zeros(1, 8))
        assert [list(ranks) for ranks in processes_of(made)] == expected
    assert [list(ranks) for ranks in processes_of(fully_shard(linear(), mesh=mesh["dp"]))] == [[0, 2]] * 1
    cpu = torch.device("cpu")
    assert [list(ranks) for ranks in processes_of(FullyShardedDataParallel(linear(), device_id=cpu))] == [[0, 1, 2, 3]]
    hybrid = FullyShardedDataParallel(
        linear(), device_id=cpu, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD
    )
    assert [list(ranks) for ranks in processes_of(hybrid)] == [[0, 1, 2, 3]]
    split = parallelize_module(linear(), mesh["tp"], {"0": ColwiseParallel()})
    assert [list(ranks) for ranks in processes_of(split)] == [[0, 1]]
    both = fully_shard(split, mesh=mesh["dp"])
    assert sorted(max(map(list, processes_of(both)), key=len)) == [0, 1, 2, 3]


@pytest.mark.usefixtures("_four_processes")
def test_hooks_of_replicas_may_come_after_a_record() -> None:
    made, seen = replicate(linear()), list[int]()

    def hook(state: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        state.append(bucket.buffer().numel())
        done = torch.futures.Future[torch.Tensor]()
        done.set_result(bucket.buffer())
        return done

    recollect.record(made, torch.zeros(1, 8), loss_fn=torch.sum, units=["0"])
    made.register_comm_hook(seen, hook)
    for _ in range(2):
        made(torch.zeros(1, 8)).sum().backward()
    assert seen == [144, 144]


@pytest.mark.usefixtures("_four_processes")
def test_overlapping_groups_are_refused() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    split = parallelize_module(linear(), mesh["tp"], {"0": ColwiseParallel()})
    other = DistributedDataParallel(linear(), process_group=mesh.get_group("dp"))
    with pytest.raises(RecordError, match=r"spread over the processes \[0, [12]\] and \[0, [12]\].* Pass group="):
        ranks_of(nn.ModuleList([split, other]), None, CALL)
    # PyTorch's fake group has no other process to ask.
    assert ranks_of(nn.ModuleList([split, other]), mesh, CALL) is ALONE
    assert ranks_of(nn.ModuleList([split, other]), "alone", CALL) is ALONE


@pytest.mark.usefixtures("_four_processes")
def test_a_group_without_this_process_is_refused() -> None:
    mesh = init_device_mesh("cpu", (4,))
    mesh.mesh.copy_(mesh.mesh + 1)
    with pytest.raises(ArgumentError, match=r"this process, rank 0, is not in it\. Leave it out"):
        ranks_of(linear(), mesh, CALL)


def test_without_process_groups_there_is_none_to_pass() -> None:
    assert ranks_of(linear(), None, CALL) is ALONE
    with pytest.raises(ArgumentError, match=r"got 3 as group: there are no process groups yet\. Leave it out"):
        ranks_of(linear(), 3, CALL)


@needs_gloo
def test_other_settings_or_another_model_in_one_process_are_an_error_in_all() -> None:
    def found(ranks: Group) -> list[str]:
        budget = "80%" if ranks.is_first else "90%"
        frozen = linear().requires_grad_(ranks.is_first)
        return [
            error_of(lambda: check_alike(ranks, linear(), {"units": None, "budget": "80%"})),
            error_of(lambda: check_alike(ranks, linear(), {"units": None, "budget": budget})),
            error_of(lambda: check_alike(ranks, frozen, {"budget": "80%"})),
        ]

    first, second = run_on_threads(found)
    assert first == second
    same, other_budget, other_model = first
    assert same == ""
    assert other_budget.startswith(
        "ConfigError: got budget in rank 0='80%', budget in rank 1='90%': two values of budget in one group"
    )
    assert "; only rank 0 has 0.weight (torch.float32, trained); expected the same" in other_model


@needs_gloo
def test_a_process_that_trains_without_it_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "_PATIENCE_AFTER_BARRIER_S", 0.05)

    def trains(ranks: Group) -> str:
        return error_of(lambda: Presence("MemoryBudget").check(is_after_barrier=True)) if ranks.is_first else ""

    waiting, _ = run_on_threads(trains)
    assert waiting.startswith("RecordError: MemoryBudget: rank 1 of 2 trains without it, expected it in every process")

"""The pool of a CUDA graph: the allocator's rules, and pools of steps that were really run."""

import gc
from dataclasses import replace

import pytest
import torch

import recollect
from recollect.lab.models.gpt import GPTModel
from recollect.measuring.deaths import Deaths
from recollect.measuring.meter import traced
from recollect.profile.events import BACKWARD, DIES, FORWARD, OP, PHASE, RETURN, StepLog
from recollect.profile.graph import OpRecord, UnitCall, UnitGraph, ValueRecord
from recollect.profile.profile import Profile
from recollect.simulation.pool import MemoryPool, played, pool_bytes
from small_llama import llama_step

MIB = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "segments_mib"),
    [
        ([1], 2),  # 512 bytes of a small segment
        ([MIB, MIB], 2),
        ([MIB, MIB, 512], 4),
        ([MIB + 1], 20),  # shared by all of up to 10 MiB
        ([9 * MIB, 9 * MIB], 20),
        ([7 * MIB, 7 * MIB, 7 * MIB], 40),
        ([10 * MIB], 10),
        ([10 * MIB + 1], 12),
        ([15 * MIB, MIB], 18),  # a rest of 1 MiB belongs to its block
    ],
)
def test_new_segments(sizes: list[int], segments_mib: int) -> None:
    pool = MemoryPool()
    for nbytes in sizes:
        pool.take(nbytes)
    assert pool.reserved_bytes == segments_mib * MIB


def test_free_blocks_are_used_again() -> None:
    pool = MemoryPool()
    first, second, third = (pool.take(nbytes * MIB) for nbytes in (6, 6, 8))
    pool.give_back(first)
    pool.give_back(third)
    pool.take(7 * MIB)  # the smallest with room: the last one, of 8 MiB, whose rest it gets
    pool.take(6 * MIB)
    assert pool.reserved_bytes == 20 * MIB
    pool.give_back(second)
    pool.take(7 * MIB)
    assert pool.reserved_bytes == 40 * MIB


def test_neighbours_join() -> None:
    pool = MemoryPool()
    blocks = [pool.take(nbytes * MIB) for nbytes in (6, 6, 8)]
    for block in (blocks[0], blocks[2], blocks[1]):
        pool.give_back(block)
    pool.take(20 * MIB - 512)
    assert pool.reserved_bytes == 20 * MIB


@pytest.fixture(scope="module")
def step() -> tuple[GPTModel, dict[str, torch.Tensor], Profile]:
    model, batch = llama_step(2, 512, hidden_size=256, num_attention_heads=4, vocab_size=512)
    profile = recollect.record(model, batch, gradients="freed", holds_output=False)
    # The same plans on every machine: what an op takes while it runs is one block in the prediction, and several may find
    # room where one does not.
    graphs = (
        replace(graph, ops=tuple(replace(op, time_s=1e-5 * (1 + len(op.inputs))) for op in graph.ops))
        for graph in profile.graphs
    )
    return model, batch, replace(profile, graphs=tuple(graphs), host=None)


def measured_pool_bytes(model: GPTModel, batch: dict[str, torch.Tensor]) -> int:
    """Return the pool of a real step, from all that the CPU's allocator made and freed in it."""
    for _ in range(2):
        model.zero_grad()
        gc.collect()
        with traced("the step", Deaths(())) as events:
            loss = model(**batch).loss
            loss.backward()
            del loss
    model.zero_grad()
    return played(events)


@pytest.mark.parametrize("budget", ["keep_all", "full", "85%", "70%"])
def test_pools_of_real_steps(step: tuple[GPTModel, dict[str, torch.Tensor], Profile], budget: str) -> None:
    model, batch, profile = step
    plan = recollect.plan(profile, budget) if "%" in budget else recollect.classic_plan(profile, budget)
    with recollect.apply(model, plan):
        assert pool_bytes((profile, plan)) == measured_pool_bytes(model, batch)


def test_graphs_share_a_pool(step: tuple[GPTModel, dict[str, torch.Tensor], Profile]) -> None:
    _, _, profile = step
    plans = [recollect.classic_plan(profile, name) for name in ("keep_all", "full")]
    both, alone = pool_bytes(*((profile, plan) for plan in plans)), pool_bytes((profile, plans[0]))
    gradients_bytes = profile.persistent["parameters"]
    # Gradients of the first stay where its graph puts them.
    assert alone <= both <= alone + gradients_bytes + 20 * MIB


@pytest.mark.parametrize(
    ("working_mib", "pool_mib"),
    [
        (0, 20 + 24),  # results of 8 and 24 MiB
        (8, 20 + 24),  # what an op takes counts its results
        (
            30,
            20 + 22 + 24,
        ),  # 22 MiB besides a result of 8, then 24 for one of 24, and 6 besides it, where 8 MiB were left
        (50, 20 + 42 + 26),  # 42 MiB besides the first result, where the second finds room, and 26 besides that
    ],
)
def test_what_ops_take_while_they_run_is_in_the_pool(working_mib: int, pool_mib: int) -> None:
    values = tuple(
        ValueRecord(name, nbytes * MIB, producer=i) for i, (name, nbytes) in enumerate((("a", 8), ("b", 24)))
    )
    ops = tuple(OpRecord(one.name, (), (i,), 1.0, working_bytes=working_mib * MIB) for i, one in enumerate(values))
    events = ((PHASE, FORWARD), (OP, 0, 0), (OP, 0, 1), (DIES, 0, 0), (DIES, 0, 1), (RETURN, 0), (PHASE, BACKWARD))
    profile = Profile((UnitGraph(values, ops),), (UnitCall("layer", 0),), StepLog(events), step_s=1.0)
    assert pool_bytes((profile, recollect.Plan({}))) == pool_mib * MIB

"""What is in memory beside a step that `attach` records counts toward the budget, as far as it can be seen."""

import copy
import gc
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import recollect
from recollect.attaching.attached import Attached
from recollect.measuring.deaths import allocated_storages
from recollect.measuring.meter import measure_peak, storage_bytes
from recollect.recording.trackers import UnrelatedMemory
from residual_model import Model, Residual, attached_loop, step

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def without_what_other_tests_hold() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def other_bytes(attached: Attached) -> int:
    return attached.planned[-1].profile.persistent.get("other_allocations", 0)


def test_a_copy_of_the_weights_that_no_step_reads_is_counted() -> None:
    net = Model()
    average = copy.deepcopy(net)
    with attached_loop("80%", net) as (_, optimizer, attached):
        step(net, optimizer, rows=512)
        assert other_bytes(attached) == storage_bytes(average.parameters())
        measured = measure_peak(lambda: step(net, optimizer, rows=512), device="cpu")
        assert attached.budget_bytes is not None
        assert measured.peak_bytes <= attached.budget_bytes


def test_a_teacher_that_runs_before_the_first_call_is_counted() -> None:
    net, teacher, batch = Residual(), Residual().eval(), torch.randn(512, 32)
    with attached_loop("80%", net) as (_, optimizer, attached):
        with torch.no_grad():
            wanted = teacher(batch)
        out = net(batch)
        (out - wanted).square().mean().backward()
        optimizer.step()
        # What it made is there as long as the step is; the loss reads it.
        assert other_bytes(attached) == storage_bytes(teacher.parameters())


def test_the_part_of_a_batch_that_no_op_reads_is_counted() -> None:
    names = torch.zeros(512)
    with attached_loop("80%") as (net, optimizer, attached):
        step(net, optimizer, rows=512)
        assert other_bytes(attached) == storage_bytes([names])


def test_the_last_output_is_not_counted_as_a_bystander() -> None:
    with attached_loop("80%", Residual()) as (net, optimizer, attached):
        # The second one is recorded, too, while the output of the first is alive until forward ends.
        for rows in (512, 544):
            out = net(torch.randn(rows, 32))
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert other_bytes(attached) == 0
        assert attached.recorded_steps == [0, 1]


def test_memory_that_is_not_the_allocators_does_not_count() -> None:
    array = torch.from_numpy(np.zeros(1000))
    shared = torch.zeros(1000).share_memory_()
    own = torch.zeros(1000)
    bystanders = UnrelatedMemory(CPU, [], allocated_storages())
    assert bystanders.nbytes(0) == storage_bytes([own])
    del array, shared


def test_only_attach_looks_at_all_tensors() -> None:
    net, average = Residual(), Residual()
    profile = recollect.record(net, torch.randn(512, 32), loss_fn=lambda out: out.square().mean())
    assert "other_allocations" not in profile.persistent
    del average

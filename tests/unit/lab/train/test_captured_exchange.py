"""Micro-batches of `recollect train` as CUDA graphs: the bits of a run without, and what is refused where there are none."""

import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch

import recollect
from recollect.errors import ConfigError
from recollect.integrations.megatron.rules import RecomputeConfig
from recollect.lab.train.exchange import CapturedExchange
from recollect.lab.train.loop import train
from recollect.lab.train.session import Session, open_session
from repeated_runs import RepeatedRuns
from training_runs import config


def opened(folder: Path, micro_batches: int) -> Session:
    folder.mkdir()
    flags = config(folder)
    optim = dataclasses.replace(flags.optim, accumulation=micro_batches)
    session = open_session(dataclasses.replace(flags, optim=optim))
    session.seed()
    return session


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_captured_steps_have_the_bits_of_plain_ones(tmp_path: Path, micro_batches: int) -> None:
    plain, session = (opened(tmp_path / name, micro_batches) for name in ("plain", "captured"))
    batches = list(session.batches(0))
    profile = recollect.record(session.model, batches[0], holds_output=False, gradients="freed")
    plan = recollect.classic_plan(profile.for_capture(), "full")
    graphs = partial(RepeatedRuns, session.model)
    exchange = CapturedExchange(
        session.model, session.optimizer, batches[0], plan, micro_batches, graphs, lambda line: None
    )
    session.trained = dataclasses.replace(session.trained, exchange=exchange)
    for number in range(3):
        expected, got = (one.trained.step(list(one.batches(number)), clip_norm=1.0) for one in (plain, session))
        assert got == expected
    weights = zip(plain.model.state_dict().values(), session.model.state_dict().values(), strict=True)
    assert all(torch.equal(*pair) for pair in weights)
    exchange.captured.remove()


def test_there_are_no_graphs_on_a_cpu(tmp_path: Path) -> None:
    flags = config(tmp_path)
    captures = dataclasses.replace(flags, step=dataclasses.replace(flags.step, cuda_graph_impl="full_iteration"))
    message = (
        r"got --cuda-graph-impl='full_iteration', --device='cpu': CUDA graphs repeat kernels of a CUDA device\. Leave "
        r"--cuda-graph-impl out, or train on one\."
    )
    with pytest.raises(ConfigError, match=message):
        train(captures)


def test_a_captured_step_has_no_other_ways_to_save_memory(tmp_path: Path) -> None:
    flags = config(tmp_path).step
    message = (
        r"cuda_graph_impl: got full_iteration with loss_chunks or with values that are offloaded, expected neither: a captured "
        r"step computes the loss whole, and copies nothing to the host\. Leave them out\."
    )
    offloads = RecomputeConfig(cpu_offloading=True, cpu_offloading_num_layers=1)
    for changes in ({"loss_chunks": 4}, {"host_budget": "1GiB", "memory_budget": "1GiB"}, {"recompute": offloads}):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(flags, cuda_graph_impl="full_iteration", **changes)

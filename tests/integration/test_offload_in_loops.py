"""`fit`, `attach` and `verify` with host memory, in loops that are not ours: bits, budgets, and what is said."""

import gc
from functools import partial

import pytest
import torch

import recollect
from predictions import MOST_OVER_BYTES
from recollect.engine.offload import carriers
from recollect.errors import ConfigError, OffloadError
from recollect.lab.models.architectures import llama_config
from recollect.lab.models.gpt import GPTModel
from recollect.measuring.host_memory import host_memory_bytes
from recollect.measuring.meter import measure_peak, storage_bytes
from slow_copies import SlowCarrier

TOKENS = torch.arange(4 * 128).remainder(256).reshape(4, 128)
BATCH = {"tokens": TOKENS, "labels": TOKENS}


def model() -> GPTModel:
    torch.manual_seed(0)
    return GPTModel(llama_config(num_layers=6, hidden_size=128, num_attention_heads=4, vocab_size=256))


def step(trained: GPTModel) -> None:
    trained.zero_grad()
    trained(**BATCH).loss.backward()


def gradients(trained: GPTModel) -> list[torch.Tensor]:
    step(trained)
    return [p.grad.clone() for p in trained.parameters() if p.grad is not None]


@pytest.fixture(scope="module")
def plain() -> list[torch.Tensor]:
    return gradients(model())


def peak_bytes(trained: GPTModel) -> int:
    """The measured peak of a step, whose gradients are freed before it."""
    trained.zero_grad()
    gc.collect()
    resident_bytes = storage_bytes([*trained.parameters(), *trained.buffers(), TOKENS])

    def run() -> None:
        trained(**BATCH).loss.backward()

    return measure_peak(run, device="cpu", baseline_bytes=resident_bytes).peak_bytes


@pytest.fixture(scope="module")
def plan() -> recollect.Plan:
    """What `fit` makes of 45 % with host memory."""
    return recollect.fit(model(), BATCH, "45%", host_budget="1GiB", gradients="freed", holds_output=False)


def test_fit_offloads_within_the_budget_and_keeps_every_bit(plan: recollect.Plan, plain: list[torch.Tensor]) -> None:
    assert plan.offloads and plan.host_budget_bytes == 2**30
    trained = model()
    with recollect.apply(trained, plan) as applied:
        assert all(map(torch.equal, plain, gradients(trained)))
        assert peak_bytes(trained) <= (plan.budget_bytes or 0)
        use = applied.host_use
    assert use is not None
    assert use.most_bytes == plan.predicted_host_bytes and (use.num_missed, use.num_stayed) == (0, 0)


def test_verify_says_what_was_in_host_memory(plan: recollect.Plan) -> None:
    report = recollect.verify(model(), BATCH, plan, gradients="freed", holds_output=False, time=False)
    assert report.equal and report.host is not None
    assert report.host.most_bytes == plan.predicted_host_bytes
    assert "values asked for out of time" in str(report) and "host memory      " in str(report)


def test_attach_offloads_after_the_step_that_it_records(plain: list[torch.Tensor]) -> None:
    trained, lines = model(), []
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.0)
    attached = recollect.attach(trained, optimizer, "50%", host_budget="1GiB", log=lines.append)
    for _ in range(3):
        step(trained)
        assert all(map(torch.equal, plain, [p.grad for p in trained.parameters() if p.grad is not None]))
        optimizer.step()
    assert attached.plan is not None and attached.plan.offloads and attached.recorded_steps == [0]
    assert len(lines) == 1 and ", host memory " in lines[0]


def test_the_peak_does_not_depend_on_the_link(plan: recollect.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth, once and ten times as fast: the same peak, to the byte."""
    peaks = set()
    for bytes_per_s in (5e7, 5e8, 5e9):
        monkeypatch.setitem(carriers.CARRIERS, "cpu", partial(SlowCarrier, bytes_per_s, bytes_per_s))
        trained = model()
        with recollect.apply(trained, plan) as applied:
            step(trained)
            peaks.add(peak_bytes(trained))
            assert applied.host_use is not None and applied.host_use.num_missed == 0
    (measured,) = peaks
    assert abs(measured - (plan.predicted_peak_bytes or 0)) <= MOST_OVER_BYTES


def test_more_host_memory_than_there_is_is_refused() -> None:
    much = host_memory_bytes() + 1
    trained = model()
    with pytest.raises(ConfigError, match=r"host_budget=.*this machine, or the container or job that .* has"):
        recollect.fit(trained, BATCH, "50%", host_budget=much)
    with pytest.raises(ConfigError, match="host_budget"):
        recollect.attach(trained, torch.optim.SGD(trained.parameters()), "50%", host_budget=much)


def test_a_device_that_nothing_copies_from_is_named() -> None:
    with torch.device("meta"):
        trained = GPTModel(llama_config(num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=64))
    plan = recollect.Plan({"decoder.layers.0": recollect.UnitPlan({"mlp.linear_fc1.mm": "offload"})})
    with pytest.raises(OffloadError, match="values on meta cannot be copied; expected cpu, or PyTorch's accel"):
        recollect.apply(trained, plan)

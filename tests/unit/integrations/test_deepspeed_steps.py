"""Where the steps of DeepSpeed's engine end, on a stand-in that counts as its engine does."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from recollect._torch_parallel import fake_process_group
from recollect.errors import BudgetTooSmallError
from recollect.integrations.deepspeed.engine import AttachedEngine
from recollect.integrations.deepspeed.section import BudgetSection
from recollect.integrations.trainers import say_nothing


class Engine:
    """Steps where gradients of enough micro-batches are there, and does nothing before."""

    def __init__(self, accumulation: int) -> None:
        layers = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)]
        self.module = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.module.parameters())
        self.accumulation = accumulation
        self.bucket_size = 0
        self.micro_steps = self.global_steps = 0

    def zero_optimization(self) -> bool:
        return self.bucket_size > 0

    def zero_reduce_bucket_size(self) -> int:
        return self.bucket_size

    def step(self) -> None:
        self.micro_steps += 1
        if self.micro_steps % self.accumulation == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.global_steps += 1


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    with fake_process_group(0, 1):
        yield


@pytest.mark.parametrize(("accumulation", "num_planned"), [(1, [1, 1, 1]), (3, [0, 0, 1, 1, 1, 1])])
def test_a_step_ends_after_the_last_of_its_micro_batches(accumulation: int, num_planned: list[int]) -> None:
    engine: Any = Engine(accumulation)
    attached = AttachedEngine(engine, BudgetSection(memory_budget="80%"), say_nothing)
    found = []
    for _ in num_planned:
        # The results are larger than what lives through the whole step.
        engine.module(torch.randn(256, 32)).square().mean().backward()
        engine.step()
        found.append(len(attached.planned))
    assert found == num_planned
    assert f"{engine.global_steps} steps, 1 of them recorded" in attached.report()
    attached.remove()


def test_the_bucket_is_named_with_the_setting_that_sizes_it() -> None:
    engine: Any = Engine(1)
    engine.bucket_size = 500_000_000
    attached = AttachedEngine(engine, BudgetSection(memory_budget="1KiB"), say_nothing)
    engine.module(torch.randn(256, 32)).square().mean().backward()
    setting = r"DeepSpeed's bucket for gradients takes up to 1.9 GiB .* \(zero_optimization.reduce_bucket_size = 500,000,000\)"
    assert re.search(setting, attached.report())
    with pytest.raises(BudgetTooSmallError, match=setting):
        engine.step()
    attached.remove()

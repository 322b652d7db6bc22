"""Units that run several times in a step: planned as well as those that run once."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocks import Block, Computes
from recollect.planning.choose import Planner
from recollect.profile.profile import Profile
from recorded_steps import Step, recorded

WIDTH = 32
PARTS = (0.7, 0.5, 0.4)


def loop_of(num_blocks: int, num_loops: int) -> Computes:
    """Blocks that run several times, one after the other."""

    def forward(self: Any, hidden: Tensor) -> Tensor:
        hidden = self.stem(hidden)
        for _ in range(num_loops):
            for block in self.blocks:
                hidden = block(hidden)
        return self.head(hidden).square().mean()

    blocks = nn.ModuleList(Block(WIDTH) for _ in range(num_blocks))
    return Computes(forward, stem=nn.Linear(WIDTH, WIDTH), blocks=blocks, head=nn.Linear(WIDTH, 8))


def profile_of(model: nn.Module, step: Step, batch: Tensor) -> Profile:
    return recorded(model, step, [batch])


def once(model: nn.Module, *batches: Tensor) -> Step:

    def step() -> None:
        loss = torch.stack([model(batch) for batch in batches]).sum()
        loss.backward()

    return step


def slowdowns(profile: Profile) -> list[float]:
    """Slowdowns at parts of what the step needs beside what is always there."""
    planner = Planner(profile)
    growth_bytes = planner.plain_peak_bytes - profile.persistent_bytes
    plans = [planner.plan(profile.persistent_bytes + round(part * growth_bytes)) for part in PARTS]
    return [plan.predicted_slowdown or 0.0 for plan in plans]


@pytest.fixture(scope="module")
def model() -> Computes:
    torch.manual_seed(0)
    return loop_of(num_blocks=6, num_loops=1)


@pytest.fixture(scope="module")
def batch() -> Tensor:
    return torch.randn(256, WIDTH)


def test_a_pair_is_as_fast_as_one_pass_twice_as_large(model: Computes, batch: Tensor) -> None:
    pair = slowdowns(profile_of(model, once(model, batch[:128], batch[128:]), batch))
    single = slowdowns(profile_of(model, once(model, batch), batch))
    assert all(one <= 1.1 * other for one, other in zip(pair, single, strict=True)), (pair, single)


def test_recurrent_depth_is_close_to_its_bound(batch: Tensor) -> None:
    loop = loop_of(num_blocks=3, num_loops=6)
    profile = profile_of(loop, once(loop, batch), batch)
    planner = Planner(profile)
    growth_bytes = planner.plain_peak_bytes - profile.persistent_bytes
    plan = planner.plan(profile.persistent_bytes + round(0.25 * growth_bytes))
    assert (plan.predicted_slowdown or 0.0) <= 1.25 * (plan.bound_slowdown or 0.0)

"""`fit` says what its plan does not count, and again at the step that needs it; warnings name the line of the program."""

import warnings
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import recollect
from blocks import Computes
from recollect.errors import BudgetWarning, ProfileMismatchWarning
from recollect.warning import warn_user


@pytest.fixture
def model() -> Iterator[nn.Module]:
    torch.manual_seed(0)
    yield nn.Sequential(*[nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(3)])


def fitted(model: nn.Module, **options: object) -> recollect.Plan:
    return recollect.fit(model, torch.randn(32, 16), "90%", loss_fn=lambda out: out.square().mean(), **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rows: int = 32) -> None:
    model(torch.randn(rows, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_an_optimizer_that_is_not_counted_is_named(model: nn.Module) -> None:
    assert "counts no optimizer: fit got none" in str(fitted(model))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.warns(
        BudgetWarning, match=r"Sequential is trained by AdamW, whose state of .* its plan does not count"
    ):
        train(model, optimizer)
    train(model, optimizer)  # It says so once.
    for applied in recollect.applied_to(model):
        applied.remove()
    train(model, torch.optim.Adam(model.parameters()))


def test_an_optimizer_without_state_needs_no_word(model: nn.Module) -> None:
    fitted(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_larger_batch_is_named(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    assert "counts" not in str(fitted(model, optimizer=optimizer))
    train(model, optimizer)
    train(model, optimizer, rows=16)
    with pytest.warns(
        BudgetWarning, match=r"got a larger batch than its plan was made for \(shapes \[33, 16\] and \[32, 16\]\)"
    ):
        train(model, optimizer, rows=33)


def test_the_tensors_of_any_mapping_are_the_batch(model: nn.Module) -> None:
    def one_input(self: Any, rows: torch.Tensor) -> torch.Tensor:
        return self.inner(rows).square().mean()

    # As Hugging Face's BatchEncoding is one.
    whole, batch = Computes(one_input, inner=model), UserDict(rows=torch.randn(32, 16))
    profile = recollect.record(whole, batch)
    assert profile.persistent["batch"] == batch["rows"].nbytes
    assert "other_tensors" not in profile.persistent
    plan = recollect.fit(whole, batch, "90%")
    with pytest.warns(BudgetWarning, match=r"shapes \[33, 16\] and \[32, 16\]"):
        whole(torch.randn(33, 16))
    assert recollect.verify(whole, batch, plan, time=False).equal


def test_a_plan_made_in_eval_mode_is_named(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    model.eval()
    assert "made for the model in eval mode" in str(fitted(model, optimizer=optimizer))
    train(model, optimizer)
    model.train()
    with pytest.warns(BudgetWarning, match="trains, and its plan was made in eval mode"):
        train(model, optimizer)


def test_the_innermost_line_outside_of_recollect() -> None:
    with pytest.warns(ProfileMismatchWarning, match="^text$") as caught:
        warn_user("text", ProfileMismatchWarning)
    assert [warning.filename for warning in caught] == [__file__]


def test_a_warning_from_a_hook_of_pytorch_names_the_loop_that_calls_the_model() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters())
    recollect.attach(model, optimizer, budget="1GiB")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", BudgetWarning)
        for layer in model:
            layer(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    assert [warning.filename for warning in caught] == [__file__]

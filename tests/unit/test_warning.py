"""Warnings name the line of the user's program."""

import warnings

import pytest
import torch
from torch import nn

import recollect
from recollect.errors import BudgetWarning, ProfileMismatchWarning
from recollect.warning import warn_user


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

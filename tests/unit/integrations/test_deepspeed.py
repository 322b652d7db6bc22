"""DeepSpeed's section `activation_checkpointing` and the stand-in for `deepspeed.checkpointing`: what they mean here."""

import json
import re
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recollect.engine.content import has_same_bits
from recollect.errors import ConfigError, ConfigWarning, NotYetError
from recollect.integrations.deepspeed import ActivationCheckpointing, checkpointing, deepspeed_plan
from recollect.planning.classic import classic_plan
from toy_profile import stack

DEFAULTS = {
    "partition_activations": False,
    "cpu_checkpointing": False,
    "contiguous_memory_optimization": False,
    "number_checkpoints": None,
    "synchronize_checkpoint_boundary": False,
    "profile": False,
}


def section(**settings: Any) -> ActivationCheckpointing | None:
    return ActivationCheckpointing.of({"activation_checkpointing": settings})


def test_no_section_recomputes_nothing() -> None:
    plan = deepspeed_plan(stack(3), ActivationCheckpointing.of({"train_batch_size": 8}))
    assert not any(unit.recomputes_anything for unit in plan.units.values())
    assert plan.note == "DeepSpeed: no activation checkpointing"


@pytest.mark.parametrize("settings", [{}, DEFAULTS])
def test_a_section_means_each_layer(settings: dict[str, Any]) -> None:
    plan = deepspeed_plan(stack(3), section(**settings))
    assert plan.units == classic_plan(stack(3), "full").units
    assert plan.note == "DeepSpeed: activation checkpointing, 1 layers a region"


def test_regions_of_a_pipeline_module() -> None:
    plan = deepspeed_plan(stack(5), section(), activation_checkpoint_interval=2)
    assert plan.units == classic_plan(stack(5), "every_nth", 2).units
    plan = deepspeed_plan(stack(5), section(), activation_checkpoint_interval=0)
    assert not any(unit.recomputes_anything for unit in plan.units.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"synchronize_checkpoint_boundary": True},
            "synchronize_checkpoint_boundary has no effect: values are recomputed one by one",
        ),
        ({"profile": True}, "profile has no effect: recollect.layer_usage has the times"),
        ({"number_checkpoints": 4}, "number_checkpoints has no effect: it sizes the buffers of contiguous_memory"),
    ],
)
def test_what_means_nothing_on_the_tape_is_said(settings: dict[str, Any], message: str) -> None:
    with pytest.warns(ConfigWarning, match=message):
        found = section(**settings)
    plan = deepspeed_plan(stack(3), found)
    assert plan.units == classic_plan(stack(3), "full").units


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"partition_activations": True}, "partition_activations=True: not yet: kept values that are split"),
        ({"cpu_checkpointing": True}, "cpu_checkpointing=True: not yet: values that are copied to host memory"),
        (
            {"partition_activations": True, "contiguous_memory_optimization": True, "number_checkpoints": 3},
            "partition_activations=True: not yet",
        ),
    ],
)
def test_what_is_not_built_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(NotYetError, match=message):
        deepspeed_plan(stack(3), section(**settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"profile": "yes"}, "profile='yes': no such value. Set it to True or False."),
        (
            {"number_checkpoints": 0},
            "number_checkpoints=0: no such value. Set it to a whole number, 1 or more, or None.",
        ),
        ({"number_checkpoints": True}, "number_checkpoints=True: no such value"),
        ({"partition_activation": True}, "there is no such setting. Did you mean 'partition_activations'? Choose from"),
        (
            {"contiguous_memory_optimization": True},
            "contiguous_memory_optimization=True, partition_activations=False: only partitioned values are put together",
        ),
        (
            {"contiguous_memory_optimization": True, "partition_activations": True},
            "number_checkpoints=None: its buffers are sized by that number. Set number_checkpoints, or leave out",
        ),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        section(**settings)


@pytest.mark.parametrize("interval", [-1, 1.0, True])
def test_intervals_that_cannot_be(interval: Any) -> None:
    with pytest.raises(
        ConfigError, match=f"activation_checkpoint_interval={interval}: not a number of layers. Set it to 1"
    ):
        deepspeed_plan(stack(3), section(), activation_checkpoint_interval=interval)


@pytest.fixture(autouse=True)
def not_configured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("recollect.integrations.deepspeed.checkpointing._State.is_configured", False)
    yield


def gradients(call: Callable[..., Any]) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16)) for _ in range(3))
    )
    torch.manual_seed(1)
    reduce(lambda x, layer: call(layer, x), model, torch.randn(4, 16)).square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("call", [checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint])
def test_gradients_are_those_without_it(call: Callable[..., Any]) -> None:
    for expected, got in zip(gradients(lambda layer, x: layer(x)), gradients(call), strict=True):
        assert has_same_bits(expected, got)


def test_values_are_dropped() -> None:
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        gradients(lambda layer, x: layer(x))
        plain, saved[:] = sum(saved), []
        gradients(checkpointing.checkpoint)
    assert sum(saved) < plain


def test_all_keywords_are_the_functions_own() -> None:
    hidden = torch.ones(2, requires_grad=True)
    got = checkpointing.checkpoint(lambda x, *, debug: x * debug, hidden, debug=3.0)
    got.sum().backward()
    assert hidden.grad is not None and hidden.grad.tolist() == [3.0, 3.0]


def test_configure_reads_the_section_of_a_file(tmp_path: Path) -> None:
    pytest.importorskip("hjson", reason="DeepSpeed's configuration is read with its own parser")
    assert not checkpointing.is_configured()
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"activation_checkpointing": {"cpu_checkpointing": True}}))
    with pytest.raises(NotYetError, match="cpu_checkpointing=True: not yet"):
        checkpointing.configure(None, deepspeed_config=str(path))
    assert not checkpointing.is_configured()
    checkpointing.configure(None, deepspeed_config=str(path), checkpoint_in_cpu=False)
    assert checkpointing.is_configured()
    checkpointing.reset()


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"partition_activations": True}, NotYetError, "partition_activations=True: not yet: kept values that"),
        ({"checkpoint_in_cpu": True}, NotYetError, "cpu_checkpointing=True: not yet: values that are copied"),
        ({"contiguous_checkpointing": True}, ConfigError, "only partitioned values are put together"),
        (
            {"deepspeed_config": {"activation_checkpointing": {"profiles": True}}},
            ConfigError,
            "profiles=True: there is no such setting. Did you mean 'profile'",
        ),
    ],
)
def test_settings_that_cannot_be_configured(settings: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        checkpointing.configure(None, **settings)


@pytest.mark.parametrize("settings", [{"num_checkpoints": 3}, {"synchronize": True}, {"profile": True}])
def test_settings_without_effect_are_said(settings: dict[str, Any]) -> None:
    with pytest.warns(ConfigWarning, match="has no effect"):
        checkpointing.configure(None, **settings)


def test_results_have_the_form_that_deepspeed_gives_them() -> None:
    hidden = torch.ones(2, requires_grad=True)
    assert isinstance(checkpointing.checkpoint(lambda x: (x.sin(),), hidden), Tensor)
    assert isinstance(checkpointing.checkpoint(lambda x: [x.sin()], hidden), Tensor)
    first, second = two = checkpointing.checkpoint(lambda x: [x.sin(), 3], hidden)
    assert isinstance(two, tuple) and isinstance(first, Tensor) and second == 3
    assert checkpointing.checkpoint(lambda x: {"hidden": x.sin()}, hidden).keys() == {"hidden"}

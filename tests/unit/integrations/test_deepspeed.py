"""DeepSpeed's section `activation_checkpointing`: what it means here, and what it does not."""

import re
from typing import Any

import pytest

from recollect.errors import ConfigError, ConfigWarning, NotYetError
from recollect.integrations.deepspeed import ActivationCheckpointing, deepspeed_plan
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

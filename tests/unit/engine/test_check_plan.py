"""A plan from a profile of another PyTorch or another device: it is applied, with a warning that names the difference."""

import re
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import recollect
from recollect.costs.host_copies import host_link
from recollect.errors import OffloadError, ProfileMismatchWarning
from recollect.lab.models.architectures import llama_config
from recollect.lab.models.gpt import GPTModel
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile
from recorded_once import recorded_once

VERSION = torch.__version__.partition("+")[0]
OTHER = "2.0.0"  # older than any that recollect runs on


def model() -> GPTModel:
    torch.manual_seed(0)
    return GPTModel(llama_config(num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=64))


def recorded(*, fake: bool = False, **changes: Any) -> Profile:
    tokens = torch.arange(16)[None]
    return replace(recorded_once(model(), {"tokens": tokens, "labels": tokens}, fake=fake), **changes)


def warned(plan: Plan) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recollect.apply(model(), plan).remove()
    assert all(warning.category is ProfileMismatchWarning for warning in caught)
    # It points at who called `apply`.
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


def test_same_version_and_device() -> None:
    plan = recollect.plan(recorded(), "100%")
    assert (plan.torch_version, plan.device_name) == (torch.__version__, "cpu")
    assert warned(plan) == []


DIFFERENCES = [
    ({"torch_version": f"{VERSION}+cu128"}, None),
    ({"fake": True, "device_name": "NVIDIA H100"}, None),
    (
        {"torch_version": OTHER},
        f"the plan's profile was recorded with torch {OTHER}, and this is torch {VERSION}: ops, their times and the bytes that "
        "they work in can differ, so the step, though exact, may need more memory or time than predicted. Record it "
        "here and make a new plan.",
    ),
    (
        {"torch_version": OTHER, "device": "cuda:0", "device_name": "NVIDIA H100"},
        f"with torch {OTHER}, and this is torch {VERSION}, and on NVIDIA H100, and this model is on cpu:",
    ),
]


@pytest.mark.parametrize(("changes", "text"), DIFFERENCES, ids=["build", "fake", "version", "device and version"])
def test_differences(changes: dict[str, Any], text: str | None) -> None:
    messages = warned(recollect.plan(recorded(**changes), "100%"))
    assert len(messages) == (text is not None)
    assert all(text is not None and text in message for message in messages)


def test_classic_plans_say_where_they_come_from_too() -> None:
    (message,) = warned(recollect.classic_plan(recorded(device_name="NVIDIA H100"), "full"))
    assert "on NVIDIA H100" in message


def test_plan_read_from_a_file_remembers(tmp_path: Any) -> None:
    plan = recollect.plan(recorded(torch_version=OTHER), "100%")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert len(warned(Plan.load(tmp_path / "plan.json"))) == 1


def offloading(out: float, back: float, **fields: Any) -> Plan:
    unit = recollect.UnitPlan({"mlp.activation_func.silu": "offload"})
    rates = {"to_host_bytes_per_s": out, "from_host_bytes_per_s": back}
    return Plan({"decoder.layers.0": unit}, device_name="cpu", **rates, **fields)


def test_copies_that_are_slower_than_planned() -> None:
    """Both numbers of each direction, and what to do; whichever direction it is."""
    for planned in ((1e15, 1.0), (1.0, 1e15)):
        (message,) = warned(offloading(*planned))
        out, back = (f"{rate / 1e9:.3g}" for rate in planned)
        assert re.fullmatch(
            r"copies reach [\d.]+ GB/s to host memory and [\d.]+ GB/s back here, and the plan was made for "
            rf"{re.escape(out)} and {re.escape(back)} GB/s: gradients and peak are as planned, but steps may wait for copies\. "
            r"Make a new plan from a profile recorded here with host_link=True, or with a smaller link_share if other "
            r"copies always run\.",
            message,
        )


def test_copies_that_are_fast_enough() -> None:
    link = host_link(torch.device("cpu"))
    rates = link.to_host_bytes_per_s, link.from_host_bytes_per_s
    assert warned(offloading(*(1.4 * rate for rate in rates))) == []
    assert len(warned(offloading(*(1.6 * rate for rate in rates)))) == 1
    # What nothing is copied for, or nobody knows, is not measured.
    assert warned(replace(offloading(1e15, 1e15), units={})) == []


def test_no_room_to_try_copies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The plan's own copies may need less; if they do not, they say so."""
    host_link.cache_clear()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(OffloadError, match="is not available"):
        warned(offloading(1e15, 1e15, predicted_host_bytes=1))


def test_plans_written_by_hand_are_of_no_version() -> None:
    assert warned(Plan({})) == []


def test_model_without_parameters_in_memory() -> None:
    plan = recollect.plan(recorded(device_name="NVIDIA H100"), "100%")
    with torch.device("meta"):
        on_meta = model()
    recollect.apply(on_meta, plan).remove()

"""The stand-in for `deepspeed.checkpointing`: exact gradients, and a meaning or an error for every setting."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recollect.engine.content import has_same_bits
from recollect.errors import ConfigError, ConfigWarning, NotYetError
from recollect.integrations.deepspeed import checkpointing


@pytest.fixture(autouse=True)
def not_configured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("recollect.integrations.deepspeed.checkpointing._State.is_configured", False)
    yield


class Model(nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16)) for _ in range(3)
        )
        self.call = call

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = self.call(layer, hidden)
        return hidden


def gradients(call: Callable[..., Any]) -> list[Tensor]:
    model = Model(call)
    torch.manual_seed(1)
    model(torch.randn(4, 16)).square().sum().backward()
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
        (
            {"partition_activations": True},
            NotYetError,
            "partition_activations=True: not yet: kept values that are split",
        ),
        ({"checkpoint_in_cpu": True}, NotYetError, "cpu_checkpointing=True: not yet: values that are copied"),
        ({"contiguous_checkpointing": True}, ConfigError, "only partitioned values are put together"),
        ({"profile": "yes"}, ConfigError, "profile='yes': no such value"),
        (
            {"deepspeed_config": {"activation_checkpointing": {"profiles": True}}},
            ConfigError,
            "profiles=True: there is no such setting. Did you mean 'profile'",
        ),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        checkpointing.configure(None, **settings)


@pytest.mark.parametrize("settings", [{"num_checkpoints": 3}, {"synchronize": True}, {"profile": True}])
def test_settings_without_effect_are_said(settings: dict[str, Any]) -> None:
    with pytest.warns(ConfigWarning, match="has no effect"):
        checkpointing.configure(None, **settings)

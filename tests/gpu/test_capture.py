"""Steps captured as CUDA graphs: bits over 50 replays, pools as predicted, and errors for what waits for the device."""

import copy
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import recollect
from device_steps import sized
from recollect.capturing.captured_step import CapturedStep
from recollect.errors import ConfigError
from recollect.lab.models.architectures import llama_config
from recollect.lab.models.gpt import GPTModel
from recollect.recording.model_step import Step
from repeated_runs import RepeatedRuns


def model_and_batch(device: torch.device, dropout: float) -> tuple[GPTModel, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    width, length = (512, 1024) if device.type == "cuda" else (64, 256)
    config = llama_config(
        num_layers=6, hidden_size=width, num_attention_heads=8, vocab_size=512, hidden_dropout=dropout
    )
    tokens = torch.randint(0, 512, (2, length), device=device)
    return GPTModel(config).to(device), {"tokens": tokens, "labels": tokens}


def captured(model: nn.Module, batch: Any, budget: str, engine: Any = "tape") -> CapturedStep:
    optimizer = torch.optim.SGD(model.parameters())
    if next(iter(batch.values())).is_cuda:
        return recollect.capture(model, batch, optimizer, budget, engine=engine)
    step = Step(model, batch, None, optimizer, holds_output=False, gradients="freed")
    return CapturedStep(step, budget, graphs=partial(RepeatedRuns, model), engine=engine)


def trained(model: nn.Module, step: Any, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(7)
    losses = []
    for _ in range(50 if batch["tokens"].is_cuda else 3):
        losses.append(step(batch))
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *model.state_dict().values()]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("engine", ["tape", "graph"])
def test_replays_have_the_bits_of_the_captured_plain_step(device: torch.device, engine: Any, dropout: float) -> None:
    model, batch = model_and_batch(device, dropout)
    plain = copy.deepcopy(model)
    with captured(plain, batch, "100%") as step:
        assert not step.plan.predicted_slowdown
        expected = trained(plain, step, batch)
    with captured(model, batch, "80%", engine) as step:
        assert step.plan.predicted_slowdown
        got = trained(model, step, batch)
        if device.type == "cuda":
            # Within 1 %: workspaces may be made in a different order.
            assert step.pool_bytes == pytest.approx(step.predicted_pool_bytes, rel=0.01)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("engine", ["tape", "graph"])
def test_masks_that_transformers_makes_in_captured_steps(device: torch.device, engine: Any, is_masked: bool) -> None:
    """Its models read tensors to do without a mask; while a graph is captured, they must not."""
    torch.manual_seed(0)
    width, length = sized(device, (64, 256), (512, 1024))
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 8, "vocab_size": 512}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=6, use_cache=False, **sizes)).to(device)
    other = copy.deepcopy(model)
    tokens = torch.randint(512, (2, length), device=device)
    batch = {
        "input_ids": tokens,
        "labels": tokens,
        **({"attention_mask": torch.ones_like(tokens)} if is_masked else {}),
    }
    with captured(model, batch, "100%") as plain, captured(other, batch, "80%", engine) as planned:
        assert planned.plan.predicted_slowdown
        for _ in range(3):
            assert torch.equal(plain(batch), planned(batch))
            for one, same in zip(model.parameters(), other.parameters(), strict=True):
                assert torch.equal(one.grad, same.grad)  # type: ignore[arg-type]
                one.grad = same.grad = None


def test_a_pool_goes_with_its_step(cuda: torch.device) -> None:
    model, batch = model_and_batch(cuda, 0.0)
    torch.cuda.empty_cache()
    before_bytes = torch.cuda.memory_reserved()
    captured(model, batch, "100%").remove()
    torch.cuda.empty_cache()
    # Libraries' workspaces stay, on the stream of the capture.
    assert torch.cuda.memory_reserved() - before_bytes < 128 << 20


def test_a_loader_may_pin_memory_during_a_capture(cuda: torch.device) -> None:
    model, batch = model_and_batch(cuda, 0.0)
    is_over, errors = threading.Event(), list[Exception]()

    def pin() -> None:
        num_bytes = 1 << 12
        while not is_over.is_set() and not errors:
            try:
                torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            except Exception as error:
                errors.append(error)
            num_bytes = num_bytes % (1 << 24) + (1 << 12)

    thread = threading.Thread(target=pin)
    thread.start()
    try:
        with captured(model, batch, "100%") as step:
            step(batch)
    finally:
        is_over.set()
        thread.join()
    assert not errors


def test_what_waits_for_the_device_is_refused(cuda: torch.device) -> None:
    class Waits(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum().item() == 0:
                return x
            return super().forward(x)

    model = Waits(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3))).to(cuda)
    batch = torch.randn(8, 64, device=cuda)
    with pytest.raises(ConfigError, match="an op in it waits for the device, which a CUDA graph cannot repeat"):
        recollect.capture(model, batch, torch.optim.SGD(model.parameters()), "100%", loss_fn=torch.sum)
    assert torch.equal(model(batch), model(batch))

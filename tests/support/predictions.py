"""Models whose peaks are predicted and measured, with batches large enough for activations to be most of the memory."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

import recollect
from recollect.lab.models.architectures import llama_config
from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.sizes import NAMED_CONFIGS
from recollect.profile.profile import Profile
from recollect.simulation.decisions import decide
from recollect.simulation.simulate import simulate
from zoo import ZOO, Batch, Case

IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

# What is left out are scalars that PyTorch makes out of sight (24 bytes here). A KiB is added for them, and the recorded
# step, by which the prediction is calibrated, may have had a few kernels' workspaces more alive at its peak.
MOST_OVER_BYTES = 4096


# The loop that holds nothing: the loss is all that is left of a forward, and gradients are freed before the next.
LEAN_LOOP: Any = {"holds_output": False, "gradients": "freed"}


def larger(batch: Batch, times: int = 8) -> Batch:
    if isinstance(batch, Tensor):
        return batch.repeat(times, *[1] * (batch.dim() - 1))
    if isinstance(batch, dict):
        return {name: larger(tensor, times) for name, tensor in batch.items()}
    return tuple(larger(tensor, times) for tensor in batch)


def reference_llama() -> nn.Module:
    return GPTModel(
        llama_config(num_layers=4, hidden_size=64, num_attention_heads=4, num_query_groups=2, vocab_size=128)
    )


def reference_gpt() -> nn.Module:
    return GPTModel(NAMED_CONFIGS["gpt-tiny"].changed(core_attention="unfused", vocab_size=128))


def reference_batch() -> Batch:
    tokens = torch.randint(0, 128, (1, 24))
    return {"tokens": tokens, "labels": tokens}


def _larger_gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=64, n_embd=64, n_layer=6, n_head=4, n_positions=32, **IDS)
    return transformers.GPT2LMHeadModel(config)


def loss_of_output(output: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


LAYERS = tuple(f"decoder.layers.{i}" for i in range(4))
REFERENCE = Case("reference", reference_llama, reference_batch, LAYERS, loss_of_output)
GPT2 = Case("gpt2_6_layers", _larger_gpt2, ZOO["gpt2"].batch, tuple(f"transformer.h.{i}" for i in range(6)))
REFERENCE_GPT = Case("reference_gpt", reference_gpt, reference_batch, LAYERS, loss_of_output, is_random=True)
CASES = {**ZOO, REFERENCE.name: REFERENCE, REFERENCE_GPT.name: REFERENCE_GPT, GPT2.name: GPT2}
# With more budgets, and without an optimizer too, so that activations alone decide where the peak is.
MAIN_CASES = ("reference", "llama", "mixtral", "deepseek_v3", "gpt2_6_layers")


def classic_peaks(profile: Profile) -> list[int]:
    """Predicted peaks of the classic plans, calibration apart: fake recordings have none."""
    plans = [recollect.classic_plan(profile, name) for name in ("keep_all", "full", "sqrt")]  # type: ignore[arg-type]
    simulations = [simulate(profile, decide(profile, plan)) for plan in plans]
    return [max(one.forward_peak_bytes, one.backward_peak_bytes) for one in simulations]

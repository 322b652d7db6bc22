"""Hugging Face's trainer in two processes, with `torch_compile=True` and a memory budget: what each process checks of itself.

`test_metered_trainers.py` starts it as torchrun does.
"""

import functools
import os
import tempfile
from typing import Any

os.environ.update({"GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "true"})

import torch
import torch.distributed as dist
import transformers

from hugging_face_trainers import Sharding
from recollect.integrations.transformers import MemoryBudget
from recollect.planning.compiled_menu import compiled_menu
from recollect.plans.unit_plan import digest_of
from recollect.recording import engines

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}


def trained(
    folder: str, kind: type[transformers.Trainer] = transformers.Trainer, *, is_compiled: bool
) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, use_cache=False, **SIZES))
    tokens = torch.arange(24)
    args = transformers.TrainingArguments(
        folder, max_steps=3, torch_compile=is_compiled, report_to=[], logging_steps=1, use_cpu=True,
        save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    callback = MemoryBudget("95%", measure=True)
    data = [{"input_ids": tokens, "labels": tokens}] * 64
    trainer = kind(model, args, train_dataset=data, callbacks=[callback])
    trainer.train()
    assert callback.attached is not None
    logged = trainer.state.log_history
    measured = [entry["measured_peak_bytes"] for entry in logged if "measured_peak_bytes" in entry]
    plan = callback.attached.plan
    assert plan is not None and measured
    # Under FSDP2 gloo frees a layer's weights late in some steps.
    assert kind is Sharding or max(measured) <= plan.budget_bytes, (measured, plan)
    return [entry["loss"] for entry in logged if "loss" in entry], plan


def main() -> None:
    torch.set_num_threads(1)
    # Two sets of values to keep: compiling takes ten seconds each.
    engines.with_variants = functools.partial(engines.with_variants, menu=lambda graph: compiled_menu(graph)[:2])  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder:
        losses, plan = trained(folder, is_compiled=False)
        assert not plan.is_compiled
        for kind in (transformers.Trainer, Sharding):
            found, plan = trained(folder, kind, is_compiled=True)
            assert plan.is_compiled, (kind, plan)
            # Compiled code rounds in other places.
            assert all(abs(a - b) <= 1e-4 * a for a, b in zip(losses, found, strict=True)), (losses, found)
            plans: list[Any] = [None, None]
            dist.all_gather_object(plans, digest_of(plan.units))
            assert plans[0] == plans[1]


if __name__ == "__main__":
    main()

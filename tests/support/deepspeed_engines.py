"""DeepSpeed's engine on its CPU accelerator, in the loop of its documentation, to be run with a memory budget."""

import logging
import os
from collections.abc import Iterator
from typing import Any

# DeepSpeed reads these when it is imported; `metered_processes.py` sets them for each of two processes.
os.environ.update({"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"})
for _name, _value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_PORT", "29531")):
    os.environ.setdefault(_name, _value)

import deepspeed  # noqa: E402
import torch  # noqa: E402
from deepspeed.utils import logger  # noqa: E402
from torch import nn  # noqa: E402

from hugging_face_trainers import llama, texts  # noqa: E402
from metered_trainers import NUM_STEPS, Case, StepPeaks  # noqa: E402
from recollect.integrations.deepspeed import initialize  # noqa: E402

RANK = int(os.environ["RANK"])
logger.setLevel(logging.ERROR)
# What sends through the memory of one machine takes most of a minute to compile; without it gloo sends.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def config(stage: int, precision: str = "fp32", accumulation: int = 1, **changes: Any) -> dict[str, Any]:
    """A configuration whose buckets and thresholds are as small as the model."""
    zero = dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"), 20000)
    zero |= {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 20000}
    sizes = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": accumulation}
    clipped = {"gradient_clipping": 1.0, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return {**sizes, **clipped, "zero_optimization": zero, precision: {"enabled": True}, **changes}


def gathered(engine: Any) -> nn.Module:
    """A model with the engine's weights, which ZeRO-3 has in parts."""
    parameters = list(engine.module.parameters())
    partitioned = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    model: nn.Module = llama().to(engine.module.dtype)
    with deepspeed.zero.GatheredParameters(partitioned), torch.no_grad():
        for own, trained in zip(model.parameters(), parameters, strict=True):
            own.copy_(trained)
    return model


def batches(accumulation: int, longest_at: int | None = None) -> Iterator[tuple[dict[str, torch.Tensor], bool]]:
    """Micro-batches, and whether each is the last of its step; each process is longer in one step of its own."""
    data = texts(4 * NUM_STEPS * accumulation, 72)
    for number in range(NUM_STEPS * accumulation):
        length = 64 if longest_at is None or number // accumulation == longest_at + 3 * RANK else 60
        rows = data[4 * number : 4 * number + 4]
        yield (
            {name: torch.stack([row[name][:length] for row in rows]) for name in ("input_ids", "labels")},
            (number + 1) % accumulation == 0,
        )


def _case(
    stage: int, precision: str, accumulation: int, longest_at: int | None = None, *, is_made: bool = False
) -> Case:
    """`is_made`: `initialize` gets an engine that is there, as Accelerate's `prepare` returns it."""

    def run(budget: int | str | None, peaks: StepPeaks) -> tuple[nn.Module, int]:
        model = llama().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        given = {"model": model, "optimizer": optimizer, "config": config(stage, precision, accumulation)}
        if budget is None or is_made:
            engine, *_ = deepspeed.initialize(**given)
            given = {"model": engine}
        if budget is not None:
            engine, *_ = initialize(**given, memory_budget=budget)
        torch.manual_seed(3 + RANK)
        peaks.begin()
        for batch, is_last in batches(accumulation, longest_at):
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            if is_last:
                peaks.end()
        recorded = 0
        if budget is not None:
            recorded = len(engine.memory_budget.recorded_steps)
            engine.memory_budget.remove()
        trained = gathered(engine)
        engine.destroy()
        return trained, recorded

    return run


CASES: dict[str, Case] = {
    "0 fp32": _case(0, "fp32", 1),
    "3 fp32": _case(3, "fp32", 2),
    "3 bf16": _case(3, "bf16", 1, is_made=True),
    # In steps of one process and of the other, both record.
    "3 lengths": _case(3, "fp32", 1, longest_at=3),
}

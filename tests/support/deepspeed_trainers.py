"""Hugging Face's `Trainer` with a configuration of DeepSpeed, on its CPU accelerator, to be run with a memory budget."""

import tempfile
from typing import Any

# First, as it sets what DeepSpeed reads when it is imported.
import deepspeed_engines  # isort: skip
from torch import nn
from transformers import Trainer

from hugging_face_trainers import arguments, llama, texts, trained
from metered_trainers import Case, StepPeaks


def _case(stage: int, **changes: Any) -> Case:
    def run(budget: int | str | None, peaks: StepPeaks) -> tuple[nn.Module, int]:
        trainers: list[Trainer] = []
        with tempfile.TemporaryDirectory() as folder:
            precision = "bf16" if changes.get("bf16") else "fp32"
            args = arguments(folder, deepspeed=deepspeed_engines.config(stage, precision, accumulation=2), **changes)

            def make(callbacks: list[Any]) -> Trainer:
                trainers.append(Trainer(llama(), args, train_dataset=texts(480), callbacks=callbacks))
                return trainers[0]

            _, recorded = trained(make, budget, peaks)
        engine: Any = trainers[0].model_wrapped
        model = deepspeed_engines.gathered(engine)
        engine.destroy()
        return model, recorded

    return run


# With those of the engine, as importing both libraries takes longer than training.
CASES: dict[str, Case] = {
    **deepspeed_engines.CASES,
    "ZeRO-2": _case(2),
    "ZeRO-3 in bf16": _case(3, bf16=True),
}

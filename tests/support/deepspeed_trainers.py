"""Hugging Face's `Trainer` with a configuration of DeepSpeed, on its CPU accelerator, to be run with a memory budget."""

from functools import partial

# First, as it sets what DeepSpeed reads when it is imported.
import deepspeed_engines  # isort: skip
from torch import nn
from transformers import Trainer

from hugging_face_trainers import case, llama, texts
from metered_trainers import Case


def _gathered(trainer: Trainer) -> nn.Module:
    model = deepspeed_engines.gathered(trainer.model_wrapped)
    trainer.model_wrapped.destroy()
    return model


_case = partial(case, llama, data=partial(texts, 480), result=_gathered)
# With those of the engine, as importing both libraries takes longer than training.
CASES: dict[str, Case] = {
    **deepspeed_engines.CASES,
    "ZeRO-2": _case(deepspeed=deepspeed_engines.config(2, accumulation=2)),
    "ZeRO-3 in bf16": _case(deepspeed=deepspeed_engines.config(3, "bf16", accumulation=2), bf16=True),
}

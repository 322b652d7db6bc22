"""Compare what compiled layers take as estimated on fake tensors and as measured, for each set of values in both.

recollect calibrate --out hardware.json
OMP_NUM_THREADS=1 python benchmarks/estimated.py --hardware hardware.json --models llama gpt --bf16
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
import tyro
from torch import nn

import recollect
from recollect.lab.models.architectures import deepseek_v3_config, gpt_config, llama_config
from recollect.lab.models.gpt import GPTModel
from recollect.profile.graph import UnitGraph
from recollect.profile.variant import VariantRecord

_SIZE: dict[str, Any] = {"num_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": 512}
_HF = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_TOKENS = torch.arange(4 * 128).reshape(4, 128) * 7 % 512
_Step = tuple[nn.Module, dict[str, Any]]


def _reference(config: Any) -> _Step:
    return GPTModel(config), {"tokens": _TOKENS, "labels": _TOKENS}


def _hugging_face(kind: str, model: str, **settings: Any) -> _Step:
    config = getattr(transformers, kind)(**settings)
    return getattr(transformers, model)(config).train(), {"input_ids": _TOKENS, "labels": _TOKENS, "use_cache": False}


_MODELS: dict[str, Callable[[], _Step]] = {
    "gpt": lambda: _reference(gpt_config(**_SIZE, hidden_dropout=0.1, attention_dropout=0.1)),
    "llama": lambda: _reference(llama_config(**_SIZE)),
    "deepseek": lambda: _reference(deepseek_v3_config(**_SIZE)),
    "mixtral": lambda: _hugging_face(
        "MixtralConfig", "MixtralForCausalLM", **_HF, num_key_value_heads=2, num_local_experts=4
    ),
    "qwen2": lambda: _hugging_face("Qwen2Config", "Qwen2ForCausalLM", **_HF, num_key_value_heads=2),
    "gpt2": lambda: _hugging_face("GPT2Config", "GPT2LMHeadModel", vocab_size=512, n_embd=256, n_layer=2, n_head=4),
}


@dataclass
class Comparison:
    """What to compare."""

    hardware: str
    """File that `recollect calibrate` wrote on this machine."""
    models: tuple[str, ...] = tuple(_MODELS)
    bf16: bool = False


def main(asked: Comparison) -> None:
    torch.set_num_threads(1)
    for name in asked.models:
        torch.manual_seed(0)
        model, batch = _MODELS[name]()
        model = model.to(torch.bfloat16 if asked.bf16 else torch.float32)
        begin = time.perf_counter()
        estimated = recollect.record(model, batch, fake=True, hardware=asked.hardware, engine="compile")
        middle = time.perf_counter()
        measured = recollect.record(model, batch, engine="compile")
        print(f"{name}: estimated in {middle - begin:.0f} s, measured in {time.perf_counter() - middle:.0f} s")
        for one, other in zip(estimated.graphs, measured.graphs, strict=True):
            _compare(one, other)


def _compare(estimated: UnitGraph, measured: UnitGraph) -> None:
    found = {_kept(variant, estimated): variant for variant in estimated.variants}
    for variant in measured.variants:
        kept = _kept(variant, measured)
        if (guess := found.get(kept)) is not None:
            print(
                f"  {'default' if kept is True else len(variant.kept):>7} own {variant.own_bytes:>9,} "
                f"{guess.own_bytes - variant.own_bytes:+,}, forward {variant.forward_bytes:>9,} "
                f"{guess.forward_bytes - variant.forward_bytes:+,}, backward {_most(variant):>9,} "
                f"{_most(guess) - _most(variant):+,}, {1e3 * variant.step_s:.1f} ms x {guess.step_s / variant.step_s:.2f}"
            )


def _kept(variant: VariantRecord, graph: UnitGraph) -> bool | frozenset[str]:
    return variant.is_default or frozenset(graph.values[value].name for value in variant.kept)


def _most(variant: VariantRecord) -> int:
    return max((most_bytes for most_bytes, _, _ in variant.backward), default=0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(tyro.cli(Comparison))

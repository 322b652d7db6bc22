"""Which layers do settings of other tools cover? `recollect.coverage` against counts by other means.

    python benchmarks/covered_layers.py            # a minute, one core

For each setting, the same model also runs without it. An op that runs more often in backward than without the setting has run
again; one that reads a layer's parameters shows whose it is. What PyTorch's allocator holds after forward is what is kept, and
a state of the random generator for each call of a checkpoint that saves one. The exit status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import recollect
from recollect.lab.models.architectures import llama_config
from recollect.lab.models.gpt import GPTModel

# DeepSpeed and Accelerate read these.
os.environ.update({"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"})
for _name, _value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_PORT", "29577")):
    os.environ.setdefault(_name, _value)

WIDTH = 32
NUM_LAYERS = 4
GENERATOR_BYTES = torch.get_rng_state().nbytes


class Single(nn.Module):
    """A layer of one stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform each row."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Double(Single):
    """Another class of layers, as in models of two kinds of blocks."""


class Stack(nn.Module):
    """Layers, each called through a function of its number, the layer and its input."""

    def __init__(self, call: Callable[[int, nn.Module, torch.Tensor], torch.Tensor], kinds: str) -> None:
        super().__init__()
        self.first, self.call = nn.Linear(WIDTH, WIDTH), call
        self.layers = nn.ModuleList(Double() if kind == "d" else Single() for kind in kinds)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all layers; return the mean of the head's output."""
        x = self.first(x)
        for number, layer in enumerate(self.layers):
            x = self.call(number, layer, x)
        return self.head(x).mean()


@dataclass(frozen=True)
class Case:
    """A model with a setting, and the same without."""

    name: str
    model: Callable[[], nn.Module]
    """Makes the model with the setting."""
    plain: Callable[[], nn.Module]
    """Makes it without."""
    batch: Any
    layers: str
    """The path of the list of layers, up to their numbers."""
    covered: tuple[int, ...]
    """The numbers of those that the setting covers."""
    reads_weights: bool = True
    """Whether what runs again reads parameters that a layer's name leads to; FSDP2 gathers others."""
    first_number: int = 0
    """Layers of other lists, before it."""
    gathered_bytes: int = 0
    """Parameters of the root, which FSDP2 gathers and does not free after forward."""


def _plainly(_: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x)  # type: ignore[no-any-return]


def _stack(call: Any = _plainly, kinds: str = "ssss") -> Stack:
    torch.manual_seed(0)
    return Stack(call, kinds)


def _only(numbers: tuple[int, ...], run: Callable[..., torch.Tensor]) -> Any:
    return lambda number, layer, x: run(layer, x) if number in numbers else layer(x)


def _frozen_first(model: Stack) -> Stack:
    model.first.requires_grad_(False)
    return model


def _hugging_face(config: Any, setting: dict[str, bool] | None, *, training: bool = True) -> nn.Module:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return _switched_on(AutoModelForCausalLM.from_config(config), setting).train(training)


def _switched_on(model: Any, setting: dict[str, bool] | None) -> nn.Module:
    if setting is not None:
        (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)(setting)
    return model  # type: ignore[no-any-return]


def _mllama(setting: dict[str, bool] | None) -> nn.Module:
    """Llama 3.2 Vision, whose vision layers are of a class that the switch does not reach in transformers 5.24."""
    from transformers import MllamaConfig, MllamaForConditionalGeneration

    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 4}
    vision = {
        "attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "vision_output_dim": 3 * WIDTH,
        "max_num_tiles": 2,
    }
    vision |= {"num_global_layers": 2, "intermediate_layers_indices": [1, 2]}
    text = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64, "cross_attention_layers": [1, 3]}
    text |= {"use_cache": False, "pad_token_id": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    torch.manual_seed(0)
    model: Any = MllamaForConditionalGeneration(
        MllamaConfig(
            vision_config={**sizes, **vision, "supported_aspect_ratios": [[1, 1], [1, 2]]},
            text_config={**sizes, **text},
        )
    )
    return _switched_on(model, setting).train()


def _picture() -> dict[str, torch.Tensor]:
    tokens = torch.arange(3, 19)[None]
    return {
        "input_ids": tokens,
        "labels": tokens,
        "pixel_values": torch.randn(1, 1, 2, 3, 28, 28),
        "aspect_ratio_ids": torch.tensor([[2]]),
        "aspect_ratio_mask": torch.ones(1, 1, 2, dtype=torch.int64),
        "cross_attention_mask": torch.ones(1, 16, 1, 2, dtype=torch.int64),
    }


def _megatron(*, setting: Any = None, budget: str = "") -> nn.Module:
    torch.manual_seed(0)
    model = GPTModel(llama_config(num_layers=NUM_LAYERS, hidden_size=WIDTH, num_attention_heads=2, vocab_size=64))
    if setting is not None or budget:
        profile = recollect.record(model, _tokens("tokens"), fake=True, hardware="H100")
        plan = recollect.megatron_plan(profile, setting) if budget == "" else recollect.plan(profile, budget)
        recollect.apply(model, plan)
    return model


def _tokens(name: str) -> dict[str, torch.Tensor]:
    tokens = torch.arange(64).reshape(2, 32) % 64
    return {name: tokens, "labels": tokens}


def _wrapped(*, sharded: bool, kinds: str) -> nn.Module:
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers

    model = _stack(kinds=kinds)
    wrappers.apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Double))
    return _sharded(model) if sharded else model


def _sharded(model: nn.Module) -> nn.Module:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    _process_group()
    mesh = dist.init_device_mesh("cpu", (1,))
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _process_group() -> None:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", rank=0, world_size=1)


def _deepspeed(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    if not deepspeed.checkpointing.is_configured():
        _process_group()
        deepspeed.init_distributed("gloo", verbose=False)
        deepspeed.checkpointing.configure(None, partition_activations=False)
    return deepspeed.checkpointing.checkpoint(layer, x)  # type: ignore[no-any-return]


def _accelerated(setting: dict[str, bool] | None) -> nn.Module:
    """Return the model in DistributedDataParallel, as Accelerate does in a group of processes."""
    from accelerate import Accelerator

    _process_group()
    return Accelerator(cpu=True).prepare(_hugging_face(_llama(), setting))  # type: ignore[no-any-return]


def _llama() -> Any:
    from transformers import LlamaConfig

    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 2, "vocab_size": 64}
    return LlamaConfig(num_hidden_layers=NUM_LAYERS, use_cache=False, **sizes)  # type: ignore[arg-type]


def cases() -> list[Case]:
    """Return the settings: of Hugging Face, PyTorch, FSDP2, DeepSpeed, Accelerate, Megatron, and our own."""
    rows, everything = torch.randn(16, WIDTH), tuple(range(NUM_LAYERS))
    words, ours = _tokens("input_ids"), _tokens("tokens")
    products = [torch.ops.aten.addmm.default]
    selects = functools.partial(create_selective_checkpoint_contexts, products)
    plain_llama = functools.partial(_hugging_face, _llama(), None)
    full_block = recollect.RecomputeConfig(
        recompute_granularity="full", recompute_method="block", recompute_num_layers=3
    )
    core = recollect.RecomputeConfig(recompute_granularity="selective", recompute_modules=("core_attn",))
    new, old = {"use_reentrant": False}, {"use_reentrant": True}
    hf, listed = "model.layers", "layers"
    again = functools.partial(checkpoint, use_reentrant=False)
    reentrant = functools.partial(checkpoint, use_reentrant=True)
    return [
        Case("Hugging Face, switch", lambda: _hugging_face(_llama(), new), plain_llama, words, hf, everything),
        Case("Hugging Face, reentrant", lambda: _hugging_face(_llama(), old), plain_llama, words, hf, everything),
        Case(
            "Hugging Face, eval mode",
            lambda: _hugging_face(_llama(), new, training=False),
            lambda: _hugging_face(_llama(), None, training=False),
            words,
            hf,
            (),
        ),
        Case(
            "Hugging Face, Llama 3.2 Vision",
            lambda: _mllama(new),
            lambda: _mllama(None),
            _picture(),
            "model.language_model.layers",
            (6, 7, 8, 9),
            first_number=6,
        ),
        Case("torch checkpoint, 2 of 4", lambda: _stack(_only((1, 3), again)), _stack, rows, listed, (1, 3)),
        Case(
            "torch checkpoint, keeps products",
            lambda: _stack(_only(everything, functools.partial(again, context_fn=selects))),
            _stack,
            rows,
            listed,
            everything,
        ),
        Case(
            "torch reentrant, frozen input",
            lambda: _frozen_first(_stack(_only((0, 1), reentrant))),
            lambda: _frozen_first(_stack()),
            rows,
            listed,
            (),
        ),
        Case(
            "checkpoint_wrapper, one class",
            lambda: _wrapped(sharded=False, kinds="ddss"),
            lambda: _stack(kinds="ddss"),
            rows,
            listed,
            (0, 1),
        ),
        Case(
            "FSDP2 and checkpoint_wrapper",
            lambda: _wrapped(sharded=True, kinds="dsds"),
            lambda: _sharded(_stack(kinds="dsds")),
            rows,
            listed,
            (0, 2),
            reads_weights=False,
            gathered_bytes=4 * (WIDTH * WIDTH + WIDTH + WIDTH + 1),
        ),
        Case("DeepSpeed, its function", lambda: _stack(_only((0, 1, 2), _deepspeed)), _stack, rows, listed, (0, 1, 2)),
        Case(
            "Accelerate, Hugging Face's switch",
            lambda: _accelerated(new),
            lambda: _accelerated(None),
            words,
            "module.model.layers",
            everything,
        ),
        Case(
            "Megatron, full block 3",
            lambda: _megatron(setting=full_block),
            _megatron,
            ours,
            "decoder.layers",
            (0, 1, 2),
        ),
        Case(
            "Megatron, selective core_attn",
            lambda: _megatron(setting=core),
            _megatron,
            ours,
            "decoder.layers",
            everything,
            reads_weights=False,
        ),
        Case("recollect.plan, 70 %", lambda: _megatron(budget="70%"), _megatron, ours, "decoder.layers", everything),
        Case("nothing", _stack, _stack, rows, listed, ()),
    ]


class Ops(TorchDispatchMode):
    """Counts ops that make values, and who reads the parameters of which layer, in forward and in backward apart."""

    def __init__(self, owners: dict[int, int]) -> None:
        super().__init__()
        self.owners, self.is_backward = owners, False
        self.counts: Counter[str] = Counter()
        self.readers: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if self.is_backward and isinstance(result, (torch.Tensor, tuple)) and not func.is_view:
            self.counts[str(func)] += 1
            for argument in torch.utils._pytree.tree_leaves((args, kwargs)):
                if isinstance(argument, torch.Tensor) and argument.numel():
                    owner = self.owners.get(argument.untyped_storage().data_ptr())
                    if owner is not None:
                        self.readers[owner] += 1
        return result


def counted(model: nn.Module, batch: Any, layers: str) -> Ops:
    """Run a step under the counter."""
    owners = {}
    for name, parameter in model.named_parameters():
        if name.startswith(f"{layers}.") and not hasattr(parameter, "_local_tensor"):
            owners[parameter.untyped_storage().data_ptr()] = int(name.removeprefix(f"{layers}.").partition(".")[0])
    with Ops(owners) as ops:
        loss = _loss(model, batch)
        ops.is_backward = True
        loss.backward()
    model.zero_grad()
    return ops


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    output = model(**batch) if isinstance(batch, dict) else model(batch)
    return output if isinstance(output, torch.Tensor) else output.loss


def held_bytes(model: nn.Module, batch: Any) -> int:
    """Return what the allocator holds after forward, besides the loss."""
    found = recollect.measure_peak(lambda: _loss(model, batch), device="cpu")
    return found.end_bytes - found.start_bytes - found.result.untyped_storage().nbytes()


@dataclass(frozen=True)
class Row:
    """One setting, counted twice."""

    case: Case
    found: recollect.Coverage
    recomputed_ops: int
    """More ops in backward than without the setting."""
    read_again: tuple[int, ...]
    """Layers whose parameters are read more often in backward than without it."""
    held_bytes: int
    """After forward."""

    @property
    def covered(self) -> tuple[int, ...]:
        """The layers that `coverage` calls covered."""
        return tuple(number for number, layer in enumerate(self.found.layers) if layer.covered)

    @property
    def ops_found(self) -> int:
        """Ops that `coverage` saw run again."""
        return sum(unit.recomputed_ops for unit in self.found.units)

    @property
    def bytes_found(self) -> int:
        """Bytes that `coverage` saw kept."""
        return sum(unit.kept_bytes for unit in self.found.units)

    @property
    def agrees(self) -> bool:
        """Whether all counts say the same."""
        # The loss, and the gradient that backward begins with.
        other_bytes = self.held_bytes + 8 - self.bytes_found - self.case.gathered_bytes
        return (
            self.covered == self.case.covered
            and self.covered == (self.read_again if self.case.reads_weights else self.covered)
            and self.ops_found == max(0, self.recomputed_ops)
            and other_bytes >= 0
            and other_bytes % GENERATOR_BYTES == 0
        )


def run(case: Case) -> Row:
    """Count one setting by both means."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        held = held_bytes(case.model(), case.batch)
        model = case.model()
        found = recollect.coverage(model, case.batch)
        ours = counted(model, case.batch, case.layers)
        plain = counted(case.plain(), case.batch, case.layers)
        read_again = tuple(sorted(case.first_number + number for number in ours.readers - plain.readers))
        more = sum(ours.counts.values()) - sum(plain.counts.values())
        return Row(case, found, more, read_again, held)


def main() -> int:
    """Print a row for each setting; return 1 if counts differ."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    print(
        "| setting | layers | covered | weights read again | ops run again | counted apart | kept | in the allocator | |"
    )
    print("|---|--:|---|---|--:|--:|--:|--:|---|")
    all_agree = True
    for case in cases():
        row = run(case)
        all_agree &= row.agrees
        covered, read = (", ".join(map(str, numbers)) or "none" for numbers in (row.covered, row.read_again))
        print(
            f"| {case.name} | {len(row.found.layers)} | {covered} | {read if case.reads_weights else '-'} | {row.ops_found} | "
            f"{max(0, row.recomputed_ops)} | {row.bytes_found:,} | {row.held_bytes:,} | "
            f"{'equal' if row.agrees else 'DIFFERENT'} |"
        )
    return not all_agree


if __name__ == "__main__":
    sys.exit(main())

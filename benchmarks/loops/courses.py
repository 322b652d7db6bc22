"""Loops whose steps change their course at equal shapes: by chance, by phase, by argument, by growth, by hooks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn

from loops.loop import VOCABULARY, Attach, Batch, Batches, text_batches, training_loop

__all__: list[str] = []

_WIDTH = 48
_DATA = text_batches(4, 64)


class Block(nn.Module):
    """A residual block; `extra` more runs of its inner part if asked for by its own attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, 4 * _WIDTH)
        self.down = nn.Linear(4 * _WIDTH, _WIDTH)
        self.extra = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(1 + self.extra):
            x = x + self.down(F.gelu(self.up(self.norm(x))))
        return x


class Net(nn.Module):
    """Embedding, blocks and heads; which of them run, and how often, is for each loop to say."""

    def __init__(self, num_blocks: int = 6, heads: tuple[str, ...] = ("lm",)) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.heads = nn.ModuleDict(
            {name: nn.Linear(_WIDTH, VOCABULARY // (4 if name == "small" else 1)) for name in heads}
        )
        self.path: Callable[[], Iterator[int]] = lambda: iter(range(len(self.blocks)))

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, head: str = "lm", loops: int = 1, twice: bool = False
    ) -> torch.Tensor:
        x = self.embedding(input_ids)
        for _ in range(loops):
            for index in self.path():
                x = self.blocks[index](x)
        loss = self.loss(x, labels, head)
        return loss + self.loss(x.flip(1), labels, head) if twice else loss

    def loss(self, x: torch.Tensor, labels: torch.Tensor, head: str) -> torch.Tensor:
        logits = self.heads[head](x).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten() % logits.shape[-1])


Change = Callable[[Net, int, Batch], dict[str, Any]]


def _loop(name: str, change: Change, make: Callable[[], Net] = Net, *, num_batches: int = 24) -> None:
    """Enter the commonest loop with something before each step, which also returns more arguments."""

    @training_loop(name, _DATA, num_batches, steps_differ=True)
    def train(batches: Batches, attach: Attach) -> list[nn.Module]:
        random.seed(5)
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        attach(model, optimizer)
        for number, batch in enumerate(batches):
            loss = model(**batch, **change(model, number, batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [model]


def _by_chance(keep: Callable[[Net], Iterator[int]], num_blocks: int = 6) -> Callable[[], Net]:
    def make() -> Net:
        model = Net(num_blocks)
        model.path = lambda: keep(model)
        return model

    return make


def _nothing(_model: Net, _number: int, _batch: Batch) -> dict[str, Any]:
    return {}


def _dropped(probability: float) -> Callable[[Net], Iterator[int]]:
    return lambda model: iter([i for i in range(len(model.blocks)) if random.random() >= probability])


_loop("layers dropped, 20 %", _nothing, _by_chance(_dropped(0.2)))
_loop("layers dropped, half of 12", _nothing, _by_chance(_dropped(0.5), 12))
_loop("early exit", _nothing, _by_chance(lambda m: iter(range(random.randint(1, len(m.blocks))))))
_loop("random recurrent depth", _nothing, _by_chance(lambda m: iter([0, 1] * random.randint(1, 5)), 2))
_loop("random order", _nothing, _by_chance(lambda m: iter(random.sample(range(6), random.randint(3, 6)))))
_loop("one of two branches", _nothing, _by_chance(lambda m: iter([0, *random.choice([(1, 2), (3, 4, 5)])])))


def _exit_grows(model: Net, number: int, _batch: Batch) -> dict[str, Any]:
    model.path = lambda: iter(range(min(6, 2 + number // 4)))
    return {}


def _loops_argument(_model: Net, number: int, _batch: Batch) -> dict[str, Any]:
    return {"loops": (1, 1, 2, 3)[number % 4]}


def _twice_argument(_model: Net, number: int, _batch: Batch) -> dict[str, Any]:
    return {"twice": number % 3 == 2}


def _heads(_model: Net, number: int, _batch: Batch) -> dict[str, Any]:
    return {"head": ("small", "lm", "aux")[number % 3]}


def _heads_by_chance(_model: Net, _number: int, _batch: Batch) -> dict[str, Any]:
    return {"head": random.choice(("small", "lm"))}


def _head_replaced(model: Net, number: int, _batch: Batch) -> dict[str, Any]:
    if number == 5:
        model.heads["lm"] = nn.Linear(_WIDTH, 3 * VOCABULARY)
    return {}


def _extra_work(model: Net, number: int, _batch: Batch) -> dict[str, Any]:
    for block in model.blocks:
        block.extra = int(number >= 5)
    return {}


def _extra_by_chance(model: Net, _number: int, _batch: Batch) -> dict[str, Any]:
    for block in model.blocks:
        block.extra = random.randint(0, 1)
    return {}


def _hooks(model: Net, number: int, _batch: Batch) -> dict[str, Any]:
    held = vars(model).setdefault("held", [])
    held.clear()
    if number == 5:
        for block in model.blocks:
            block.up.register_forward_hook(lambda _m, _a, out: held.append(out))
    return {}


def _hooks_switched_on(model: Net, number: int, _batch: Batch) -> dict[str, Any]:
    held = vars(model).setdefault("held", [])
    held.clear()
    if number == 0:
        for block in model.blocks:
            block.up.register_forward_hook(lambda _m, _a, out: held.append(out) if model.holds else None)
    vars(model)["holds"] = number >= 5
    return {}


def _thawed(model: Net, number: int, _batch: Batch) -> dict[str, Any]:
    for block in model.blocks[:4]:
        block.requires_grad_(number >= 5)
    return {}


def _evaluated(model: Net, number: int, _batch: Batch) -> dict[str, Any]:
    model.train(number % 4 != 3)
    return {}


def _phase(model: Net, number: int, _batch: Batch) -> dict[str, Any]:
    model.path = (lambda: iter([0, 1])) if number % 6 < 3 else (lambda: iter(range(6)))
    return {}


_loop("exit that moves back", _exit_grows)
_loop("iterations by argument", _loops_argument)
_loop("work by argument", _twice_argument)
_loop("heads in turn", _heads, lambda: Net(heads=("lm", "aux", "small")))
_loop("heads by chance", _heads_by_chance, lambda: Net(heads=("lm", "small")))
_loop("head replaced by a larger one", _head_replaced)
_loop("work by attribute", _extra_work)
_loop("work by attribute, by chance", _extra_by_chance)
_loop("hooks put on", _hooks)
_loop("hooks switched on", _hooks_switched_on)
_loop("layers thawed", _thawed)
_loop("evaluation mode in turn", _evaluated)
_loop("phases of few and of all layers", _phase)
_loop("layers dropped, 24 layers", _nothing, _by_chance(_dropped(0.1), 24))


def _steps(name: str, *, num_batches: int = 24, heads: tuple[str, ...] = ("lm",)) -> Any:
    """Enter a loop that takes a model, its optimizer, and the batches."""

    def enter(run: Callable[[Net, torch.optim.Optimizer, Batches, Attach], None]) -> None:
        @training_loop(name, _DATA, num_batches, steps_differ=True)
        def train(batches: Batches, attach: Attach) -> list[nn.Module]:
            random.seed(5)
            model = Net(heads=heads)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            attach(model, optimizer)
            run(model, optimizer, batches, attach)
            return [model]

    return enter


@_steps("penalty in every second step")
def _penalty(model: Net, optimizer: torch.optim.Optimizer, batches: Batches, _: Attach) -> None:
    for number, batch in enumerate(batches):
        loss = model(**batch)
        if number % 2:
            (gradient,) = torch.autograd.grad(loss, [model.heads["lm"].weight], create_graph=True)
            loss = loss + gradient.square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@_steps("a second call in every third step")
def _second_call(model: Net, optimizer: torch.optim.Optimizer, batches: Batches, _: Attach) -> None:
    for number, batch in enumerate(batches):
        loss = model(**batch)
        if number % 3 == 2:
            loss = loss + model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@_steps("two backwards in every third step")
def _two_backwards(model: Net, optimizer: torch.optim.Optimizer, batches: Batches, _: Attach) -> None:
    for number, batch in enumerate(batches):
        loss = model(**batch)
        if number % 3 == 2:
            loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@_steps("phases with another head, twice each", heads=("lm", "value"))
def _policy_and_value(model: Net, optimizer: torch.optim.Optimizer, batches: Batches, _: Attach) -> None:
    for number, batch in enumerate(batches):
        loss = model(**batch)
        if number % 8 >= 4:
            loss = loss + model(**batch, head="value")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@_steps("accumulation that becomes longer")
def _accumulation(model: Net, optimizer: torch.optim.Optimizer, batches: Batches, _: Attach) -> None:
    for number, batch in enumerate(batches):
        model(**batch).backward()
        if number < 6 or number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


@_steps("gradients that stay from some step on")
def _gradients_stay(model: Net, optimizer: torch.optim.Optimizer, batches: Batches, _: Attach) -> None:
    for number, batch in enumerate(batches):
        loss = model(**batch)
        if number >= 6:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if number < 6:
            optimizer.zero_grad()


@_steps("tensors of some steps kept")
def _kept(model: Net, optimizer: torch.optim.Optimizer, batches: Batches, _: Attach) -> None:
    held: list[torch.Tensor] = []
    for number, batch in enumerate(batches):
        held += [torch.zeros(512, 4 * _WIDTH * 4) for _ in range(number % 4 == 3)]
        if len(held) > 3:
            held.clear()
        model(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()


@_steps("layers added")
def _layers_added(model: Net, optimizer: torch.optim.Optimizer, batches: Batches, _: Attach) -> None:
    for number, batch in enumerate(batches):
        if number in (4, 9):
            model.blocks.append(Block())
            optimizer.add_param_group({"params": list(model.blocks[-1].parameters())})
        model(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()


@_steps("an optimizer that is replaced")
def _replaced(model: Net, optimizer: torch.optim.Optimizer, batches: Batches, _: Attach) -> None:
    for number, batch in enumerate(batches):
        if number == 6:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()


@_steps("autocast from some step on")
def _autocast(model: Net, optimizer: torch.optim.Optimizer, batches: Batches, _: Attach) -> None:
    for number, batch in enumerate(batches):
        with torch.autocast("cpu", torch.bfloat16, enabled=6 <= number < 12):
            loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@training_loop("BART with layers dropped", text_batches(4, 48), 24, steps_differ=True)
def bart(batches: Batches, attach: Attach) -> list[nn.Module]:
    random.seed(5)
    sizes = {"d_model": 48, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "encoder_layers": 4, "decoder_layers": 4}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64}
    config = transformers.BartConfig(
        vocab_size=VOCABULARY, **sizes, **heads, encoder_layerdrop=0.3, decoder_layerdrop=0.3, use_cache=False
    )
    model = transformers.BartForConditionalGeneration(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    attach(model, optimizer)
    for batch in batches:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model]


@training_loop(
    "wav2vec2 with layers dropped",
    lambda n: {"x": torch.randn(2, 4000, generator=torch.Generator().manual_seed(n))},
    16,
    steps_differ=True,
)
def wav2vec2(batches: Batches, attach: Attach) -> list[nn.Module]:
    torch.manual_seed(4)
    config = transformers.Wav2Vec2Config(
        hidden_size=48,
        num_hidden_layers=5,
        num_attention_heads=4,
        intermediate_size=128,
        conv_dim=(32, 32),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        layerdrop=0.3,
        mask_time_prob=0.0,
    )
    model = transformers.Wav2Vec2Model(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    attach(model, optimizer)
    for batch in batches:
        model(batch["x"]).last_hidden_state.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model]

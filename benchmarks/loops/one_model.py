"""Loops with one model that is called once in a forward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from loops.loop import Attach, Batches, text_batches, training_loop
from loops.models import gpt2, llama, t5

_LENGTHS = (40, 96, 24, 64, 128, 56, 32, 112, 80, 48)


@training_loop("output held", text_batches())
def output_held(batches: Batches, attach: Attach) -> list[nn.Module]:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    attach(model, optimizer)
    for batch in batches:
        out = model(**batch)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model]


@training_loop("loss only", text_batches())
def loss_only(batches: Batches, attach: Attach) -> list[nn.Module]:
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    attach(model, optimizer)
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [model]


@training_loop("label smoothing", text_batches())
def label_smoothing(batches: Batches, attach: Attach) -> list[nn.Module]:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    attach(model, optimizer)
    for batch in batches:
        logits = model(batch["input_ids"]).logits
        targets = batch["labels"][:, 1:].flatten()
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model]


def _accumulation(num_micro_batches: int) -> None:
    @training_loop(f"accumulation of {num_micro_batches}", text_batches(), max(30, 5 * num_micro_batches))
    def accumulate(batches: Batches, attach: Attach) -> list[nn.Module]:
        model = gpt2()
        optimizer = torch.optim.AdamW(model.parameters())
        attach(model, optimizer)
        for number, batch in enumerate(batches, 1):
            loss = model(**batch).loss / num_micro_batches
            loss.backward()
            if number % num_micro_batches == 0:
                optimizer.step()
                optimizer.zero_grad()
        return [model]


for _number in (1, 2, 4, 8):
    _accumulation(_number)


@training_loop("bf16 autocast", text_batches())
def autocast(batches: Batches, attach: Attach) -> list[nn.Module]:
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    attach(model, optimizer)
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(**batch)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model]


@training_loop("encoder and decoder", text_batches())
def encoder_decoder(batches: Batches, attach: Attach) -> list[nn.Module]:
    model = t5()
    optimizer = torch.optim.AdamW(model.parameters())
    attach(model, optimizer)
    for batch in batches:
        out = model(input_ids=batch["input_ids"], labels=batch["labels"][:, :32].contiguous())
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model]


@training_loop(
    "lengths in random order",
    text_batches(shape_of=lambda step: (4, _LENGTHS[step % len(_LENGTHS)])),
    steps_differ=True,
)
def random_lengths(batches: Batches, attach: Attach) -> list[nn.Module]:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    attach(model, optimizer)
    for batch in batches:
        out = model(**batch)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model]


@training_loop("last batch smaller", text_batches(shape_of=lambda step: (3 if step % 6 == 5 else 4, 64)))
def last_batch_smaller(batches: Batches, attach: Attach) -> list[nn.Module]:
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    attach(model, optimizer)
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model]


@training_loop("gradients alive in forward", text_batches(), steps_differ=True)
def gradients_alive(batches: Batches, attach: Attach) -> list[nn.Module]:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    attach(model, optimizer)
    for batch in batches:
        out = model(**batch)
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
    return [model]


@training_loop("Lightning's order", text_batches(), steps_differ=True)
def lightning_order(batches: Batches, attach: Attach) -> list[nn.Module]:
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    attach(model, optimizer)
    for batch in batches:

        def closure(batch: dict[str, torch.Tensor] = batch) -> torch.Tensor:
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            return loss.detach()

        optimizer.step(closure)
    return [model]

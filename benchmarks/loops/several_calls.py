"""Loops with several models, or with one that is called several times before an optimizer's step."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from loops.loop import Attach, Batch, Batches, image_batches, text_batches, training_loop
from loops.models import Critic, Generator, bert, gpt2, llama, vit


@training_loop("GAN with two optimizers", image_batches(), steps_differ=True)
def gan(batches: Batches, attach: Attach) -> list[nn.Module]:
    generator, critic = Generator(), Critic()
    of_generator = torch.optim.Adam(generator.parameters(), 2e-4)
    of_critic = torch.optim.Adam(critic.parameters(), 2e-4)
    attach([generator, critic], [of_generator, of_critic])
    real, fake = torch.ones(16), torch.zeros(16)
    for batch in batches:
        critic.zero_grad()
        F.binary_cross_entropy_with_logits(critic(batch["pixel_values"]), real).backward()
        images = generator(torch.randn(16, 32))
        F.binary_cross_entropy_with_logits(critic(images.detach()), fake).backward()
        of_critic.step()
        generator.zero_grad()
        F.binary_cross_entropy_with_logits(critic(images), real).backward()
        of_generator.step()
    return [generator, critic]


@training_loop("gradient penalty", image_batches())
def gradient_penalty(batches: Batches, attach: Attach) -> list[nn.Module]:
    critic = Critic()
    optimizer = torch.optim.Adam(critic.parameters(), 1e-4)
    attach(critic, optimizer)
    for batch in batches:
        real, fake = batch["pixel_values"], torch.randn_like(batch["pixel_values"])
        between = torch.lerp(real, fake, torch.rand(len(real), 1, 1, 1)).requires_grad_()
        (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = (gradient.flatten(1).norm(dim=1) - 1).square().mean()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [critic]


def _contrastive_loss(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    similarity = F.normalize(one, dim=1) @ F.normalize(other, dim=1).T / 0.05
    return F.cross_entropy(similarity, torch.arange(len(one)))


@training_loop("two towers, shared weights", text_batches())
def shared_towers(batches: Batches, attach: Attach) -> list[nn.Module]:
    model = bert()
    optimizer = torch.optim.AdamW(model.parameters())
    attach(model, optimizer)
    for batch in batches:
        # The same sentences under two dropout masks.
        one = model(batch["input_ids"]).last_hidden_state[:, 0]
        other = model(batch["input_ids"]).last_hidden_state[:, 0]
        _contrastive_loss(one, other).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model]


def _images_and_text(step: int) -> Batch:
    return {**image_batches(4)(step), **text_batches()(step)}


@training_loop("two towers, weights of their own", _images_and_text)
def separate_towers(batches: Batches, attach: Attach) -> list[nn.Module]:
    towers = nn.ModuleDict({"image": vit(), "text": bert()})
    optimizer = torch.optim.AdamW(towers.parameters())
    attach([towers["image"], towers["text"]], optimizer)
    for batch in batches:
        images = towers["image"](batch["pixel_values"]).last_hidden_state[:, 0]
        texts = towers["text"](batch["input_ids"]).last_hidden_state[:, 0]
        loss = _contrastive_loss(images, texts)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [towers]


def _pairs(step: int) -> Batch:
    return {"chosen": text_batches(2)(step)["input_ids"], "rejected": text_batches(2)(10_000 + step)["input_ids"]}


def _log_probability(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    scores = model(tokens).logits[:, :-1].log_softmax(-1)
    return scores.gather(-1, tokens[:, 1:, None]).squeeze(-1).sum(-1)


@training_loop("DPO's pairs", _pairs)
def preference_pairs(batches: Batches, attach: Attach) -> list[nn.Module]:
    policy = llama()
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters())
    attach([policy, reference], optimizer)
    for batch in batches:
        with torch.no_grad():
            reference_margin = _log_probability(reference, batch["chosen"])
            reference_margin = reference_margin - _log_probability(reference, batch["rejected"])
        margin = _log_probability(policy, batch["chosen"]) - _log_probability(policy, batch["rejected"])
        loss = -F.logsigmoid(0.1 * (margin - reference_margin)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [policy]


def _distillation_loss(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    return F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), reduction="batchmean", log_target=True)


@training_loop("teacher with weights of its own", text_batches())
def teacher(batches: Batches, attach: Attach) -> list[nn.Module]:
    student = gpt2()
    teacher = copy.deepcopy(student).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters())
    attach([student, teacher], optimizer)
    for batch in batches:
        with torch.no_grad():
            wanted = teacher(**batch)
        out = student(**batch)
        loss = out.loss + _distillation_loss(out.logits, wanted.logits)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [student]


@training_loop("the model as its own teacher", text_batches())
def own_teacher(batches: Batches, attach: Attach) -> list[nn.Module]:
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    attach(model, optimizer)
    for batch in batches:
        model.eval()
        with torch.no_grad():
            wanted = model(batch["input_ids"]).logits
        model.train()
        out = model(**batch)
        loss = out.loss + _distillation_loss(out.logits, wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model]

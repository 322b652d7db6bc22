"""What each of two processes runs in the tests of the parallel reference models: over gloo, then without a partner."""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh, init_device_mesh

import recollect
from case_server import join
from recollect._torch_parallel import fake_process_group
from recollect.lab.models.architectures import gpt_config, llama_config
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.gpt import GPTModel
from recollect.lab.parallel.mesh import data_parallel
from recollect.lab.parallel.tensor import tensor_parallel
from recollect.profile.profile import Profile
from vocabulary_programs import vocabulary_cases
from whole_gradients import whole_gradients

RANKS = 2
SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64}
LLAMA = llama_config(**SIZES, num_query_groups=2).changed(qk_layernorm=True)
# Learned positions, biases, tied embeddings; dropout is tested by its own, since no two layouts draw alike.
GPT = gpt_config(**SIZES, hidden_dropout=0.0, attention_dropout=0.0)
DROPPING = replace(GPT, hidden_dropout=0.1, attention_dropout=0.1)

CHUNKS = 3

Wrap = Callable[[GPTModel, DeviceMesh], GPTModel]


def both(model: GPTModel, mesh: DeviceMesh) -> GPTModel:
    """Each of two data-parallel ranks is two ranks of tensor parallelism."""
    return data_parallel(tensor_parallel(model, mesh["tensor"], sequence_parallel=True), mesh["data"])


WAYS: dict[str, Wrap] = {
    "tensor": tensor_parallel,
    "sequence": lambda model, mesh: tensor_parallel(model, mesh, sequence_parallel=True),
    "data": data_parallel,
}
# Without partners there may be more ranks.
ALONE: dict[str, Wrap] = {**WAYS, "both": both}


def built(config: TransformerConfig, way: str, device: str = "cpu") -> GPTModel:
    torch.manual_seed(0)
    with torch.device(device):
        model = GPTModel(config)
    if way == "none":
        return model
    if way == "both":
        return both(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor")))
    return WAYS[way](model, init_device_mesh("cpu", (RANKS,)))


def batch(device: str = "cpu") -> dict[str, Tensor]:
    """The same on all ranks; some labels are ignored."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(64, (2, 17), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, :3] = -100
    return {"tokens": tokens[:, :-1].contiguous().to(device), "labels": labels.to(device)}


def gradients(model: GPTModel, way: str, chunks: int = 1) -> dict[str, Tensor]:
    model.loss_chunks = chunks
    model.zero_grad()
    torch.manual_seed(7)
    loss = model(**batch()).loss
    loss.backward()
    return {"loss": loss.detach(), **whole_gradients(model, RANKS if way in ("tensor", "sequence") else 1)}


def farthest(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference, of each parameter's gradient against its largest entry."""
    assert got.keys() == expected.keys()
    return max(((got[name] - expected[name]).abs().max() / expected[name].abs().max()).item() for name in expected)


def facts(profile: Profile) -> dict[str, Any]:
    ends = {name: recollect.classic_plan(profile, name) for name in ("keep_all", "full")}
    return {
        "persistent": dict(profile.persistent),
        "values": [
            (call.path, value.name, value.nbytes, value.saved, value.must_keep)
            for call in profile.calls
            for value in profile.graph_of(call).values
        ],
        "peaks": {name: plan.predicted_peak_bytes for name, plan in ends.items()},
    }


def recorded(config: TransformerConfig, way: str, *, fake: bool, chunks: int = 1) -> Profile:
    device = "meta" if fake else "cpu"
    model = built(config, way, device)
    optimizer = torch.optim.AdamW(model.parameters())
    return recollect.record(model, batch(device), optimizer=optimizer, fake=fake, loss_chunks=chunks)


def in_chunks() -> Iterator[tuple[str, Any]]:
    """The loss in chunks, under tensor parallelism with and without sequence parallelism."""
    for way in ("tensor", "sequence"):
        for name, config in (("llama", LLAMA), ("gpt", GPT)):
            model = built(config, way)
            expected = gradients(model, way)
            got = gradients(model, way, CHUNKS)
            yield f"chunked {name} {way}", farthest(got, expected)
        profile = recollect.record(model, batch(), loss_chunks=CHUNKS)
        with recollect.apply(model, recollect.classic_plan(profile, "full")):
            planned = gradients(model, way, CHUNKS)
        yield f"chunked equal {way}", all(torch.equal(planned[key], got[key]) for key in got)


def over_gloo() -> Iterator[tuple[str, Any]]:
    for name, config in (("llama", LLAMA), ("gpt", GPT)):
        expected = gradients(built(config, "none"), "none")
        for way in WAYS:
            yield f"farthest {name} {way}", farthest(gradients(built(config, way), way), expected)
        if name == "llama":
            yield "loss sequence", gradients(built(config, "sequence"), "sequence")["loss"].item()
    for way in WAYS:
        model = built(DROPPING, way)
        expected = gradients(model, way)
        profile = recollect.record(model, batch())
        plans = {name: recollect.classic_plan(profile, name) for name in ("keep_all", "full")}
        plans["budget"] = recollect.plan(profile, sum(plan.predicted_peak_bytes or 0 for plan in plans.values()) // 2)
        for name, plan in plans.items():
            with recollect.apply(model, plan):
                got = gradients(model, way)
            yield f"equal {name} {way}", all(torch.equal(got[key], expected[key]) for key in expected)
        yield f"gloo {way}", facts(recorded(LLAMA, way, fake=False))
    yield from in_chunks()
    yield from vocabulary_cases().items()
    odd = llama_config(num_layers=1, hidden_size=48, num_attention_heads=3, vocab_size=64)
    yield "refused", refusal(lambda: built(odd, "tensor"))
    yield "real shards", refusal(lambda: recollect.record(built(LLAMA, "data"), batch(), fake=True))
    yield "group", refusal(lambda: next(alone(dist.get_rank())))


def refusal(action: Callable[[], object]) -> str:
    try:
        action()
    except recollect.errors.RecollectError as error:
        return str(error)
    return "not refused"


def alone(rank: int) -> Iterator[tuple[str, Any]]:
    for way in ALONE:
        with fake_process_group(rank, 4 if way == "both" else RANKS):
            yield f"real tensors {way}", facts(recorded(LLAMA, way, fake=False))
            yield f"fake tensors {way}", facts(recorded(LLAMA, way, fake=True))
            if way != "data":
                for kind in (False, True):
                    yield f"chunked {way} {kind}", facts(recorded(LLAMA, way, fake=kind, chunks=CHUNKS))


if __name__ == "__main__":
    own_rank = join(RANKS)
    all_found = dict(over_gloo())
    dist.barrier()
    dist.destroy_process_group()
    if own_rank == 0:
        all_found |= dict(alone(own_rank))
    torch.save(all_found, Path(sys.argv[2]) / f"rank{own_rank}")
    os._exit(0)

"""What two processes run in the tests of tensor, sequence and data parallelism, and of a loss whose head is split."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import recollect
from case_server import join, save_and_exit
from recollect._torch_parallel import fake_process_group
from recollect.lab.models.architectures import gpt_config, llama_config
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.gpt import GPTModel
from recollect.lab.parallel.mesh import data_parallel
from recollect.lab.parallel.tensor import fused_parameters, tensor_parallel
from recollect.profile.profile import Profile

RANKS = 2
SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64}
LLAMA = llama_config(**SIZES, num_query_groups=2).changed(qk_layernorm=True)
# Learned positions, biases, tied embeddings; dropout is tested by its own, since no two layouts draw alike.
GPT = gpt_config(**SIZES, hidden_dropout=0.0, attention_dropout=0.0)
DROPPING = replace(GPT, hidden_dropout=0.1, attention_dropout=0.1)

CHUNKS = 3

TOKENS, WIDTH, WORDS = 10, 12, 46
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "smoothed": {"label_smoothing": 0.1},
    "softcapped": {"transform": lambda logits: 2 * torch.tanh(logits / 2)},
}
# Of one step of one chunk, and of tokens many enough for what is alive once to count.
MANY_TOKENS, MANY_WORDS, MANY_CHUNKS = 256, 4096, 8

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
        # Gloo's threads now and then free a buffer so late that a recorded value seems to live on.
        both = [facts(recorded(LLAMA, way, fake=False)) for _ in range(2)]
        yield f"gloo {way}", min(both, key=lambda one: sum(one["peaks"].values()))
    yield from in_chunks()
    yield from vocabulary_cases().items()
    odd = llama_config(num_layers=1, hidden_size=48, num_attention_heads=3, vocab_size=64)
    yield "refused odd heads", refusal(lambda: built(odd, "tensor"))
    yield "refused real shards", refusal(lambda: recollect.record(built(LLAMA, "data"), batch(), fake=True))
    yield "refused group", refusal(lambda: next(alone(dist.get_rank())))


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


def head_case(words: int = WORDS, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Hidden states, weight, bias and labels, the same on all ranks."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, TOKENS, WIDTH), (words, WIDTH), (words,)]
    hidden, weight, bias = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    labels = torch.randint(words, (2, TOKENS), generator=generator)
    labels[0, :3] = -100
    return [hidden, weight, bias, labels]


def plain_loss(words: int, options: dict[str, Any]) -> list[Tensor]:
    """The loss, and the gradients of hidden states, weight and bias, in one process."""
    *leaves, labels = head_case(words)
    hidden, weight, bias = (leaf.requires_grad_() for leaf in leaves)
    transform = options.get("transform", lambda logits: logits)
    others = {name: value for name, value in options.items() if name != "transform"}
    loss = F.cross_entropy(transform(F.linear(hidden, weight, bias)).flatten(0, 1), labels.flatten(), **others)
    return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight, bias))]


def farthest_loss(words: int, options: dict[str, Any], hidden_layout: Any) -> float:
    """How far the chunked loss of all ranks is from the plain one, and its gradients."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    *leaves, labels = head_case(words)
    hidden, weight, bias = (
        distribute_tensor(leaf, mesh, [layout])
        for leaf, layout in zip(leaves, (hidden_layout, Shard(0), Shard(0)), strict=True)
    )
    leaves = [leaf.detach().requires_grad_() for leaf in (hidden, weight, bias)]
    loss = recollect.chunked_cross_entropy(
        leaves[0], leaves[1], labels, num_chunks=3, bias=leaves[2], group=mesh.get_group(), **options
    )
    got = torch.autograd.grad(loss, leaves)
    found = [loss.detach(), *(one.full_tensor() for one in got)]
    return max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, plain_loss(words, options), strict=True)
    )


def loss_exactness() -> Iterator[tuple[str, Any]]:
    for name, options in OPTIONS.items():
        for layout in (Replicate(), Shard(1)):
            yield f"farthest {name}, {layout}", farthest_loss(WORDS, options, layout)
    # The last rank has a word less.
    yield "farthest uneven", farthest_loss(WORDS - 1, OPTIONS["smoothed"], Shard(1))


def loss_peaks() -> Iterator[tuple[str, Any]]:
    hidden = torch.randn(MANY_TOKENS, WIDTH)
    labels = torch.randint(MANY_WORDS * dist.get_world_size(), (MANY_TOKENS,))
    for needs_gradients in (False, True):
        weight = nn.Parameter(torch.randn(MANY_WORDS, WIDTH), requires_grad=needs_gradients)
        peak = recollect.measure_peak(
            lambda weight=weight: recollect.chunked_cross_entropy(
                hidden, weight, labels, num_chunks=MANY_CHUNKS, group=dist.group.WORLD
            )
        )
        yield f"peak {needs_gradients}", peak.peak_growth_bytes


def head_refusals() -> Iterator[tuple[str, Any]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    hidden, weight, bias, labels = head_case()
    rows = distribute_tensor(weight, mesh, [Shard(0)])
    cases: dict[str, tuple[Tensor, Tensor, Any]] = {
        "no group": (hidden, rows, None),
        "split by columns": (hidden, distribute_tensor(weight, mesh, [Shard(1)]), dist.group.WORLD),
        "split by channels": (distribute_tensor(hidden, mesh, [Shard(2)]), rows, dist.group.WORLD),
        "one word": (hidden, distribute_tensor(weight[:1], mesh, [Shard(0)]), dist.group.WORLD),
    }
    for name, (x, w, group) in cases.items():
        loss = partial(recollect.chunked_cross_entropy, x, w, labels, num_chunks=2, group=group)
        yield f"refused {name}", refusal(loss)
    labels[1, 1] = WORDS
    found = recollect.chunked_cross_entropy(hidden, rows, labels, num_chunks=2, group=dist.group.WORLD)
    yield "beyond the vocabulary", found.item()


def vocabulary_cases() -> dict[str, Any]:
    return {**dict(loss_exactness()), **dict(loss_peaks()), **dict(head_refusals())}


def whole_gradients(model: GPTModel, ranks: int) -> dict[str, Tensor]:
    """The gradients of a parallel model as those of the whole one, by name; all ranks have to call it.

    `ranks` of tensor parallelism; the model may be sharded by FSDP2, too.
    """
    sizes_of = fused_parameters(model)
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        whole = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        if name in sizes_of:
            sizes, dim = sizes_of[name]
            parts = [share.split([size // ranks for size in sizes], dim) for share in whole.chunk(ranks, dim)]
            whole = torch.cat([parts[rank][matrix] for matrix in range(len(sizes)) for rank in range(ranks)], dim)
        found[name] = whole
    return found


if __name__ == "__main__":
    own_rank = join(RANKS)
    all_found = dict(over_gloo())
    dist.barrier()
    dist.destroy_process_group()
    if own_rank == 0:
        all_found |= dict(alone(own_rank))
    save_and_exit(all_found)

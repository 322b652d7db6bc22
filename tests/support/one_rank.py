"""What `tests/gpu/test_one_rank.py` runs in a process of its own: one_rank.py DEVICE FOLDER, a group of one process.

All that several processes run goes through NCCL here, too, on CUDA: what it takes of tensors and devices shows with one rank.
Writes a line of JSON: of each case what it found, or its error.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import recollect
import training_runs
from recollect.lab.models.architectures import llama_config
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.sizes import NAMED_CONFIGS
from recollect.lab.parallel.context import context_parallel
from recollect.lab.parallel.expert import expert_parallel
from recollect.lab.parallel.layout import DeviceLayout
from recollect.lab.parallel.mesh import LayoutMesh, data_parallel, layout_mesh
from recollect.lab.parallel.tensor import tensor_parallel
from recollect.lab.train.processes import Processes
from recollect.lab.train.session import Session, open_session
from recollect.ranks.group import Group, Place

LLAMA = llama_config(num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=128)
MIXTRAL = replace(NAMED_CONFIGS["mixtral-tiny"], num_layers=2)
Wrap = Callable[[GPTModel, LayoutMesh], nn.Module]
LAYOUTS: dict[str, tuple[TransformerConfig, Wrap]] = {
    "DDP": (LLAMA, lambda model, _: DistributedDataParallel(model, gradient_as_bucket_view=True)),
    "FSDP2": (LLAMA, lambda model, mesh: data_parallel(model, mesh.data)),
    "tensor": (LLAMA, lambda model, mesh: tensor_parallel(model, mesh.tensor)),
    "context": (LLAMA, lambda model, mesh: context_parallel(model, mesh.context)),
    "experts": (MIXTRAL, lambda model, mesh: expert_parallel(model, mesh.expert)),
    "parts": (LLAMA, lambda model, mesh: _in_parts(model, mesh.tensor)),
}


def _in_parts(model: GPTModel, mesh: DeviceMesh) -> nn.Module:
    return recollect.distribute_saved_activations(tensor_parallel(model, mesh), mesh.get_group())


def built(config: TransformerConfig, wrap: Wrap, mesh: LayoutMesh, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    with device:
        return wrap(GPTModel(config), mesh)


def batch(device: torch.device) -> dict[str, Tensor]:
    tokens = torch.randint(64, (2, 33), generator=torch.Generator().manual_seed(1)).to(device)
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def verified(name: str, mesh: LayoutMesh, device: torch.device) -> dict[str, Any]:
    """Record a layout, and verify a plan that recomputes all, collectives among it."""
    model = built(*LAYOUTS[name], mesh, device)
    profile = recollect.record(model, batch(device), collectives="replay")
    report = recollect.verify(model, batch(device), recollect.classic_plan(profile, "full"))
    return {"equal": report.equal, "predicted": report.predicted_peak_bytes, "measured": report.plan_peak_bytes}


def attached(name: str, mesh: LayoutMesh, device: torch.device) -> dict[str, Any]:
    """Train with a budget and without, from the same weights."""
    found, planned = [], 0
    # On CUDA the workspaces of libraries, which no plan changes, are nearly all of such a small step.
    for budget in (None, "97%" if device.type == "cpu" else "100%"):
        model = built(*LAYOUTS[name], mesh, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        handle = budget and recollect.attach(model, optimizer, budget, log=lambda line: None)
        losses = []
        for _ in range(4):
            loss = model(**batch(device)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append(losses)
        if handle:
            planned = len(handle.planned)
            handle.remove()
    return {"equal": found[0] == found[1], "planned": planned}


def stored(folder: Path, mesh: LayoutMesh, device: torch.device) -> dict[str, Any]:
    """Write a checkpoint as several processes do, while the run goes on, and go on from it in another session."""
    group = Group([0], dist.new_group(backend="gloo"))
    processes = Processes(DeviceLayout(), "none", group, mesh)
    assert group.gather("here", Place.START) == ["here"]

    def opened(*, resume: bool) -> Session:
        config = training_runs.config(
            folder, run_dir=folder / "run", device=device.type, resume=resume, hidden_dropout=0.1
        )
        return open_session(config, processes)

    def step(session: Session) -> float:
        tokens, labels = next(session.batches(session.step))
        loss = session.trained.wrapped(tokens, labels).loss
        loss.backward()
        session.trained.exchange.clip(session.model.parameters(), 1.0)
        session.optimizer.step()
        session.optimizer.zero_grad()
        session.step += 1
        return session.trained.exchange.mean([loss])

    first = opened(resume=False)
    first.seed()
    step(first)
    first.save()
    after = [step(first) for _ in range(2)]
    first.checkpoints.finish()
    second = opened(resume=True)
    second.seed()
    return {"equal": [step(second) for _ in range(2)] == after, "step": second.step}


def main() -> None:
    device, folder = torch.device(sys.argv[1]), Path(sys.argv[2])
    group = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(group)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True)
    store = dist.HashStore()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1
    )
    mesh = layout_mesh(DeviceLayout(), device.type)
    cases: dict[str, Callable[[], dict[str, Any]]] = {
        **{name: lambda name=name: verified(name, mesh, device) for name in LAYOUTS},  # type: ignore[misc]
        **{f"attach {name}": lambda name=name: attached(name, mesh, device) for name in ("DDP", "FSDP2")},  # type: ignore[misc]
        "checkpoint": lambda: stored(folder, mesh, device),
    }
    found = {}
    for name, case in cases.items():
        try:
            found[name] = case()
        except Exception:
            found[name] = {"error": traceback.format_exc()}
    (folder / "found.json").write_text(json.dumps(found))
    # A process group's threads may hang at the end.
    os._exit(0)


if __name__ == "__main__":
    main()

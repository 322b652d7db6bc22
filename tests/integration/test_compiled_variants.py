"""What a record says of compiled units and their steps, against the same measured by another meter in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

# Scalars that PyTorch makes in between.
UNSEEN_BYTES = 1024

MODEL = """
import json, sys
import torch
import recollect
from recollect.lab.models.architectures import llama_config
from recollect.lab.models.gpt import GPTModel

torch.set_num_threads(1)
torch.manual_seed(0)
dtype, path = getattr(torch, sys.argv[1]), sys.argv[2]
config = llama_config(num_layers=3, hidden_size=64, num_attention_heads=4, num_query_groups=2, vocab_size=128)
model = GPTModel(config).to(dtype)
tokens = torch.randint(128, (2, 64))
"""

RECORDS = """
recollect.record(model, {"tokens": tokens, "labels": tokens}, engine="compile").save(path)
"""

MEASURES = """
from recollect.engine.compiled.compiled_engine import compile_forward
from recollect.measuring.meter import measure_peak
from recollect.planning.compiled_menu import keeps_of
from recollect.profile.profile import Profile
from recollect.simulation.simulate import predicted_plan

profile = Profile.load(path)
call = next(call for call in profile.calls if call.repeated)
graph, layer, got = profile.graph_of(call), model.get_submodule(call.path), []

def step():
    global out  # It holds what the model returned until it returns the next time.
    out = model(tokens, labels=tokens)
    model.zero_grad()
    out.loss.backward()

def of_step(variant):
    unit = recollect.UnitPlan(keeps_of(graph, variant.kept), engine="compile")
    plan = recollect.Plan({call.path: unit for call in profile.calls if call.repeated})
    applied = recollect.apply(model, plan)
    step()
    step()
    peak = measure_peak(step, device="cpu").peak_bytes
    applied.remove()
    return predicted_plan(profile, plan).predicted_peak_bytes, peak

of_steps = list(map(of_step, graph.variants))  # while nothing else is there
handle = layer.register_forward_pre_hook(lambda module, args, kwargs: got.append((args, kwargs)), with_kwargs=True)
model(tokens, labels=tokens)
handle.remove()
(args, kwargs), = got
leaf = args[0].detach().requires_grad_()

# Makes the gradient of an output, which nobody else holds.
class End(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output):
        ctx.like = torch.empty_like(output, device="meta")
        return output.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        return torch.ones_like(ctx.like, device="cpu")

for variant, step_bytes in zip(graph.variants, of_steps, strict=True):
    forward = compile_forward(layer.forward, None if variant.is_default else keeps_of(graph, variant.kept))

    def run():
        layer.zero_grad(set_to_none=True)
        leaf.grad = None
        x = leaf.clone()
        made = measure_peak(lambda: forward(x, *args[1:], **kwargs)[0], device="cpu")
        output_bytes, end = made.result.nbytes, End.apply(made.result)
        took = measure_peak(end.backward, device="cpu").peak_growth_bytes - output_bytes
        return made.peak_growth_bytes, made.end_bytes - made.start_bytes - output_bytes, took

    run()
    print(json.dumps([*run(), *step_bytes]), flush=True)
"""


def python(program: str, *arguments: str) -> str:
    settings = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MODEL + program, *arguments]
    run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1800, env=settings)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_of_each_variant_are_those_of_another_process(dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    python(RECORDS, dtype, str(path))
    measured = [json.loads(line) for line in python(MEASURES, dtype, str(path)).splitlines()]
    graph = next(graph for graph in json.loads(path.read_text())["graphs"] if "variants" in graph)
    assert len(measured) == len(graph["variants"]) >= 4
    for row, variant in zip(measured, graph["variants"], strict=True):
        forward_bytes, kept_bytes, backward_bytes, predicted_bytes, peak_bytes = row
        assert 0 <= predicted_bytes - peak_bytes <= UNSEEN_BYTES
        assert abs(forward_bytes - variant["forward_bytes"]) <= UNSEEN_BYTES
        assert abs(kept_bytes - variant["own_bytes"]) <= UNSEEN_BYTES
        total = most = 0
        for most_bytes, change, _ in variant["backward"]:
            total, most = total + change, max(most, total + most_bytes)
        assert abs(backward_bytes - most) <= UNSEEN_BYTES, (measured, graph["variants"])

"""What a record says of compiled units, against the same measured by another meter in a process of its own."""

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

profile = Profile.load(path)
call = next(call for call in profile.calls if call.repeated)
graph, layer, got = profile.graph_of(call), model.get_submodule(call.path), []
handle = layer.register_forward_pre_hook(lambda module, args, kwargs: got.append((args, kwargs)), with_kwargs=True)
model(tokens, labels=tokens)
handle.remove()
(args, kwargs), = got
leaf = args[0].detach().requires_grad_()
for variant in graph.variants:
    forward = compile_forward(layer.forward, None if variant.is_default else keeps_of(graph, variant.kept))

    def run():
        layer.zero_grad(set_to_none=True)
        leaf.grad = None
        x = leaf.clone()
        made = measure_peak(lambda: forward(x, *args[1:], **kwargs)[0], device="cpu")
        gradient = torch.ones_like(made.result)
        took = measure_peak(lambda: made.result.backward(gradient), device="cpu")
        return made.peak_growth_bytes, made.end_bytes - made.start_bytes - made.result.nbytes, took.peak_growth_bytes

    run()
    print(json.dumps(run()), flush=True)
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
    for (forward_bytes, kept_bytes, backward_bytes), variant in zip(measured, graph["variants"], strict=True):
        assert abs(forward_bytes - variant["forward_bytes"]) <= UNSEEN_BYTES
        assert abs(kept_bytes - variant["own_bytes"]) <= UNSEEN_BYTES
        total = most = 0
        for most_bytes, change, _ in variant["backward"]:
            total, most = total + change, max(most, total + most_bytes)
        assert abs(backward_bytes - most) <= UNSEEN_BYTES, (measured, graph["variants"])

"""Plans inside `torch.compile` on more models: gradients are bit for bit those of the layers compiled without a plan.

And what takes many compilations: nine plans of one class, and what the cache on disk answers in another process.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import recollect
from blocks import Computes
from compiled_blocks import BY_INDUCTOR, compiled_without_plan
from recollect.lab.models.architectures import deepseek_v3_config, gpt_config, llama_config
from recollect.lab.models.gpt import GPTModel
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from small_llama import graph_at

pytestmark = [pytest.mark.long, *BY_INDUCTOR]

SMALL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64}
TOKENS = torch.arange(32).reshape(2, 16) * 7 % 64
Case = tuple[nn.Module, dict[str, Any], str]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


def reference(config: Any) -> Case:
    return GPTModel(config), {"tokens": TOKENS, "labels": TOKENS}, "decoder.layers"


def hugging_face(name: str, path: str, **fields: Any) -> Case:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**fields)
    model = getattr(transformers, f"{name}ForCausalLM" if name != "GPT2" else "GPT2LMHeadModel")(config)
    return model.train(), {"input_ids": TOKENS, "labels": TOKENS, "use_cache": False}, path


HF = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
CASES: dict[str, Callable[[], Case]] = {
    "GPT with dropout": lambda: reference(gpt_config(**SMALL, hidden_dropout=0.1, attention_dropout=0.1)),
    "Llama": lambda: reference(llama_config(**SMALL)),
    "DeepSeek-V3": lambda: reference(deepseek_v3_config(**SMALL)),
    "Mixtral": lambda: hugging_face("Mixtral", "model.layers", **HF, num_key_value_heads=2, num_local_experts=4),
    "Qwen2": lambda: hugging_face("Qwen2", "model.layers", **HF, num_key_value_heads=2),
    "GPT-2, tied": lambda: hugging_face("GPT2", "transformer.h", vocab_size=64, n_embd=32, n_layer=2, n_head=4),
}


def gradients(model: nn.Module, batch: dict[str, Any], *, autocast: bool) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(**batch).loss
    loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


# A norm written in ops is summed in fp32, in vectors whose width depends on whether what is stored beside it has 16 bits.
# A sum that ends in another last bit may round the other way where bf16 follows, by 2^-8 of an entry.
ROUNDED = {("DeepSeek-V3", True): 2**-8}


@pytest.mark.filterwarnings("ignore::recollect.errors.PlanMismatchWarning")
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_compiled_layers(case: str, autocast: bool) -> None:
    torch.manual_seed(0)
    model, batch, stack = CASES[case]()
    paths = [f"{stack}.{index}" for index in range(2)]
    graph = graph_at(recollect.record(model, batch), paths[1])
    names = [value.name for value in graph.values if value.producer is not None]
    products = {name for name in names if "mm" in name.rpartition(".")[2] or "attention" in name.rpartition(".")[2]}
    kept: list[set[str]] = [set(), products]
    with compiled_without_plan(model, paths):
        expected = gradients(model, batch, autocast=autocast)
    plan = Plan(
        {
            path: UnitPlan({name: "keep" if name in keep else "recompute" for name in names}, engine="compile")
            for path, keep in zip(paths, kept, strict=True)
        }
    )
    with recollect.apply(model, plan):
        for _ in range(2):
            found = gradients(model, batch, autocast=autocast)
            assert len(found) == len(expected) > 0
            bound = ROUNDED.get((case, autocast), 0.0)
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other) or (one - other).abs().max() <= bound * other.abs().max()


NAMES = ("linear.addmm", "tanh", "exp", "sin", "add")


def blocks(num: int) -> nn.Sequential:
    """Of one class. [n, 8] -> [n, 8]."""
    torch.manual_seed(0)
    layers = (nn.Linear(8, 8) for _ in range(num))
    return nn.Sequential(
        *(Computes(lambda self, x: self.linear(x).tanh().exp().sin() + x, linear=one) for one in layers)
    )


def actions(number: int) -> dict[str, str]:
    """One of 16 sets of values to keep."""
    return {name: "keep" if number >> index & 1 else "recompute" for index, name in enumerate(NAMES)}


def test_nine_plans_on_one_class_are_nine_graphs() -> None:
    model = blocks(9)
    rows = torch.linspace(-1, 1, 64).reshape(8, 8).requires_grad_()
    plan = Plan({str(index): UnitPlan(actions(index), engine="compile") for index in range(9)})
    with recollect.apply(model, plan):
        for _ in range(2):
            model(rows).sum().backward()
    assert counters["stats"]["unique_graphs"] == 9


def one_step(number: int) -> dict[str, int]:
    """Run a step of two equal blocks, and return what the caches said."""
    model = blocks(2)
    plan = Plan({str(index): UnitPlan(actions(number), engine="compile") for index in range(2)})
    with recollect.apply(model, plan):
        model(torch.ones(4, 8, requires_grad=True)).sum().backward()
    autograd = counters["aot_autograd"]
    return {"hits": autograd["autograd_cache_hit"], "misses": autograd["autograd_cache_miss"]}


def elsewhere(number: int, folder: Path) -> dict[str, int]:
    code = f"import json, {Path(__file__).stem} as t; print(json.dumps(t.one_step({number})))"
    paths = [str(Path(__file__).parent), *sys.path]
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_another_process_compiles_nothing_again(tmp_path: Path) -> None:
    folder = tmp_path / "shared"

    def libraries() -> int:
        return sum(1 for _ in folder.rglob("*.so"))

    assert elsewhere(0, folder) == {"hits": 0, "misses": 1}
    first = libraries()
    assert elsewhere(0, folder) == {"hits": 1, "misses": 0}
    assert libraries() == first
    assert elsewhere(1, folder) == {"hits": 0, "misses": 1}
    assert libraries() > first

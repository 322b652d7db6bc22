"""Trainers and loops of other libraries, in one process and in two: each step within the budget, the same training."""

import importlib.util
import re
from collections.abc import Iterator

import pytest

from asked_cases import AskedCases
from metered_processes import check_row, metered, needs_meter

pytestmark = needs_meter

# Those of `trl_trainers` are there without TRL, too, but for its own.
_ALONE = "trl_trainers" if importlib.util.find_spec("trl") else "hugging_face_trainers"
# Of each module of tests/support in so many processes: what it needs, and its cases with what each needs besides.
MODULES: dict[tuple[str, int], tuple[str, dict[str, str]]] = {
    (_ALONE, 1): (
        "accelerate",
        {
            "llama": "",
            "gpt2 in bf16": "",
            "LoRA in bf16": "peft",
            "DoRA": "peft",
            "QLoRA": "peft bitsandbytes",
            "SFT in bf16": "trl",
            "SFT of lora": "trl peft",
            "DPO": "trl",
            "DPO of lora": "trl peft",
            "Reward": "trl",
        },
    ),
    ("lightning_trainers", 1): ("lightning", dict.fromkeys(("automatic", "automatic in bf16", "manual"), "")),
    ("diffusers_loops", 1): ("diffusers accelerate", dict.fromkeys(("UNet", "DiT in bf16"), "")),
    # Each stage once: importing both libraries takes longer than training. ZeRO-2 in two processes is left out: gloo frees what
    # it has reduced a moment late, so that now and then the recorded step seems to need a bucket more than it does.
    ("deepspeed_trainers", 1): ("deepspeed accelerate", dict.fromkeys(("0 fp32", "3 bf16", "ZeRO-2"), "")),
    ("deepspeed_trainers", 2): ("deepspeed accelerate", dict.fromkeys(("ZeRO-3 in bf16", "3 lengths", "3 fp32"), "")),
    ("accelerate_ranks", 2): ("accelerate", dict.fromkeys(("DDP", "FSDP2", "ZeRO-1, bucket views"), "")),
    ("trainer_ranks", 2): (
        "accelerate trl peft lightning",
        dict.fromkeys(
            ("Hugging Face DDP", "Hugging Face FSDP2", "SFT of LoRA DDP", "Lightning DDP", "Lightning FSDP2"), ""
        ),
    ),
}
QUICK = ("llama", "automatic", "DiT in bf16", "3 bf16", "FSDP2")


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest) -> Iterator[AskedCases]:
    """In cases of two processes, each asserts that the other one runs the same plan."""
    module, num_ranks = request.param
    for package in ("transformers", *MODULES[request.param][0].split()):
        pytest.importorskip(package, reason=f"needs {package}")
    with metered(module, num_ranks=num_ranks) as found:
        yield found


two_trainers = pytest.mark.parametrize("cases", [("trainer_ranks", 2)], indirect=True)


@pytest.mark.parametrize(
    ("cases", "name", "needs"),
    [
        pytest.param(module, name, needs, marks=() if name in QUICK else pytest.mark.long, id=f"{module[0]}-{name}")
        for module, (_, named) in MODULES.items()
        for name, needs in named.items()
    ],
    indirect=["cases"],
)
def test_every_step_is_within_the_budget(cases: AskedCases, name: str, needs: str) -> None:
    for package in needs.split():
        pytest.importorskip(package, reason=f"needs {package}")
    for row in cases[name]:
        # In "3 lengths" each process is longer in one step of its own; both then record, so that one plan holds for both.
        check_row(row, recorded_steps=3 if name == "3 lengths" else 1, is_sharded="FSDP2" in name)
        # Where the results of linear layers are kept, it is more than half.
        assert name != "3 lengths" or row["least_bytes"] < 0.45 * row["plain_bytes"]


@two_trainers
@pytest.mark.parametrize("name", ["two budgets in Hugging Face", "two budgets in Lightning"])
def test_two_budgets_are_the_same_error_in_both(name: str, cases: AskedCases) -> None:
    first, second = cases[name]
    expected = r"ConfigError: got budget in rank 0='80%', budget in rank 1='90%': two values of budget in one group"
    assert re.match(expected, first["error"]), first
    assert first["error"] == second["error"]


@two_trainers
def test_a_process_without_a_budget_is_named(cases: AskedCases) -> None:
    first, second = cases.last("one without a budget")
    assert first["error"] == (
        "RecordError: MemoryBudget: rank 1 of 2 trains without it, expected it in every process of the training, since they "
        "run one plan. Pass it in all of them, or in none."
    )
    # Nothing of recollect runs there: it ends as PyTorch sees that the other has.
    assert "RuntimeError" in second["error"] or "DistBackendError" in second["error"]

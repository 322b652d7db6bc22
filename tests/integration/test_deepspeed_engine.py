"""DeepSpeed's engine within a memory budget, ZeRO 0 to 3, in one process and in two: the same training, in the budget."""

import importlib.util
import json
import re

import pytest

from asked_cases import AskedCases
from forked_processes import run_forked
from metered_processes import ROOT, check_row, free_port, metered_cases, needs_meter
from tiers import long_but

pytestmark = [
    needs_meter,
    *(
        pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs {name}")
        for name in ("deepspeed", "transformers", "accelerate")
    ),
]

# Each stage once, of `deepspeed_engines.CASES` and `deepspeed_trainers.CASES`: importing both libraries takes longer than
# training. ZeRO-2 in two processes is left out: gloo frees what it has reduced a moment late, so that now and then the
# recorded step seems to need a bucket more than it does.
ENGINES = ("0 fp32", "3 bf16")
TRAINERS = ("ZeRO-2",)
LENGTHS, PAIR = "3 lengths", "ZeRO-3 in bf16"


cases = metered_cases("deepspeed_trainers")


pairs = metered_cases("deepspeed_trainers", num_ranks=2)


EXPECTED = {
    "plan": r"AlreadyAppliedError: cannot keep LlamaForCausalLM within .* has a plan already\. Remove it first",
    "engine, stage 0": r"RecordError: cannot record DeepSpeedEngine on a batch: .*deepspeed\.initialize\(.*, or pass step=",
    "engine, stage 2": r"RecordError: cannot record DeepSpeedEngine on a batch: ",
    "engine, stage 3": r"RecordError: cannot record DeepSpeedEngine on a batch: ",
    "flag": r"AlreadyAppliedError: .*Hugging Face's gradient checkpointing; .*_disable\(\) first",
    "flag and section": r"AlreadyAppliedError: .*Hugging Face's gradient checkpointing",
    "configured": r"ConfigError: got deepspeed.checkpointing.is_configured\(\)=True: .* Drop the call of deepspeed",
    "ours configured": r"ConfigError: got recollect.integrations.deepspeed.checkpointing.is_configured\(\)=True: .* Drop",
    "both": r"ConfigError: got deepspeed.checkpointing.is_configured\(\)=True: .* Call configure and checkpoint of one",
    "partition": r"ConfigError: got activation_checkpointing.partition_activations=True: .* Drop it",
    "cpu": r"ConfigError: got activation_checkpointing.cpu_checkpointing=True: .* Drop it",
    "unknown key": r"ConfigError: got partition_activation=True: there is no such setting. Did you mean",
    "own unknown key": r"ConfigError: got recollect.budget='1GiB': there is no such setting. .*Choose from memory_budget",
    "said twice": r"ConfigError: got recollect.memory_budget='1GiB', memory_budget='2GiB': .* Drop one of them",
    "tensor parallel": r"NotYetError: got tensor_parallel.autotp_size=2: not yet: .* Train with data parallelism",
    "mpu": r"NotYetError: got mpu=2: not yet: ",
    "hybrid": r"NotYetError: got hybrid_engine.enabled=True: not yet: .* Drop it",
    "compile": r"NotYetError: got compile.deepcompile=True: not yet: .* Drop it",
    "pipeline": r"NotYetError: got model='PipelineModule': not yet: .* Pass the model itself",
    "no optimizer": r"ConfigError: got optimizer=None: nothing ends a training step.* Pass optimizer=",
    "no budget": r"QuantityError: .*90% of the device",
    "too small": r"BudgetTooSmallError: 1 B \(1 bytes\) is below",
    "old": r"ConfigError: got deepspeed='0.15.4': .* Install deepspeed 0.16 or later",
    "unknown argument": r"TypeError: .*memory_bugdet",
    "in the file": r"fine: 1 GiB budget|fine: 1.0 GiB budget",
    "removed": r"fine: True True",
    "trainer: partition": r"ConfigError: got activation_checkpointing.partition_activations=True: .* Drop it",
    "trainer: said twice": r"ConfigError: got recollect.memory_budget='1GiB', memory_budget='2GiB': .* Drop one of them",
    "trainer: said once": r"fine: Trainer",
    "trainer: by hand": r"NotYetError: got deepspeed='...': not yet: a trainer other than .* Leave MemoryBudget out",
    "trainer: interrupted": r"fine: True",
}


@pytest.fixture(scope="module")
def refusals() -> dict[str, str]:
    """What each mistake raises, from a process of its own."""
    done = run_forked(ROOT / "tests/support/deepspeed_mistakes.py", MASTER_PORT=str(free_port()))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", long_but(("3 bf16",), (*ENGINES, *TRAINERS)))
def test_every_step_of_an_engine_and_of_a_trainer_is_within_the_budget(name: str, cases: AskedCases) -> None:
    (row,) = cases[name]
    check_row(row)


@pytest.mark.long
def test_a_trainer_with_deepspeed_in_two_processes_is_within_the_budget(pairs: AskedCases) -> None:
    for row in pairs[PAIR]:
        check_row(row)


def test_what_is_asked_for_twice_or_not_there_is_refused_by_name(refusals: dict[str, str]) -> None:
    for name, text in refusals.items():
        expected = EXPECTED[name]
        assert re.search(expected, text), f"{name}: {text}"
    assert refusals.keys() == EXPECTED.keys()


@pytest.mark.long
def test_processes_whose_batches_grow_at_different_times_record_together(pairs: AskedCases) -> None:
    """Each is longer in one step of its own; both then record, so that one plan holds for both."""
    for row in pairs[LENGTHS]:
        check_row(row, recorded_steps=3)
        # Where the results of linear layers are kept, it is more than half.
        assert row["least_bytes"] < 0.45 * row["plain_bytes"]

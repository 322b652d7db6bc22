"""What DeepSpeed's engine and trainers with it refuse by name; test_metered_trainers.py trains with them."""

import importlib.util
import json
import re

import pytest

from forked_processes import run_forked
from metered_processes import ROOT, free_port, needs_meter

pytestmark = [
    needs_meter,
    *(
        pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs {name}")
        for name in ("deepspeed", "transformers", "accelerate")
    ),
]

EXPECTED = {
    "plan": r"AlreadyAppliedError: cannot keep LlamaForCausalLM within .* has a plan already\. Remove it first",
    "engine, stage 3": r"RecordError: cannot record DeepSpeedEngine on a batch: .*deepspeed\.initialize\(.*, or pass step=",
    "attach, stage 1": r"RecordError: attach: DeepSpeed's ZeRO steps over its own parts of .* of DeepSpeedEngine, "
    r".* recollect\.integrations\.deepspeed.* with model=engine",
    "flag": r"AlreadyAppliedError: .*Hugging Face's gradient checkpointing; .*_disable\(\) first",
    "configured": r"ConfigError: got deepspeed.checkpointing.is_configured\(\)=True: .* Drop the call of deepspeed",
    "ours configured": r"ConfigError: got recollect.integrations.deepspeed.checkpointing.is_configured\(\)=True: .* Drop",
    "both": r"ConfigError: got deepspeed.checkpointing.is_configured\(\)=True: .* Call configure and checkpoint of one",
    "partition": r"ConfigError: got activation_checkpointing.partition_activations=True: .* Drop it",
    "unknown key": r"ConfigError: got partition_activation=True: there is no such setting. Did you mean",
    "own unknown key": r"ConfigError: got recollect.budget='1GiB': there is no such setting. .*Choose from memory_budget",
    "said twice": r"ConfigError: got recollect.memory_budget='1GiB', memory_budget='2GiB': .* Drop one of them",
    "tensor parallel": r"NotYetError: got tensor_parallel.autotp_size=2: not yet: .* Train with data parallelism",
    "mpu": r"NotYetError: got mpu=2: not yet: ",
    "hybrid": r"NotYetError: got hybrid_engine.enabled=True: not yet: .* Drop it",
    "compile": r"NotYetError: got compile.deepcompile=True: not yet: .* Drop it",
    "pipeline": r"NotYetError: got model='PipelineModule': not yet: .* Pass the model itself.* to recollect\.attach",
    "pipeline, attached": r"fine: True \[(8\d|90)\]",
    "pipeline, ZeRO": r"NotYetError: got model='PipelineEngine': not yet: .* Train the pipeline in fp32 without ZeRO",
    "pipeline, checkpointed": r"AlreadyAppliedError: .* already, by .*_interval; .* call set_checkpoint_interval\(0\)",
    "no optimizer": r"ConfigError: got optimizer=None: nothing ends a training step.* Pass optimizer=",
    "no budget": r"QuantityError: .*90% of the device",
    "too small": r"BudgetTooSmallError: 1 B \(1 bytes\) is below",
    "old": r"ConfigError: got deepspeed='0.15.4': .* Install deepspeed 0.16 or later",
    "unknown argument": r"TypeError: .*memory_bugdet",
    "in the file": r"fine: 1 GiB budget|fine: 1.0 GiB budget",
    "removed": r"fine: True True",
    "made": r"fine: True True True 1",
    "made with others": r"ConfigError: got model='DeepSpeedEngine', config='...': the engine was made already, .* Pass the",
    "trainer: partition": r"ConfigError: got activation_checkpointing.partition_activations=True: .* Drop it",
    "trainer: said twice": r"ConfigError: got recollect.memory_budget='1GiB', memory_budget='2GiB': .* Drop one of them",
    "trainer: said once": r"fine: Trainer",
    "trainer: by hand": r"NotYetError: got deepspeed='...': not yet: a trainer other than .* Leave MemoryBudget out",
    "trainer: interrupted": r"fine: True",
}


def test_what_is_asked_for_twice_or_not_there_is_refused_by_name() -> None:
    """By each mistake, in one process of its own."""
    done = run_forked(ROOT / "tests/support/deepspeed_mistakes.py", MASTER_PORT=str(free_port()))
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == EXPECTED.keys()
    for name, text in found.items():
        assert re.search(EXPECTED[name], text), f"{name}: {text}"

"""Errors on the command line: one line that names the flag, before anything is recorded where it can be known by then."""

import json
import re
import shlex
from pathlib import Path

import pytest

import recollect
from recollect.cli import main

BUDGET = "plan --memory-budget 60%"
STEP = "--size tiny --num-layers 4 --batch-size 4 --seq-length 128 --device cpu"
PLAN = f"plan {STEP} --memory-budget 1GiB"
LARGEST = "plan --size llama-tiny --largest micro-batch --out {folder}/plan.json --memory-budget"
CLUSTER = "plan --size llama-tiny --seq-length 256 --dtype bf16 --hardware H100 --memory-budget 80%"
FAKE = f"{CLUSTER} --fake"
TENSOR = "--tensor-model-parallel-size 2"
BENCH = "bench --size tiny --num-layers 2 --micro-batch-size 4 --seq-length 64 --device cpu --rounds 1"

# Lines that do not parse, and how their errors begin.
PARSED = [
    ("train 1b --steps 3", "1b: belongs to no flag. See"),
    (
        "plan --budget 60%",
        "--budget: no such flag of recollect plan. Did you mean '--host-budget' or '--memory-budget'?",
    ),
    (f"{BUDGET} --model 8b", "--model: no such flag of recollect plan. See"),
    ("train --stepz 3", "--stepz: no such flag of recollect train. Did you mean '--steps'?"),
    ("train --steps 0", "--steps: got 0, expected at least 1."),
    ("train --steps", "--steps: got no value, expected one."),
    ("train --lr nan", "--learning-rate: got nan, expected at least 0."),
    ("train --beta2 1", "--beta2: got 1.0, expected 0 or more, and less than 1."),
    ("train --seed -1", "--seed: got -1, expected 0 to 4294967295."),
    ("train --lr high", "--lr: got 'high', expected a number."),
    ("train --resume", "--resume: got it without --run-dir, expected the folder of the run to go on with."),
    (
        "train --profile --steps 9",
        "--profile-step-start: got 10, expected at most 9, the last step: no step is traced.",
    ),
    ("train --data a --data-path b", "--data-path: given with --data, expected one of them. Remove one."),
    ("plan", "--memory-budget: missing. Bound on the peak of the whole step, such as 16GiB, 900MB or 60% of the "),
    *(
        (f"{BUDGET} {flag} 0", f"{flag}: got 0, expected at least 1.")
        for flag in "--seq-length --num-layers --vocab-size --ffn-hidden-size --kv-channels --num-query-groups".split()
    ),
    (f"{BUDGET} --num-layers 1000000", "--num-layers: got 1000000, expected 1 to 10000."),
    (f"{BUDGET} --micro_batch_size=two", "--micro-batch-size: got 'two', expected a whole number."),
    (f"{BUDGET} --num-layers two", "--num-layers: got 'two', expected a whole number."),
    (f"{BUDGET} --dtype bfl6", "--dtype: got 'bfl6', expected one of fp32, bf16. Did you mean 'bf16'?"),
    (f"{BUDGET} --num-experts 4 --moe-router-topk 9", "--moe-router-topk: got 9, expected at most --num-experts = 4."),
    (f"{BUDGET} --pipeline-split x", "--pipeline-split: got 'x', expected {auto}|{[INT [INT ...]]}."),
    ("coverage --hardware H100", "--hardware: no such flag of recollect coverage."),
    (f"{BENCH} --threads 100000", "--threads: got 100000, expected 1 to 1024"),
    (f"{BENCH} --rounds 0", "--rounds: got 0, expected at least 1"),
    (f"{BENCH} --threshold 5", "--threshold: got 5, expected a fraction between 0 and 1"),
    (f"{BENCH} --out table.xlsx", "--out: got table.xlsx, expected a name that ends in .csv, .json, .md"),
    (f"{PLAN} --max-size 8", "--max-size: got 8 without --largest, expected both or neither."),
    (f"{PLAN} --multiple-of 8", "--multiple-of: got 8 without --largest, expected both or neither."),
    (f"{LARGEST} 1GiB --png a.png", "--png: got a.png with --largest, expected none: draw the size"),
    (f"{LARGEST} 1GiB --html a.html", "--html: got a.html with --largest, expected none"),
    (f"{LARGEST} 1GiB --write megatron", "--write: got megatron with --largest, expected none: plan"),
    (f"{LARGEST} 1GiB --loss-chunks auto", "--loss-chunks: got auto with --largest, expected a number."),
]
# Lines that parse, and words of their errors.
ERRORS = [
    (f"{BUDGET} --", "Error: --: got nothing behind it, expected a command such as torchrun"),
    ("plan --memory-budget foo", "Error: --memory-budget: got 'foo': does not begin with a number"),
    ("plan '--memory-budget=16,000 MB'", "Error: --memory-budget: got '16,000 MB': has a comma; write '16000MB' for"),
    (
        "plan --memory-budget 1KiB --fake --size tiny",
        "Error: --memory-budget: 1.0 KiB (1024 bytes) is below the least ",
    ),
    (f"{BUDGET} --fake --host-budget 60%", "Error: --memory-budget or --host-budget: got '60%': unknown suffix '%'"),
    (f"{BUDGET} --fake --hardware foo", "Error: --hardware: got 'foo', expected one of H100,"),
    (f"{BUDGET} {TENSOR}", "Error: no --fake: a layout of many devices is planned on a machine without them"),
    ("plan --size 70b --memory-budget 80GiB", "no --fake: the model's parameters take 257.0 GiB and its gradients "),
    *(
        (f"{line} --batch-size 999999999", "and its gradients as much, the tokens 1.9 TiB, and cpu has ")
        for line in (BUDGET, "coverage", "bench", "train --size tiny --run-dir {folder}/run")
    ),
    (
        f"{BUDGET} --seq-length {10**20}",
        f"Error: --batch-size 8, --seq-length {10**20}: a tensor has more bytes than 64 bits can count. Choose a",
    ),
    (f"{BUDGET} --size llama-8B", "Did you mean '8b'? See"),
    # Found before the step is built: there is no such config.
    ("plan --hf-config none.json --memory-budget 60", "'60': has no unit; write '60%' for"),
    (f"{BUDGET} --hf-config none.json --device gpu0", "--device gpu0: cannot be used"),
    (f"frontier {STEP} --device cuda:77", "--device cuda:77: cannot be used"),
    (f"{PLAN} --out {{folder}}/none/p.json", "none/p.json: cannot be written"),
    (f"{BUDGET} --hf-config {{folder}}/none.json", "none.json: no such file"),
    (f"{BUDGET} --hf-config {{folder}}/broken.json", "transformers cannot build the model"),
    (f"frontier {STEP} --hardware H100", "hardware: got 'H100' with fake=False"),
    (f"frontier {STEP} --png {{folder}}/none/p.png", "--png {folder}/none/p.png: cannot be written (no folder"),
    (f"frontier {STEP} --html {{folder}}/none/p.html", "--html {folder}/none/p.html: cannot be written"),
    (f"frontier {STEP} --html {{folder}}", "{folder}: cannot be written (Is a directory)"),
    (f"frontier {STEP} --png {{folder}}", "{folder}: cannot be written (Is a directory)"),
    (f"timeline {STEP} --trace {{folder}}/none/s.json", "--trace {folder}/none/s.json: cannot be written"),
    (f"timeline {STEP} --plan {{folder}}/none.json", "--plan {folder}/none.json: no such file, expected a plan"),
    (f"timeline {STEP} --plan {{folder}}/other.json", "other.json: GPTModel has no unit 'layers.9'. It has"),
    (f"coverage {STEP} --plan none.json", "--plan none.json: no such file, expected a plan"),  # it has --json
    (
        f"timeline {STEP} --plan p.json --memory-budget 60%",
        "--memory-budget: got 60% with the plan p.json, expected one of them.",
    ),
    (
        f"{PLAN} --engine compile --largest micro-batch",
        "--largest: got micro-batch with --engine compile, expected none: plan the size that it finds without the flag.",
    ),
    (
        f"{PLAN} --engine compile --write megatron",
        "--write: got megatron with --engine compile, expected none: settings of other tools are compared on the tape.",
    ),
    *(
        (
            f"{command} --engine compile --host-budget 1GiB",
            "--engine compile, --host-budget 1GiB: not yet: copies to host memory. Leave out --host-budget",
        )
        for command in (PLAN, f"frontier {STEP}")
    ),
    (
        f"{PLAN} --fake --engine compile --data-parallel-size 2",
        "--engine compile: not yet: what layers take on other engines, on the devices of a cluster. Plan without",
    ),
    (f"{LARGEST} 1KiB", "No smaller micro-batch than 1 is allowed. What lives through the whole step"),
    (f"{LARGEST} 60%", "'60%': a percentage of the peak without recompute, which differs"),
    (f"{LARGEST} 1GiB --out {{folder}}/none/p.json", "--out {folder}/none/p.json: cannot be written"),
    (f"{LARGEST} 1GiB --max-size 0", "--max-size 0: not a whole number, 1 or more"),
    (
        f"{LARGEST} 1GiB --multiple-of 8 --max-size 4",
        "--multiple-of 8, --max-size 4: no size is a multiple within the limit",
    ),
    (
        f"{FAKE} --tensor-model-parallel-size 3",
        "Error: --num-attention-heads 4, --tensor-model-parallel-size 3: 4 is not a multiple of 3.",
    ),
    (f"{FAKE} --tensor-model-parallel-size 0", "--tensor-model-parallel-size 0: it counts devices."),
    (
        f"{FAKE} --data-parallel-size 4 --world-size 2",
        "--data-parallel-size 4, --world-size 2: that leaves 2 ranks of data parallelism. Leave one of them out.",
    ),
    (
        f"{FAKE} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank -1",
        "--num-virtual-stages-per-pipeline-rank -1: it counts stages. Pass 1 or more.",
    ),
    (f"{FAKE} {TENSOR} --write torchtitan", "--write torchtitan: not yet"),
    (f"{FAKE} --data-parallel-size 4 --global-batch-size 6", "--global-batch-size 6, "),
    (
        f"{FAKE} {TENSOR} --size mixtral-tiny --write megatron",
        "no --sequence-parallel: Megatron does not train experts under tensor parallelism like this",
    ),
    (f"{FAKE} {TENSOR} --node-link 'NVLink 9'", "--node-link: got 'NVLink 9'"),
    (f"{FAKE} --context-parallel-size 3", "--seq-length 256, 2 x --context-parallel-size 6: "),
    (f"{FAKE} --expert-model-parallel-size 2", "--expert-model-parallel-size 2, --data-parallel-size 1"),
    (f"{FAKE} --decoder-last-pipeline-num-layers 3", "the layers cannot be divided among the stages"),
    (f"{FAKE} --pipeline-model-parallel-size 2 --pipeline-split 3 2", "stages have 5 layers together"),
    (f"{FAKE} --pipeline-split auto", "there are 1 stages to divide the layers among"),
    (f"{FAKE} --pipeline-parallel-schedule GPipe", "a schedule orders the stages of two ranks or more"),
    (f"{FAKE} {TENSOR} --hardware cpu", "its links to other devices are not known"),
    (
        f"{FAKE} --use-torch-fsdp2 --use-distributed-optimizer",
        "Error: --use-distributed-optimizer: got it with --use-torch-fsdp2",
    ),
    (f"{BENCH} --setting sometimes", "--setting: got 'sometimes': cannot be read, expected 'none'"),
    (f"{BENCH} --settings {{folder}}/none.yaml", "none.yaml: cannot be read (No such file or directory)"),
    (f"{BENCH} --golden {{folder}}/none.json", "golden results {folder}/none.json: cannot be read"),
    (f"{BENCH} --out {{folder}}/none/t.md", "{folder}/none/t.md: cannot be written (no folder"),
    (f"{BENCH} --memory-limit lots", "'lots': "),
    (f"{BENCH} --setting none --setting none", "--setting: got 'none': given twice"),
    (
        "plan --memory-budget 60% --megatron {folder}/no.yaml",
        "no.yaml: got nothing to plan for, expected flags of a model.",
    ),
    (
        "plan --memory-budget 60% --vocab-size 9 --megatron {folder}/layout.yaml",
        "layout 7, --num-layers 8, no --mtp-num-la",
    ),
    ("explain --fake --yaml {folder}/broken.json", "--yaml {folder}/broken.json: cannot be read (line 2, column 1"),
    ("explain --fake --yaml {folder}/none.yaml", "none.yaml: cannot be read (No such file or directory)"),
    ("explain --fake --json {folder}/none/e.json", "e.json: cannot be written (no folder"),
]
# Lines that parse, and the whole of their errors.
WHOLE = [
    (
        "calibrate --out {folder}/hw",
        "Error: --out {folder}/hw: expected a name that ends in .json, as --hardware does.",
    ),
    *(
        (
            f"{command} --out {{folder}}/{out}",
            f"Error: --out {{folder}}/{out}: cannot be written ({problem}), expected a file in a writable folder.",
        )
        # Measuring takes a minute, and the config does not exist.
        for command in ("calibrate", f"{BUDGET} --hf-config none.json")
        for out, problem in (("none/h.json", "no folder {folder}/none"), ("empty", "Is a directory"))
    ),
    (
        "train --data {folder}/none --run-dir {folder}/run",
        "Error: training data {folder}/none: no such file or folder, expected a text file, a .jsonl file or a folder. Check "
        "--data.",
    ),
    (
        "train --data-path {folder}/none --size tiny --run-dir {folder}/run",
        "Error: indexed dataset {folder}/none: no file {folder}/none.idx, expected a pair of .bin and .idx as Megatron's "
        "tools/preprocess_data.py or `recollect tokenize` writes it. Check --data-path.",
    ),
]


@pytest.mark.parametrize(("line", "message"), PARSED)
def test_flags_that_do_not_parse(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(line)) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"Error: {message}")
    assert re.search(r" See recollect( \w+)? --help\.$", error)


@pytest.mark.parametrize(("line", "message"), [*ERRORS, *WHOLE])
def test_errors_are_one_line(line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "no.yaml").write_text("trainer: {epochs: 3}\n")
    (tmp_path / "layout.yaml").write_text("pipeline_model_parallel_layout: 7\n")
    recollect.Plan({"layers.9": recollect.UnitPlan({})}).save(tmp_path / "other.json")
    assert main(shlex.split(line.replace("{folder}", str(tmp_path)))) == 2
    output = capsys.readouterr()
    (error,) = output.err.splitlines()
    said = message.replace("{folder}", str(tmp_path))
    assert error.startswith("Error: ") and said in error
    assert (line, message) not in WHOLE or error == said
    assert not line.startswith("bench") or "recording" not in output.out


SIZES = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a list", "config.yaml: got a list, expected a mapping of Megatron's names."),
        ("a: [", "config.yaml: cannot be read (line "),
        ({"num_attention_heads": 3}, "--hidden-size: got 64, expected a multiple of --num-attention-heads = 3"),
        ({"softmax_type": "learnable"}, "softmax-type=learnable: not yet: a softmax with an offset"),
        ({"recompute_granularity": "full"}, "full recompute needs"),
        ({"recompute_granularity": "some"}, "--recompute-granularity: got 'some', expected one of full, selective"),
    ],
)
def test_broken_configurations_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | dict[str, object], message: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text if isinstance(text, str) else json.dumps({**SIZES, **text}))
    assert main(["explain", "--fake", "--yaml", str(path)]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("Error: ") and message in error

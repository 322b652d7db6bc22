"""Plan seven models with the layouts of published recipes, and write the plans as Megatron's settings.

    python benchmarks/megatron_recipes.py                # all, some minutes on one core
    python benchmarks/megatron_recipes.py --names 8b 70b

Each is one command line of `recollect plan --write megatron`, run in a process of its own on fake tensors. Layouts, lengths and
batches are those of Megatron-Bridge's recipes at 067f987d (`src/megatron/bridge/perf_recipes`, and for GPT-3 `recipes/gpt`), of
Mixtral those of Megatron-LM's examples at d98e8a64. The processor time that each took, imports included, goes to stderr.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from dataclasses import dataclass

from flags import parse

COMMON = "--fake --hardware H100 --dtype bf16 --use-distributed-optimizer --pipeline-engine megatron"
_DENSE = (
    "--normalization RMSNorm --swiglu --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0"
)
_MIXTURE = f"{_DENSE} --position-embedding-type rope --group-query-attention --num-experts 128 --moe-grouped-gemm"
_LLAMA_70B = "--size 70b --vocab-size 128256 --max-position-embeddings 8192 --tensor-model-parallel-size 4"
_INTERLEAVED = "--sequence-parallel --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4"
RECIPES = {
    "8b": "--size 8b --seq-length 8192 --context-parallel-size 2 --data-parallel-size 4 --global-batch-size 128"
    " --memory-budget 72GiB",
    "70b": f"{_LLAMA_70B} {_INTERLEAVED} --context-parallel-size 2 --data-parallel-size 2 --global-batch-size 256"
    " --seq-length 8192 --memory-budget 72GiB",
    # The run of the guide to activation recompute, in 16 bits.
    "70b-guide": f"{_LLAMA_70B} {_INTERLEAVED} --data-parallel-size 2 --global-batch-size 32 --seq-length 4096"
    " --memory-budget 72GiB",
    "gpt3-175b": "--size gpt3-175b --vocab-size 51200 --tensor-model-parallel-size 4 --sequence-parallel"
    " --pipeline-model-parallel-size 8 --num-layers-per-virtual-pipeline-stage 2 --data-parallel-size 16"
    " --micro-batch-size 2 --global-batch-size 2048 --seq-length 2048 --memory-budget 72GiB",
    "mixtral-8x7b": "--size mixtral-8x7b --pipeline-model-parallel-size 4 --expert-model-parallel-size 8"
    " --data-parallel-size 16 --global-batch-size 256 --seq-length 4096 --memory-budget 72GiB",
    "qwen3-30b-a3b": f"{_MIXTURE} --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32"
    " --num-query-groups 4 --kv-channels 128 --vocab-size 151936 --max-position-embeddings 40960 --rotary-base 1000000"
    " --disable-bias-linear --moe-router-topk 8 --moe-ffn-hidden-size 768 --expert-model-parallel-size 16"
    " --data-parallel-size 16 --global-batch-size 1024 --seq-length 4096 --memory-budget 72GiB",
    "deepseek-v3": "--size deepseek-v3-671b --mtp-num-layers 1 --tensor-model-parallel-size 2 --sequence-parallel"
    f" --expert-tensor-parallel-size 1 --pipeline-model-parallel-size 8 --pipeline-split 1 {'2 ' * 29}1 1"
    " --expert-model-parallel-size 64 --data-parallel-size 64 --global-batch-size 16384 --seq-length 4096"
    " --memory-budget 72GiB",
    "gpt-oss-120b": f"{_MIXTURE} --num-layers 36 --hidden-size 2880 --ffn-hidden-size 2880 --num-attention-heads 64"
    " --num-query-groups 8 --kv-channels 64 --vocab-size 201088 --max-position-embeddings 131072 --rotary-base 150000"
    " --add-qkv-bias --moe-router-topk 4 --moe-ffn-hidden-size 2880 --pipeline-model-parallel-size 4"
    " --expert-model-parallel-size 8 --data-parallel-size 16 --global-batch-size 1280 --seq-length 4096"
    " --memory-budget 72GiB",
}


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What to plan."""

    names: tuple[str, ...] = tuple(RECIPES)
    """Recipes."""


def row(name: str) -> str:
    """Return a row of the table: devices, the plan, and the settings."""
    words = [*COMMON.split(), *RECIPES[name].split(), "--write", "megatron", "--out", os.devnull]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "recollect", "plan", *words], capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    took_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{name}: {took_s:.0f} s", file=sys.stderr, flush=True)
    plan = re.search(r"^(\d+) x .*: peak (.*) a device, step .* ms \((\S+) by", done.stdout, re.MULTILINE)
    settings = re.search(r"alike: peak (.*), step (\S+), .*\n(.*)", done.stdout)
    if plan is None or settings is None:
        return f"| {name} | {done.stderr.strip().splitlines()[-1]} | | |"
    devices, *predicted = plan.groups()
    return f"| {name}, {devices} | {', '.join(predicted)} | {', '.join(settings.groups()[:2])} | `{settings[3]}` |"


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    flags = parse(Flags, __doc__, arguments)
    print("| model, devices | the plan | Megatron's settings | flags |\n|---|---|---|---|")
    for name in flags.names:
        print(row(name), flush=True)


if __name__ == "__main__":
    main()

"""Flags of Megatron's `pretrain_gpt` without a setting in recollect: why they have no effect, or what they would need.

Imports no torch. `docs/megatron_flags.md` has the table; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Arity = Literal[0, 1, "any"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignFlag:
    """A flag that is removed from the command line before recollect reads its own.

    Attributes:
        name: with dashes.
        arity: number of values that follow it.
        allowed: values without effect here; None: any. A flag of arity 0 is allowed unless `needs` is set.
        why: why it has no effect.
        needs: what recollect would need for other values; empty: every value is allowed.
        advice: what to do meanwhile.
    """

    name: str
    arity: Arity = 0
    allowed: tuple[str, ...] | None = None
    why: str = ""
    needs: str = ""
    advice: str = ""


def _named(names: str, **meaning: Any) -> Iterator[ForeignFlag]:
    """Yield the flags of a row of the tables below."""
    for word in names.split():
        name, takes, several = word.partition("=")
        arity: Arity = "any" if several else 1 if takes else 0
        yield ForeignFlag(name=name, arity=arity, **meaning)


def _only(
    why: str, allowed: tuple[str, ...], needs: str, names: str, advice: str = "Leave it out."
) -> Iterator[ForeignFlag]:
    return _named(names, allowed=allowed, why=why, needs=needs, advice=advice)


# Why flags have no effect, and which; "=" after one says that a value follows it, "=*" that any number do.
_NO_EFFECT = {
    "PyTorch decides when processes communicate, and gradients are reduced in fp32": (
        "--overlap-grad-reduce --overlap-param-gather --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32 "
        "--tp-comm-overlap --moe-permute-fusion --moe-shared-expert-overlap "
        "--no-async-tensor-model-parallel-allreduce --align-grad-reduce --defer-embedding-wgrad-compute "
        "--use-tp-pp-dp-mapping --ddp-bucket-size= --ddp-num-buckets= --moe-token-dispatcher-type="
    ),
    "the backend is NCCL on CUDA and gloo on the CPU, and torchrun tells ranks": "--distributed-backend= --local-rank=",
    "PyTorch's kernels are used either way": (
        "--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion "
        "--no-rope-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm --use-mcore-models "
        "--cross-entropy-loss-fusion --no-persist-layernorm --attention-softmax-in-fp32 "
        "--no-create-attention-mask-in-dataloader --apply-rope-fusion --cross-entropy-fusion-impl="
    ),
    "positions are decided by --position-embedding-type": "--no-position-embedding",
    "the order of the data is worked out in place, without a cache or workers": "--data-cache-path= --num-workers=",
    "files are memory-mapped either way": "--no-mmap-bin-files",
    "the trace is torch.profiler's either way, of the first process": "--use-pytorch-profiler --profile-ranks=*",
    "each step's loss, rate, gradient norm, time and tokens a second are always logged": (
        "--log-timers-to-tensorboard --log-progress --log-batch-size-to-tensorboard "
        "--log-learning-rate-to-tensorboard --no-log-learning-rate-to-tensorboard --no-log-loss-scale-to-tensorboard "
        "--timing-log-level= --timing-log-option= --tensorboard-log-interval= --tensorboard-queue-size="
    ),
    "this number is not logged": (
        "--log-throughput --log-num-zeros-in-grad --log-params-norm --moe-per-layer-logging "
        "--log-validation-ppl-to-tensorboard"
    ),
    "all sequences are equally long": "--calculate-per-token-loss",
    "a checkpoint holds the whole run: a folder, which several processes write beside the next steps": (
        "--ckpt-format= --dist-ckpt-format= --async-save --use-dist-ckpt --auto-detect-ckpt-format "
        "--ckpt-fully-parallel-save"
    ),
    "Python's garbage collector is left to itself": "--manual-gc --manual-gc-interval=",
    "the allocator keeps its blocks from step to step": "--empty-unused-memory-level=",
    "no run is stopped by a nan; the norm of the gradient is in the log": "--no-check-for-nan-in-loss-and-grad",
}

_FIXED = (
    _only(
        "this is not split",
        ("1",),
        "layouts with another size for the optimizer",
        "--num-distributed-optimizer-instances= --tensor-parallel-size= --model-parallel-size=",
        "Set it to 1, or leave it out.",
    ),
    _only("AdamW is the optimizer", ("adam",), "other optimizers than AdamW", "--optimizer="),
    _only(
        "AdamW decays weights apart from gradients",
        ("constant",),
        "a weight decay that changes in the run",
        "--weight-decay-incr-style=",
        "Leave it out; --weight-decay is constant.",
    ),
    _only("the rate rises from near 0", ("0", "0.0"), "a warm-up from another rate", "--lr-warmup-init="),
    _only("no graphs are captured", ("none",), "CUDA graphs", "--cuda-graph-impl=", "Leave it out, or set it to none."),
    _only("all channels are turned", ("1.0", "1"), "positions for a part of the channels", "--rotary-percent="),
    _only("no frequencies are scaled", ("1.0", "1"), "scaled rotary frequencies", "--rotary-scaling-factor="),
    _only(
        "the data are read in an order drawn from the seed",
        ("single", "cyclic"),
        "readers of one's own",
        "--dataloader-type=",
    ),
    _only("the router computes in fp32", ("fp32",), "a router in fp64", "--moe-router-dtype=", "Set it to fp32."),
    _only(
        "token ids come from --tokenizer, or from the files of --data-path with --vocab-size",
        ("NullTokenizer", "HuggingFaceTokenizer"),
        "tokenizers other than `tokenizer.json` files of the tokenizers library",
        "--tokenizer-type=",
        "Give that file with --tokenizer, or tokenized data with --data-path and --vocab-size.",
    ),
)

# What flags would need, what to do meanwhile, and which they are.
_MISSING = {
    ("models that compute in 8 or 4 bits", "Leave it out; --bf16 is there."): (
        "--fp8-format= --fp8= --fp8-recipe= --fp8-amax-history-len= --fp8-amax-compute-algo= --fp8-margin= "
        "--fp8-interval= --fp4-format= --fp4-recipe= --fp8-param-gather --no-fp8-wgrad --fp8-hybrid --fp8-e4m3"
    ),
    ("loss scaling, without which small gradients vanish in fp16", "Use --bf16."): (
        "--fp16 --loss-scale= --initial-loss-scale= --min-loss-scale= --hysteresis= --loss-scale-window="
    ),
    ("another way to count virtual stages", "Use --num-layers-per-virtual-pipeline-stage."): (
        "--num-virtual-stages-per-pipeline-rank="
    ),
    ("data made up on the way", "Leave it out; without data, the source of Python is read."): "--mock-data",
    ("GPT-2's tokenizer from two files", "Give a tokenizer.json of the tokenizers library with --tokenizer."): (
        "--vocab-file= --merge-file="
    ),
    ("other files of tokenizers", "Give a tokenizer.json of the tokenizers library with --tokenizer."): (
        "--tiktoken-pattern="
    ),
    ("lists of datasets in files", "Put them on the command line: --data-path."): "--data-args-path=",
    ("lists of datasets in files", "Use --train-data-path and --valid-data-path."): "--per-split-data-args-path=",
    ("a pass over a test set", "Leave it out; the third part of --split is held out."): "--test-data-path=*",
    ("masks from token ids", "Leave it out."): "--reset-position-ids --reset-attention-mask --eod-mask-loss",
    ("batches that grow", "Use --global-batch-size alone."): "--rampup-batch-size=*",
    ("schedules in samples", "Use --lr-decay-iters."): "--lr-decay-samples= --lr-wsd-decay-samples=",
    ("schedules in samples", "Use --lr-warmup-iters or --lr-warmup-fraction."): "--lr-warmup-samples=",
    ("the schedule WSD", "Use --lr-decay-style."): "--lr-wsd-decay-style= --lr-wsd-decay-iters=",
    ("a weight decay that changes in the run", "Leave it out."): "--start-weight-decay= --end-weight-decay=",
    ("other rates for embeddings", "Leave it out."): "--decoupled-lr= --decoupled-min-lr=",
    ("norms of weights off by one", "Leave it out."): "--apply-layernorm-1p",
    ("norms of queries and keys", "Leave it out."): "--qk-layernorm",
    ("another activation", "Use --swiglu, --openai-gelu or GELU."): "--squared-relu --quick-geglu",
    ("attention scores scaled by layer", "Leave it out."): "--apply-query-key-layer-scaling",
    ("a window of attention", "Leave it out."): "--window-size=*",
    ("scaled rotary frequencies", "Leave it out."): "--use-rope-scaling",
    ("a softmax over all experts", "Leave it out: it is over the chosen ones."): "--moe-router-pre-softmax",
    ("experts that refuse tokens", "Leave it out; no token is dropped."): (
        "--moe-expert-capacity-factor= --moe-token-drop-policy="
    ),
    ("experts that refuse tokens", "Leave it out."): "--moe-pad-expert-input-to-capacity",
    ("a loss on the router's logits", "Leave it out."): "--moe-z-loss-coeff= --moe-input-jitter-eps=",
    ("CUDA graphs", "Leave it out."): (
        "--external-cuda-graph --enable-cuda-graph --cuda-graph-scope=* --cuda-graph-modules=*"
    ),
    ("FSDP", "Leave it out."): "--use-megatron-fsdp --use-custom-fsdp",
    ("parts of a checkpoint", "Copy the run folder."): "--no-load-optim --no-load-rng --finetune",
    ("parts of a checkpoint", "Leave it out."): "--no-save-optim --no-save-rng",
    ("an end by the clock", "Stop it with Ctrl-C; --resume goes on."): "--exit-duration-in-mins= --exit-interval=",
    ("Weights & Biases", "Use --tensorboard-dir."): "--wandb-project= --wandb-exp-name= --wandb-save-dir=",
}

FOREIGN_FLAGS: dict[str, ForeignFlag] = {
    flag.name: flag
    for flags in (
        *(_named(names, why=why) for why, names in _NO_EFFECT.items()),
        *_FIXED,
        *(_named(names, allowed=(), needs=needs, advice=advice) for (needs, advice), names in _MISSING.items()),
    )
    for flag in flags
}

"""Flags of Megatron's `pretrain_gpt` without a setting in recollect: why they have no effect, or what they would need.

Imports no torch. `docs/megatron_flags.md` has the table; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["FOREIGN_FLAGS", "ForeignFlag"]

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


def _no_effect(why: str, arity: Arity, *names: str) -> tuple[ForeignFlag, ...]:
    return tuple(ForeignFlag(name=name, arity=arity, why=why) for name in names)


def _only(why: str, allowed: tuple[str, ...], needs: str, advice: str, *names: str) -> tuple[ForeignFlag, ...]:
    return tuple(
        ForeignFlag(name=name, arity=1, allowed=allowed, why=why, needs=needs, advice=advice) for name in names
    )


def _not_yet(needs: str, advice: str, arity: Arity, *names: str) -> tuple[ForeignFlag, ...]:
    return tuple(ForeignFlag(name=name, arity=arity, allowed=(), needs=needs, advice=advice) for name in names)


_COMMUNICATION = "PyTorch decides when processes communicate, and gradients are reduced in fp32"
_KERNELS = "PyTorch's kernels are used either way"
_FILES = (
    "a checkpoint holds the whole run: a file of one process, or a folder of several, written beside the next steps"
)

_NO_EFFECT = (
    *_no_effect(
        _COMMUNICATION,
        0,
        *("--overlap-grad-reduce", "--overlap-param-gather"),
        *("--grad-reduce-in-bf16", "--accumulate-allreduce-grads-in-fp32", "--tp-comm-overlap", "--moe-permute-fusion"),
        *("--moe-shared-expert-overlap", "--no-async-tensor-model-parallel-allreduce", "--align-grad-reduce"),
        *("--defer-embedding-wgrad-compute", "--use-tp-pp-dp-mapping"),
    ),
    *_no_effect(
        _COMMUNICATION,
        1,
        *("--ddp-bucket-size", "--ddp-num-buckets", "--moe-token-dispatcher-type"),
    ),
    *_no_effect(
        "the backend is NCCL on CUDA and gloo on the CPU, and torchrun tells ranks", 1, "--distributed-backend"
    ),
    *_no_effect("the backend is NCCL on CUDA and gloo on the CPU, and torchrun tells ranks", 1, "--local-rank"),
    *_no_effect(
        _KERNELS,
        0,
        *("--no-masked-softmax-fusion", "--no-bias-gelu-fusion", "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion"),
        *("--no-rope-fusion", "--no-gradient-accumulation-fusion", "--no-persist-layer-norm", "--use-mcore-models"),
        *("--cross-entropy-loss-fusion", "--no-persist-layernorm", "--attention-softmax-in-fp32"),
        *("--no-create-attention-mask-in-dataloader", "--apply-rope-fusion"),
    ),
    *_no_effect(_KERNELS, 1, "--cross-entropy-fusion-impl"),
    *_no_effect("positions are decided by --position-embedding-type", 0, "--no-position-embedding"),
    *_no_effect("the order of the data is worked out in place, without a cache or workers", 1, "--data-cache-path"),
    *_no_effect("the order of the data is worked out in place, without a cache or workers", 1, "--num-workers"),
    *_no_effect("files are memory-mapped either way", 0, "--no-mmap-bin-files"),
    *_no_effect("the trace is torch.profiler's either way, of the first process", 0, "--use-pytorch-profiler"),
    *_no_effect("the trace is torch.profiler's either way, of the first process", "any", "--profile-ranks"),
    *_no_effect(
        "each step's loss, rate, gradient norm, time and tokens a second are always logged",
        0,
        *("--log-timers-to-tensorboard", "--log-progress"),
        *(
            "--log-batch-size-to-tensorboard",
            "--log-learning-rate-to-tensorboard",
            "--no-log-learning-rate-to-tensorboard",
        ),
        *("--no-log-loss-scale-to-tensorboard",),
    ),
    *_no_effect(
        "each step's loss, rate, gradient norm, time and tokens a second are always logged",
        1,
        *("--timing-log-level", "--timing-log-option", "--tensorboard-log-interval", "--tensorboard-queue-size"),
    ),
    *_no_effect(
        "this number is not logged",
        0,
        *("--log-throughput", "--log-num-zeros-in-grad", "--log-params-norm", "--moe-per-layer-logging"),
        "--log-validation-ppl-to-tensorboard",
    ),
    *_no_effect("all sequences are equally long", 0, "--calculate-per-token-loss"),
    *_no_effect(_FILES, 1, "--ckpt-format", "--dist-ckpt-format"),
    *_no_effect(
        _FILES, 0, "--async-save", "--use-dist-ckpt", "--auto-detect-ckpt-format", "--ckpt-fully-parallel-save"
    ),
    *_no_effect("Python's garbage collector is left to itself", 0, "--manual-gc"),
    *_no_effect("Python's garbage collector is left to itself", 1, "--manual-gc-interval"),
    *_no_effect("the allocator keeps its blocks from step to step", 1, "--empty-unused-memory-level"),
    *_no_effect(
        "no run is stopped by a nan; the norm of the gradient is in the log", 0, "--no-check-for-nan-in-loss-and-grad"
    ),
)

_FIXED = (
    *_only(
        "this is not split",
        ("1",),
        "layouts with another size for the optimizer",
        "Set it to 1, or leave it out.",
        *("--num-distributed-optimizer-instances", "--tensor-parallel-size", "--model-parallel-size"),
    ),
    *_only(
        "",
        (),
        "another way to count virtual stages",
        "Use --num-layers-per-virtual-pipeline-stage.",
        "--num-virtual-stages-per-pipeline-rank",
    ),
    *_only("AdamW is the optimizer", ("adam",), "other optimizers than AdamW", "Leave it out.", "--optimizer"),
    *_only(
        "AdamW decays weights apart from gradients",
        ("constant",),
        "a weight decay that changes in the run",
        "Leave it out; --weight-decay is constant.",
        "--weight-decay-incr-style",
    ),
    *_only(
        "the rate rises from near 0", ("0", "0.0"), "a warm-up from another rate", "Leave it out.", "--lr-warmup-init"
    ),
    *_only("no graphs are captured", ("none",), "CUDA graphs", "Leave it out, or set it to none.", "--cuda-graph-impl"),
    *_only(
        "all channels are turned",
        ("1.0", "1"),
        "positions for a part of the channels",
        "Leave it out.",
        "--rotary-percent",
    ),
    *_only(
        "no frequencies are scaled",
        ("1.0", "1"),
        "scaled rotary frequencies",
        "Leave it out.",
        "--rotary-scaling-factor",
    ),
    *_only(
        "the data are read in an order drawn from the seed",
        ("single", "cyclic"),
        "readers of one's own",
        "Leave it out.",
        "--dataloader-type",
    ),
    *_only("the router computes in fp32", ("fp32",), "a router in fp64", "Set it to fp32.", "--moe-router-dtype"),
    *_only(
        "token ids come from --tokenizer, or from the files of --data-path with --vocab-size",
        ("NullTokenizer", "HuggingFaceTokenizer"),
        "tokenizers other than `tokenizer.json` files of the tokenizers library",
        "Give that file with --tokenizer, or tokenized data with --data-path and --vocab-size.",
        "--tokenizer-type",
    ),
)

_FP8 = "models that compute in 8 or 4 bits"
_BF16 = "Leave it out; --bf16 is there."
_SCALING = "loss scaling, without which small gradients vanish in fp16"
_TOKENIZER = "Give a tokenizer.json of the tokenizers library with --tokenizer."
_MASK = "masks from token ids"
_PLAIN = "Leave it out."
_MISSING = (
    *_not_yet(
        _FP8, _BF16, 1, "--fp8-format", "--fp8", "--fp8-recipe", "--fp8-amax-history-len", "--fp8-amax-compute-algo"
    ),
    *_not_yet(_FP8, _BF16, 1, "--fp8-margin", "--fp8-interval", "--fp4-format", "--fp4-recipe"),
    *_not_yet(_FP8, _BF16, 0, "--fp8-param-gather", "--no-fp8-wgrad", "--fp8-hybrid", "--fp8-e4m3"),
    *_not_yet(_SCALING, "Use --bf16.", 0, "--fp16"),
    *_not_yet(_SCALING, "Use --bf16.", 1, "--loss-scale", "--initial-loss-scale", "--min-loss-scale", "--hysteresis"),
    *_not_yet(_SCALING, "Use --bf16.", 1, "--loss-scale-window"),
    *_not_yet("data made up on the way", "Leave it out; without data, the source of Python is read.", 0, "--mock-data"),
    *_not_yet("GPT-2's tokenizer from two files", _TOKENIZER, 1, "--vocab-file", "--merge-file"),
    *_not_yet("other files of tokenizers", _TOKENIZER, 1, "--tiktoken-pattern"),
    *_not_yet("lists of datasets in files", "Put them on the command line: --data-path.", 1, "--data-args-path"),
    *_not_yet(
        "lists of datasets in files", "Use --train-data-path and --valid-data-path.", 1, "--per-split-data-args-path"
    ),
    *_not_yet(
        "a pass over a test set", "Leave it out; the third part of --split is held out.", "any", "--test-data-path"
    ),
    *_not_yet(_MASK, _PLAIN, 0, "--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"),
    *_not_yet("batches that grow", "Use --global-batch-size alone.", "any", "--rampup-batch-size"),
    *_not_yet("schedules in samples", "Use --lr-decay-iters.", 1, "--lr-decay-samples", "--lr-wsd-decay-samples"),
    *_not_yet("schedules in samples", "Use --lr-warmup-iters or --lr-warmup-fraction.", 1, "--lr-warmup-samples"),
    *_not_yet("the schedule WSD", "Use --lr-decay-style.", 1, "--lr-wsd-decay-style", "--lr-wsd-decay-iters"),
    *_not_yet("a weight decay that changes in the run", _PLAIN, 1, "--start-weight-decay", "--end-weight-decay"),
    *_not_yet("other rates for embeddings", _PLAIN, 1, "--decoupled-lr", "--decoupled-min-lr"),
    *_not_yet("norms of weights off by one", _PLAIN, 0, "--apply-layernorm-1p"),
    *_not_yet("norms of queries and keys", _PLAIN, 0, "--qk-layernorm"),
    *_not_yet("another activation", "Use --swiglu, --openai-gelu or GELU.", 0, "--squared-relu", "--quick-geglu"),
    *_not_yet("attention scores scaled by layer", _PLAIN, 0, "--apply-query-key-layer-scaling"),
    *_not_yet("a window of attention", _PLAIN, "any", "--window-size"),
    *_not_yet("scaled rotary frequencies", _PLAIN, 0, "--use-rope-scaling"),
    *_not_yet("a softmax over all experts", "Leave it out: it is over the chosen ones.", 0, "--moe-router-pre-softmax"),
    *_not_yet("experts that refuse tokens", "Leave it out; no token is dropped.", 1, "--moe-expert-capacity-factor"),
    *_not_yet("experts that refuse tokens", "Leave it out; no token is dropped.", 1, "--moe-token-drop-policy"),
    *_not_yet("experts that refuse tokens", "Leave it out.", 0, "--moe-pad-expert-input-to-capacity"),
    *_not_yet("a loss on the router's logits", _PLAIN, 1, "--moe-z-loss-coeff", "--moe-input-jitter-eps"),
    *_not_yet("CUDA graphs", _PLAIN, 0, "--external-cuda-graph", "--enable-cuda-graph"),
    *_not_yet("CUDA graphs", _PLAIN, "any", "--cuda-graph-scope", "--cuda-graph-modules"),
    *_not_yet("FSDP", _PLAIN, 0, "--use-megatron-fsdp", "--use-custom-fsdp"),
    *_not_yet("parts of a checkpoint", "Copy the run folder.", 0, "--no-load-optim", "--no-load-rng", "--finetune"),
    *_not_yet("parts of a checkpoint", "Leave it out.", 0, "--no-save-optim", "--no-save-rng"),
    *_not_yet(
        "an end by the clock", "Stop it with Ctrl-C; --resume goes on.", 1, "--exit-duration-in-mins", "--exit-interval"
    ),
    *_not_yet(
        "Weights & Biases", "Use --tensorboard-dir.", 1, "--wandb-project", "--wandb-exp-name", "--wandb-save-dir"
    ),
)

FOREIGN_FLAGS: dict[str, ForeignFlag] = {flag.name: flag for flag in (*_NO_EFFECT, *_FIXED, *_MISSING)}

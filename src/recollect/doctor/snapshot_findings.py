"""What a snapshot of device memory shows: gaps, and what fills the device at the highest point."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from recollect.byte_format import format_bytes
from recollect.doctor.finding import Finding, Rule
from recollect.doctor.snapshot import Block, Snapshot

__all__ = ["SNAPSHOT_RULES", "findings"]

GAPS = Rule(
    name="snapshot-fragmented",
    sees="a snapshot with much memory in gaps, or whose gaps together would have held what was refused",
    problem="{unallocated} of the {reserved} that PyTorch holds are in no tensor, in {count} pieces of at most {largest}.",
    cause="Memory is fragmented: tensors of changing sizes leave gaps too small for the next ones{refused}.",
    fix=(
        "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the program starts (PYTORCH_ALLOC_CONF from "
        "PyTorch 2.9 on).",
        "If it is set already: pad batches to few lengths, and call torch.cuda.empty_cache() once after the first step.",
    ),
    source="torchtune#1185 (16.39 to 10.83 GiB), NeMo-RL#2319, SkyRL#1768",
    certainty="likely",
)
LOGITS = Rule(
    name="snapshot-logits",
    sees="a snapshot whose highest point holds much from the loss or the LM head",
    problem="Logits and loss hold {size} of {peak} at the highest point ({share}).",
    cause="They have tokens x vocabulary elements, in bf16, fp32, and as a gradient. Recomputing layers does not change that.",
    fix=(
        "Compute head and loss in chunks: recollect plan --hf-config config.json --fake --dtype bf16 --loss-chunks auto "
        "--memory-budget 80%",
        "In a loop of your own: recollect.chunked_cross_entropy, or a fused loss (Liger).",
    ),
    source="NVIDIA-NeMo/Automodel#3907, pytorch/torchtitan#996 (7 GiB)",
    certainty="likely",
)
OPTIMIZER = Rule(
    name="snapshot-optimizer",
    sees="a snapshot whose highest point holds much that the optimizer allocated",
    problem="The optimizer holds {size} of {peak} at the highest point ({share}).",
    cause="Adam keeps two moments a parameter, and its foreach implementation needs temporaries as large as all parameters.",
    fix=(
        "Shard the state (ZeRO, FSDP, --use-distributed-optimizer), offload it, or use an 8-bit optimizer; fused=True needs "
        "no temporaries.",
        "Recompute cannot make it smaller.",
    ),
    source="Megatron Bridge, performance guide; verl-project/verl#3124",
    certainty="likely",
)
REGION = Rule(
    name="snapshot-recompute",
    sees="a snapshot whose highest point holds much that was allocated while a checkpointed region ran again",
    problem="A region that is run again in backward holds {size} of {peak} at the highest point ({share}).",
    cause="All activations of one region come back at once. A region of many layers saves little or nothing.",
    fix=(
        "Make regions smaller: one layer each, or modules inside layers.",
        'Let a budget decide value by value: recollect.attach(model, optimizer, budget="80%").',
    ),
    source="pytorch/pytorch#147449, #77284; NVIDIA/Megatron-LM#1300",
    certainty="likely",
)
ACTIVATIONS = Rule(
    name="snapshot-activations",
    sees="a snapshot whose highest point holds much from forward",
    problem="Activations of forward hold {size} of {peak} at the highest point ({share}).",
    cause="Forward keeps them for backward. That is what recompute can make smaller; the largest: {largest}.",
    fix=(
        'recollect.attach(model, optimizer, budget="80%") keeps what is dear to compute, and recomputes the rest.',
        "Or see first what that costs: recollect frontier --hf-config config.json --fake --dtype bf16",
    ),
    source="the snapshot itself",
    certainty="possible",
)
NO_STACKS = Rule(
    name="snapshot-without-stacks",
    sees="a snapshot without stacks",
    problem="The snapshot does not say who allocated what: {size} of {peak} have no stack.",
    cause="It was taken without recording.",
    fix=(
        "Call torch.cuda.memory._record_memory_history() before the steps, and torch.cuda.memory._dump_snapshot(path) after.",
    ),
    source="https://pytorch.org/docs/stable/torch_cuda_memory.html",
    certainty="possible",
)
SNAPSHOT_RULES = (GAPS, LOGITS, OPTIMIZER, REGION, ACTIVATIONS, NO_STACKS)

_GAPS_MATTER = 0.15  # of what is reserved
_SHARE_MATTERS = {LOGITS: 0.2, OPTIMIZER: 0.3, REGION: 0.3, ACTIVATIONS: 0.3, NO_STACKS: 0.5}
_LOSS = re.compile(r"cross_entropy|log_softmax|loss_utils\.py|ForCausalLMLoss|lm_head|compute_log_probs|output_layer")
_STEP = re.compile(
    r"torch/optim/(?!lr_scheduler)|_init_group|initialize_optimizer_states|bitsandbytes/optim|deepspeed/ops/adam"
)
_AGAIN = re.compile(r"(?:utils/checkpoint|tensor_parallel/random)\.py:\d+:(?:recompute_fn|unpack_hook|backward)$")
_BACKWARD = re.compile(r"run_backward|:backward$")
_FORWARD = re.compile(r":(?:forward|forward_with_checkpointing)$")
_OWN = re.compile(r"^none:|(?:^|/)torch/|\?\?:|\.cpp:|\.h:")


def findings(snapshot: Snapshot) -> Iterator[Finding]:
    """Yield what a snapshot shows, gaps first."""
    if (gaps := _gaps(snapshot)) is not None:
        yield gaps
    total = snapshot.peak_bytes
    if not total:
        return
    groups: dict[Rule, list[Block]] = {}
    for block in snapshot.peak:
        if (rule := _kind(block.stack)) is not None:
            groups.setdefault(rule, []).append(block)
    sizes = {rule: sum(block.size_bytes for block in blocks) for rule, blocks in groups.items()}
    for rule in sorted(groups, key=lambda rule: -sizes[rule]):
        if sizes[rule] < _SHARE_MATTERS[rule] * total:
            continue
        share = f"{sizes[rule] / total:.0%}"
        largest = max(groups[rule], key=lambda block: block.size_bytes)
        where = _caller(largest) or "no stack"
        yield rule.finding(
            f"{snapshot.place}: {format_bytes(sizes[rule])} in {len(groups[rule])} blocks; the largest, "
            f"{format_bytes(largest.size_bytes)}, from {where}",
            size=format_bytes(sizes[rule]),
            peak=format_bytes(total),
            share=share,
            largest=f"{format_bytes(largest.size_bytes)} from {where}",
        )


def _gaps(snapshot: Snapshot) -> Finding | None:
    if not snapshot.free_blocks_bytes or not snapshot.reserved_bytes:
        return None
    refused = snapshot.refused_bytes
    would_fit = refused is not None and refused <= snapshot.unallocated_bytes + (snapshot.device_free_bytes or 0)
    if not would_fit and (refused is not None or snapshot.unallocated_bytes < _GAPS_MATTER * snapshot.reserved_bytes):
        return None
    largest = snapshot.free_blocks_bytes[0]
    text = format_bytes(refused or 0)
    told = f"; {text} were refused" if refused is not None else ""
    grow = {True: "expandable segments are on", False: "expandable segments are off", None: "segments of unknown kind"}
    return GAPS.finding(
        f"{snapshot.place}: reserved {format_bytes(snapshot.reserved_bytes)}, in no tensor "
        f"{format_bytes(snapshot.unallocated_bytes)}{told}; {grow[snapshot.is_expandable]}",
        certainty="likely" if would_fit else "possible",
        unallocated=format_bytes(snapshot.unallocated_bytes),
        reserved=format_bytes(snapshot.reserved_bytes),
        count=len(snapshot.free_blocks_bytes),
        largest=format_bytes(largest),
        refused=f". {text} were refused, which the gaps together would have held" if would_fit else "",
    )


@lru_cache(maxsize=4096)  # a training step allocates from few places again and again
def _kind(stack: tuple[str, ...]) -> Rule | None:
    if not stack:
        return NO_STACKS
    for rule, pattern in ((OPTIMIZER, _STEP), (LOGITS, _LOSS), (REGION, _AGAIN)):
        if any(pattern.search(frame) for frame in stack):
            return rule
    is_backward = any(_BACKWARD.search(frame) for frame in stack)
    return ACTIVATIONS if not is_backward and any(_FORWARD.search(frame) for frame in stack) else None


def _caller(block: Block) -> str:
    """Return the innermost frame outside PyTorch."""
    return next((frame for frame in block.stack if not _OWN.search(frame)), block.stack[0] if block.stack else "")

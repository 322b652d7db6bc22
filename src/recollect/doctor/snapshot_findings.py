"""What a snapshot of device memory shows: gaps, and what fills the device at the highest point."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from recollect.byte_format import format_bytes
from recollect.doctor.rule import RULES, Finding
from recollect.doctor.snapshot import Block, Snapshot

_GAPS_MATTER = 0.15  # of what is reserved
_SHARE_MATTERS = 0.3  # of the peak, but for these:
_OTHER_SHARES = {"snapshot-logits": 0.2, "snapshot-without-stacks": 0.5}
_PLACES = {
    "snapshot-optimizer": re.compile(
        r"torch/optim/(?!lr_scheduler)|_init_group|initialize_optimizer_states|bitsandbytes/optim|deepspeed/ops/adam"
    ),
    "snapshot-logits": re.compile(
        r"cross_entropy|log_softmax|loss_utils\.py|ForCausalLMLoss|lm_head|compute_log_probs|output_layer"
    ),
    "snapshot-recompute": re.compile(
        r"(?:utils/checkpoint|tensor_parallel/random)\.py:\d+:(?:recompute_fn|unpack_hook|backward)$"
    ),
}
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
    groups: dict[str, list[Block]] = {}
    for block in snapshot.peak:
        if (name := _kind(block.stack)) is not None:
            groups.setdefault(name, []).append(block)
    sizes = {name: sum(block.size_bytes for block in blocks) for name, blocks in groups.items()}
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if size < _OTHER_SHARES.get(name, _SHARE_MATTERS) * total:
            continue
        largest = max(groups[name], key=lambda block: block.size_bytes)
        where = _caller(largest) or "no stack"
        yield RULES[name].finding(
            f"{snapshot.place}: {format_bytes(size)} in {len(groups[name])} blocks; the largest, "
            f"{format_bytes(largest.size_bytes)}, from {where}",
            size=format_bytes(size),
            peak=format_bytes(total),
            share=f"{size / total:.0%}",
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
    return RULES["snapshot-fragmented"].finding(
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
def _kind(stack: tuple[str, ...]) -> str | None:
    if not stack:
        return "snapshot-without-stacks"
    for name, pattern in _PLACES.items():
        if any(pattern.search(frame) for frame in stack):
            return name
    is_backward = any(_BACKWARD.search(frame) for frame in stack)
    return "snapshot-activations" if not is_backward and any(_FORWARD.search(frame) for frame in stack) else None


def _caller(block: Block) -> str:
    """Return the innermost frame outside PyTorch."""
    return next((frame for frame in block.stack if not _OWN.search(frame)), block.stack[0] if block.stack else "")

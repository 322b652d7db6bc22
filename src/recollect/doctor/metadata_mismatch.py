"""CheckpointError "have different metadata": which of its causes, by the shapes and types that it lists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from recollect.doctor.finding import Finding, Rule
from recollect.doctor.passage import Passage

__all__ = ["METADATA_RULES", "findings", "is_mismatch"]

_HF_KWARGS = 'gradient_checkpointing_kwargs={{"use_reentrant": True}}'

ZERO3 = Rule(
    name="metadata-zero3",
    sees='"different metadata", with a recomputed shape of [0]',
    problem="Weights were empty when a layer ran again: saved {saved}, recomputed {recomputed}.",
    cause="ZeRO-3 gives each weight back after use, and does not gather frozen ones (LoRA) again for the recompute.",
    fix=(
        "Update DeepSpeed to a version with #8148.",
        f"Until then: {_HF_KWARGS} and model.enable_input_require_grads().",
        "Or ZeRO-2, whose weights stay.",
    ),
    source="huggingface/transformers#47254, deepspeedai/DeepSpeed#8130, #8148, huggingface/trl#2514",
    certainty="likely",
)
CACHE = Rule(
    name="metadata-cache",
    sees='"different metadata", with one dimension that has grown',
    problem="A layer ran again with more than it had the first time: saved {saved}, recomputed {recomputed}.",
    cause="It changes state each time it runs, and checkpointing runs its Python twice: a cache of keys and values "
    "(use_cache=True), or a list that is appended to.",
    fix=(
        "Switch the cache off while training: model.config.use_cache = False.",
        "Move other changes of state out of the layer, or skip them when it runs again.",
        'recollect runs ops again, not Python: recollect.attach(model, optimizer, budget="80%").',
    ),
    source="NVIDIA-NeMo/Automodel#3247; reproduced with transformers' Llama under torch.utils.checkpoint",
    certainty="likely",
)
ROUTING = Rule(
    name="metadata-routing",
    sees='"different metadata", with counts of rows that drift',
    problem="A layer ran again with other numbers of rows: saved {saved}, recomputed {recomputed}.",
    cause="Rows that move between tensors are tokens that a router sends to other experts the second time: tiny numeric "
    "differences change which expert wins.",
    fix=(
        "Save the router's output and aten.topk, or keep the router out (ignore_router_for_ac=True in Automodel).",
        "In Megatron: --moe-enable-routing-replay, which records the choice.",
        f"Or the reentrant implementation, which does not compare (and may be slightly wrong): {_HF_KWARGS}.",
        'recollect keeps what a choice depends on: recollect.attach(model, optimizer, budget="80%").',
    ),
    source="NVIDIA-NeMo/Automodel#2635, #3140, #3325; pytorch/torchtitan#1117; huggingface/transformers#47467",
    certainty="likely",
)
DTYPE = Rule(
    name="metadata-dtype",
    sees='"different metadata", with another dtype',
    problem="A layer ran again in another precision: saved {saved}, recomputed {recomputed}.",
    cause="Mixed precision differs in backward: autocast entered by hand inside the layer or around forward only, or FSDP's "
    "mixed precision that casts outside the region.",
    fix=(
        "Enter autocast outside the checkpointed region and leave it after backward's recompute, or cast inside the region.",
        "With FSDP: checkpoint inside the wrapped unit.",
    ),
    source="huggingface/transformers#34928, Lightning-AI/pytorch-lightning#19267",
    certainty="likely",
)
OTHER = Rule(
    name="metadata-other",
    sees='"different metadata", otherwise',
    problem="A checkpointed region made other tensors when it ran again{pair}.",
    cause="It is not a function of its inputs: it draws random numbers, branches on data or state, or computes in tensor "
    "parallel shapes that differ in backward.",
    fix=(
        "Run once with torch.utils.checkpoint.set_checkpoint_debug_enabled(True): it prints the ops of both runs.",
        "Make the region depend on its inputs only.",
        'recollect runs ops again, not Python: recollect.attach(model, optimizer, budget="80%").',
    ),
    source="torch/utils/checkpoint.py",
    certainty="possible",
)
METADATA_RULES = (ZERO3, CACHE, ROUTING, DTYPE, OTHER)

_MESSAGE = "have different metadata than during the forward pass"
_METADATA = re.compile(r"(saved|recomputed) metadata: \{'shape': torch\.Size\(\[([\d, ]*)\]\), 'dtype': torch\.(\w+)")
_EXPERTS = re.compile(
    r"\bmoe|\bexpert|router|row_id_map|num_local_experts|mixtral|deepseek_?v|token_dispatch", re.IGNORECASE
)
_Tensor = tuple[tuple[int, ...], str]


def is_mismatch(line: str) -> bool:
    """Return whether a line is the error's first."""
    return _MESSAGE in line


def findings(passage: Passage) -> Iterator[Finding]:
    """Yield the cause of an error whose first line is the passage's.

    Args:
        passage: with the lines after it, where the tensors are.

    Yields:
        One finding.
    """
    pairs = _pairs(passage)
    for rule in (ZERO3, DTYPE, ROUTING, CACHE):
        for saved, recomputed in pairs:
            if _fits(rule, saved, recomputed, passage):
                shown: dict[str, Any] = {"saved": _text(saved), "recomputed": _text(recomputed)}
                yield rule.finding(
                    passage.quoted(), f"saved {shown['saved']}, recomputed {shown['recomputed']}", **shown
                )
                return
    pair = f": saved {_text(pairs[0][0])}, recomputed {_text(pairs[0][1])}" if pairs else ""
    yield OTHER.finding(passage.quoted(), pair=pair)


def _pairs(passage: Passage) -> list[tuple[_Tensor, _Tensor]]:
    found: list[tuple[str, _Tensor]] = []
    for line in (passage.line, *passage.after):
        for kind, shape, dtype in _METADATA.findall(line):
            found.append((kind, (tuple(int(size) for size in shape.split(",") if size.strip()), dtype)))
    return [
        (first, second)
        for (kind, first), (next_kind, second) in zip(found, found[1:], strict=False)
        if (kind, next_kind) == ("saved", "recomputed")
    ]


def _fits(rule: Rule, saved: _Tensor, recomputed: _Tensor, passage: Passage) -> bool:
    (old, old_dtype), (new, new_dtype) = saved, recomputed
    changed = [i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b] if len(old) == len(new) else []
    if rule is ZERO3:
        return new == (0,) and old != (0,)
    if rule is DTYPE:
        return old == new and old_dtype != new_dtype
    if rule is ROUTING:
        # A cache grows a sequence to twice its length; tokens that move change the first dimension by little.
        is_drift = changed == [0] and 2 / 3 < (new[0] + 1) / (old[0] + 1) < 1.5
        return is_drift or (bool(changed) and bool(_EXPERTS.search(passage.text)))
    return len(changed) == 1 and new[changed[0]] > old[changed[0]]


def _text(tensor: _Tensor) -> str:
    return f"{list(tensor[0])} {tensor[1]}"

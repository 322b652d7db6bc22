"""CheckpointError "have different metadata": which of its causes, by the shapes and types that it lists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from recollect.doctor.passage import Passage
from recollect.doctor.rule import RULES, Finding

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
    for name in ("metadata-zero3", "metadata-dtype", "metadata-routing", "metadata-cache"):
        for saved, recomputed in pairs:
            if _fits(name, saved, recomputed, passage):
                shown: dict[str, Any] = {"saved": _text(saved), "recomputed": _text(recomputed)}
                yield RULES[name].finding(
                    passage.quoted(), f"saved {shown['saved']}, recomputed {shown['recomputed']}", **shown
                )
                return
    pair = f": saved {_text(pairs[0][0])}, recomputed {_text(pairs[0][1])}" if pairs else ""
    yield RULES["metadata-other"].finding(passage.quoted(), pair=pair)


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


def _fits(name: str, saved: _Tensor, recomputed: _Tensor, passage: Passage) -> bool:
    (old, old_dtype), (new, new_dtype) = saved, recomputed
    changed = [i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b] if len(old) == len(new) else []
    if name == "metadata-zero3":
        return new == (0,) and old != (0,)
    if name == "metadata-dtype":
        return old == new and old_dtype != new_dtype
    if name == "metadata-routing":
        # A cache grows a sequence to twice its length; tokens that move change the first dimension by little.
        is_drift = changed == [0] and 2 / 3 < (new[0] + 1) / (old[0] + 1) < 1.5
        return is_drift or (bool(changed) and bool(_EXPERTS.search(passage.text)))
    return len(changed) == 1 and new[changed[0]] > old[changed[0]]


def _text(tensor: _Tensor) -> str:
    return f"{list(tensor[0])} {tensor[1]}"

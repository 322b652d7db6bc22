"""The tables of docs/doctor.md, from the rules themselves: `python -m recollect.doctor.table` prints them."""

from __future__ import annotations

from recollect.doctor.finding import Rule
from recollect.doctor.hugging_face_settings import HUGGING_FACE_RULES
from recollect.doctor.metadata_mismatch import METADATA_RULES
from recollect.doctor.out_of_memory import MEMORY_RULES
from recollect.doctor.rules_checkpoint import CHECKPOINT_RULES
from recollect.doctor.rules_libraries import LIBRARY_RULES
from recollect.doctor.rules_megatron import MEGATRON_TEXT_RULES
from recollect.doctor.settings_rules import MEGATRON_RULES
from recollect.doctor.snapshot_findings import SNAPSHOT_RULES
from recollect.doctor.torchtitan_settings import TORCHTITAN_RULES
from recollect.doctor.training_log import LOG_RULES
from recollect.integrations.megatron.rules import RULES as CLASHES

__all__ = ["NUM_RULES", "TOPICS", "rules_table"]

TOPICS: dict[str, tuple[Rule, ...]] = {
    "Out of memory": (*MEMORY_RULES, *LOG_RULES),
    "Memory snapshots": SNAPSHOT_RULES,
    "Checkpointing, autograd and DDP": (*METADATA_RULES, *CHECKPOINT_RULES),
    "transformers, FSDP, DeepSpeed, torchtitan and offload": (*LIBRARY_RULES, *HUGGING_FACE_RULES, *TORCHTITAN_RULES),
    "Megatron's errors": MEGATRON_TEXT_RULES,
    "Megatron's settings": MEGATRON_RULES,
}
NUM_CLASHES = sum(rule.is_checked for rule in CLASHES)
NUM_RULES = sum(map(len, TOPICS.values())) + NUM_CLASHES


def rules_table() -> str:
    """Return a table for each topic, with a row for each rule.

    Returns:
        Markdown.

    Example:
        >>> rules_table().splitlines()[0]
        '### Out of memory'
    """
    parts = []
    for topic, rules in TOPICS.items():
        lines = [f"### {topic}", "", "| rule | goes by | first thing to do | known from |", "|---|---|---|---|"]
        for rule in rules:
            fix = rule.fix[0].replace("{{", "{").replace("}}", "}").replace("|", "\\|")
            lines.append(f"| `{rule.name}` | {rule.sees.replace('|', chr(92) + '|')} | {fix} | {rule.source} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(rules_table())

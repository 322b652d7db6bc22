"""Command lines of `pretrain_gpt` as guides print them, and the same for `recollect train`."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

# Every command line and every fragment of one in the guides that the project follows, in their order, each once. `commands_in`
# wrote them; `RECOLLECT_GUIDES=folder pytest tests/unit/cli/test_recompute_flags.py` says whether a folder of guides has more.
DOCUMENTED = (Path(__file__).parent / "documented_commands.txt").read_text().splitlines()


def commands_in(guide: str) -> Iterator[str]:
    """Yield the flags of each command line in a guide, without the program, comments and what `...` stands for."""
    waiting: list[str] = []
    for raw in guide.splitlines():
        line = re.sub(r"(^|\s)#(\s.*)?$", "", raw.strip()).strip() if waiting or "--" in raw else raw.strip()
        is_open = line.endswith("\\") or (bool(waiting) and not line)  # a comment in the middle
        line = line.removesuffix("\\").strip()
        if line.startswith("```"):
            yield from _flags(waiting)
            waiting = []
        elif waiting or re.match(r"--\w|python ", line):
            waiting += [word for word in line.split() if word != "..."]
            if not is_open:
                yield from _flags(waiting)
                waiting = []
        else:
            for code in re.findall(r"`(--\w[\w-]* [^`]+)`", line):  # a flag with a value
                yield from _flags(code.split())
    yield from _flags(waiting)


def _flags(words: list[str]) -> Iterator[str]:
    start = next((number for number, word in enumerate(words) if word.startswith("--")), None)
    if start is not None:
        yield shlex.join(words[start:])

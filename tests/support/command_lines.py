"""Command lines of `pretrain_gpt` as guides print them, and the same for `recollect train`."""

from pathlib import Path

# Every command line and every fragment of one in the guides that the project follows, in their order, each once.
DOCUMENTED = (Path(__file__).parent / "documented_commands.txt").read_text().splitlines()

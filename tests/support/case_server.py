"""The side of a program whose cases tests ask for, one after the other; `asked_cases.py` is the side of the tests."""

import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import short_searches
from set_aside import has_loaded_libraries, set_aside


def join(num_ranks: int) -> int:
    """Join those that run this program, too, over gloo; the program's words are the rank, which is returned, and a folder."""
    rank, folder = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    return rank


def save_and_exit(found: dict[str, Any]) -> None:
    """End a process that has joined others, whose words are the rank and a folder."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    rank, folder = sys.argv[1:]
    torch.save(found, f"{folder}/rank{rank}")
    os._exit(0)


def serve(run: Callable[[str], dict[str, Any]], *, searches_are_short: bool = True) -> None:
    """Run each case whose name comes on standard input, write a line of JSON for it, and end with the input.

    Args:
        run: returns what a case found; what it raises is written as its error.
        searches_are_short: searches for plans try fewer options.
    """
    if searches_are_short:
        short_searches.switch_on()
    for line in sys.stdin:
        name = line.rstrip("\n")
        if has_loaded_libraries():
            set_aside()
        try:
            row = run(name)
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"case": name, **row}), flush=True)
    sys.stderr.flush()
    # A process group's threads may hang at the end.
    os._exit(0)

"""What each process does in `test_lost_processes.py`, as a program: lost_ranks.py CASE, with the variables of torchrun.

The first waits where no error of another process reaches it, as on CUDA, where Python waits for the device; the second ends.
In the cases of `FIRST_ENDS` it is the first that ends, which holds the store at which they met.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from recollect._torch_parallel import meeting_place
from recollect.lab.train import lost_processes
from recollect.lab.train.lost_processes import LastWords, named_errors
from recollect.ranks.group import Ranks, group_of

FIRST_ENDS = ("first fails", "first gone", "first done")


def end(case: str) -> None:
    if case == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "fails":
        try:
            raise MemoryError("no 2 GiB left")
        except MemoryError as error:
            # As PyTorch's pipelines do.
            raise RuntimeError("[Stage 1] failed to run forward") from error
    if case == "first fails":
        raise ValueError("no such layer")
    if case == "first gone":
        meeting_place().wait(["other is there"], timedelta(seconds=600))
        os._exit(0)


def go_on(case: str, ranks: Ranks) -> None:
    """Go on as the process that does not end first."""
    if case == "done":
        # The watch has looked several times since.
        time.sleep(4)
        assert not LastWords("recollect/run/0", ranks).is_alarm(meeting_place())
    elif case in ("first gone", "first done"):
        meeting_place().set("other is there", "")
        time.sleep(4)
        if case == "first gone":
            raise ValueError("the same as in the first")
    else:
        with suppress(dist.DistError):
            meeting_place().clone().wait(["never"], timedelta(seconds=120))
        # As if it waited for the device.
        time.sleep(120)


def main() -> None:
    case = sys.argv[1]
    if case != "killed":  # whose note never comes; the others come, however busy the machine is
        lost_processes._ANSWER_S = 60
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    ranks = group_of(range(2), "test")
    if case == "first done" and dist.get_rank():
        # The first one leaves the block before this one enters it.
        time.sleep(2)
    with named_errors(ranks):
        if dist.get_rank() == (case not in FIRST_ENDS):
            end(case)
        else:
            go_on(case, ranks)
    print("went on", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()

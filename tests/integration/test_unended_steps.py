"""A process or a thread that ends while `attach` records or measures a step, before the optimizer's, ends as without."""

import signal
import subprocess
import sys
import textwrap

import pytest

from tiers import long

PROGRAM = """
import os, sys, threading, time
import torch
from torch import nn
import recollect

class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("in backward")

def begin(measure=False):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)])
    optimizer = torch.optim.AdamW(model.parameters())
    attached = recollect.attach(model, optimizer, "95%", measure=measure, log=lambda line: None)
    if measure:
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    return model, optimizer, attached, model(torch.randn(4, 8)).square().mean()

"""
ENDS = {
    "end": ("begin()", 0, ""),
    "end after backward": ("begin()[3].backward()", 0, ""),
    "exception": ("begin(); raise ValueError('between')", 1, "ValueError: between\n"),
    "exit": ("begin(); sys.exit(3)", 3, ""),
    "exit after backward": ("begin()[3].backward(); sys.exit(4)", 4, ""),
    "exception in backward": ("Fails.apply(begin()[3]).backward()", 1, "ValueError: in backward\n"),
    # Python raises the signal again when it has finished.
    "exception, measured": ("begin(True); raise ValueError('between')", 1, "ValueError: between\n"),
    "exception in backward, measured": ("Fails.apply(begin(True)[3]).backward()", 1, "ValueError: in backward\n"),
    "end, measured": ("begin(True)", 0, ""),
    # Kineto's thread is not there in a process that was forked.
    "exit of a forked process": (
        "begin(True)[3].backward(); time.sleep(1); os.fork() or sys.exit(3); sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))",
        3,
        "",
    ),
    "interrupt": ("begin(); raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
}
# An exception in backward: see the thread below.
QUICK = ("end", "exception, measured", "exit of a forked process")


def ended(text: str) -> tuple[int, str, str]:
    # A process of its own: what a fork ends with leaves out what crashes.
    program = [sys.executable, "-c", PROGRAM + textwrap.dedent(text)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=600, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "body, status, last",
    [pytest.param(*how, id=name, marks=() if name in QUICK else pytest.mark.long) for name, how in ENDS.items()],
)
def test_a_process_ends_with_its_own_status(body: str, status: int, last: str) -> None:
    found, _, errors = ended(body)
    assert found == status, errors
    assert errors.endswith(last)
    assert last or not errors, errors


@pytest.mark.parametrize("how", [*long(["end", "end, measured"]), "exception in backward, measured"])
def test_a_thread_ends_and_the_process_after_it(how: str) -> None:
    body, _, last = ENDS[how]
    text = f"""
    def run():
        {body}

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    print("after")
    sys.exit(5)
    """
    found, printed, errors = ended(text)
    assert (found, printed) == (5, "after\n"), errors
    assert last in errors


@pytest.mark.long
def test_a_process_ends_beside_a_thread_that_waits_in_its_step() -> None:
    text = """
    begun = threading.Event()

    def run():
        begin()
        begun.set()
        time.sleep(600)

    threading.Thread(target=run, daemon=True).start()
    begun.wait()
    sys.exit(5)
    """
    found, _, errors = ended(text)
    assert found == 5, errors


def test_another_thread_goes_on_with_the_model() -> None:
    text = """
    begun = []
    thread = threading.Thread(target=lambda: begun.append(begin()))
    thread.start()
    thread.join()
    model, optimizer, attached, _ = begun.pop()
    for _ in range(3):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(attached.recorded_steps, attached.plan.budget_bytes >= attached.plan.predicted_peak_bytes)
    """
    found, printed, errors = ended(text)
    assert (found, printed) == (0, "[0] True\n"), errors

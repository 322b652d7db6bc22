"""The line of progress: on a real terminal it appears after two seconds, elsewhere another one follows every ten."""

import io
import os
import pty
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import pytest

from recollect.progress import stage

CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|[━╺╸]")

# For programs whose line may come sooner, so that nobody waits for it.
SOON = """
import sys, recollect.progress
recollect.progress._DELAY_S = 0.2
recollect.progress._EVERY_S = 0.3
"""
STAGES = """
import sys, time
from recollect.progress import stage
print("begun", flush=True)
with stage("outer"):
    time.sleep({outer_s})
    print("printed", file=sys.stderr)
    with stage("parts", total=3) as done:
        for _ in range(2):
            done()
            time.sleep(0.02)
"""
FIT = """
import time, torch, recollect

class Slow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4))
    def forward(self, x):
        time.sleep(0.5)
        for layer in self.layers:
            x = x + layer(x)
        return x.sum()

model, batch = Slow(), torch.randn(64, 64)
recollect.fit(model, batch, "90%")
"""
FRONTIER = """
import time, torch, recollect
from recollect.progress import stage

model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)))
profile = recollect.record(model, torch.randn(64, 64), loss_fn=torch.sum, fake=True)
with stage("waiting"):
    time.sleep(0.5)
    recollect.frontier(profile)
"""
LARGEST = """
import time
from recollect.planning.batch_search import search_batches

def record(size):
    time.sleep(0.5)
    raise KeyboardInterrupt

search_batches(record, "1GiB")
"""
VERIFY = """
import time, torch, recollect
from recollect.progress import stage

model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)))
batch = torch.randn(64, 64)
plan = recollect.classic_plan(recollect.record(model, batch, loss_fn=torch.sum, fake=True), "full")
with stage("waiting"):
    time.sleep(0.5)
    for compare in ("step", "units"):
        recollect.verify(model, batch, plan, loss_fn=torch.sum, compare=compare)
"""
ATTACH = """
import time, torch, recollect

recollect.progress._DELAY_S = 0.02
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(12)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with recollect.attach(model, optimizer, "95%"):
    time.sleep(0.5)
    model(torch.randn(64, 64)).sum().backward()
    optimizer.step()
"""
PROGRAMS = {"fit": FIT, "frontier": FRONTIER, "verify": VERIFY, "attach": ATTACH}
# One after the other in a process, as it takes longer to import PyTorch.
TOGETHER = f"""
for name, program in {PROGRAMS}.items():
    print("\\n==", name, file=sys.stderr)
    exec(program, {{"__name__": name}})
"""


@dataclass
class Shown:
    """What a program wrote to its terminal, and to other places."""

    text: str
    stdout: str
    status: int


def known_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("RECOLLECT_PROGRESS", "RANK")}


def run(program: str, *, stays: bool = True, **environment: str) -> Shown:
    """Run a program with standard error on a terminal; unless it `stays`, that is gone after a second."""
    outside, inside = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=inside,
        text=True,
        env={**known_variables(), "TERM": "xterm", **environment},
    )
    os.close(inside)
    pieces: list[str] = []
    if stays:
        while piece := _read(outside):
            pieces.append(CONTROL.sub("", piece))
    else:
        process.stdout.readline()
        time.sleep(1.0)
    os.close(outside)
    stdout, _ = process.communicate()
    return Shown("".join(pieces), stdout, process.returncode)


def _read(terminal: int) -> str:
    try:
        return os.read(terminal, 65536).decode()
    except OSError:  # How Linux says that nobody has the other end open.
        return ""


def test_the_line_appears_after_two_seconds_and_goes() -> None:
    shown = run(STAGES.format(outer_s=4.0))
    first = re.search(r"recollect: outer +(\d+) s", shown.text)
    assert first and int(first[1]) >= 2
    assert re.search(r"recollect: parts +0/3 +\d+ s", shown.text)
    assert re.search(r"recollect: parts +2/3 +about \d+ s left", shown.text)
    assert re.search(r"\rprinted\r\n", shown.text), "above the line"
    assert shown.text.endswith("\r"), "the line is empty again"
    assert (shown.status, len(shown.stdout.splitlines())) == (0, 1)


def test_short_work_shows_nothing() -> None:
    shown = run(STAGES.format(outer_s=0.5))
    assert (shown.text, shown.status) == ("printed\r\n", 0)


@pytest.mark.parametrize("switch", [{"RECOLLECT_PROGRESS": "0"}, {"RANK": "1"}], ids=str)
def test_the_line_can_be_switched_off(switch: dict[str, str]) -> None:
    assert run(SOON + STAGES.format(outer_s=0.5), **switch).text == "printed\r\n"


def to_a_pipe(program: str) -> str:
    command = [sys.executable, "-c", SOON + program]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=known_variables()).stderr


def test_lines_follow_each_other_where_there_is_no_terminal() -> None:
    first, *rest = to_a_pipe(STAGES.format(outer_s=1.0) + "    time.sleep(1.0)\n").splitlines()
    assert re.fullmatch(r"recollect: outer, \d+ s so far", first)
    after = rest[rest.index("printed") + 1 :]
    assert after and all(re.fullmatch(r"recollect: outer, \d+ s so far", line) for line in after)


def test_lines_say_how_much_is_done_and_how_long_the_rest_takes() -> None:
    program = """
import time
from recollect.progress import stage
with stage("outer", total=4) as done, stage("inner"):
    for _ in range(3):
        time.sleep(0.4)
        done()
    time.sleep(0.4)
"""
    lines = to_a_pipe(program).splitlines()
    assert re.fullmatch(r"recollect: inner, 0 of 4 done, \d+ s so far", lines[0]), lines
    assert re.fullmatch(r"recollect: inner, [123] of 4 done, \d+ s so far, about \d+ s left", lines[2]), lines


def test_the_work_goes_on_when_the_terminal_is_gone() -> None:
    program = STAGES.replace('    print("printed", file=sys.stderr)\n', "").format(outer_s=2.3)
    assert run(program, stays=False).status == 0


@pytest.fixture(scope="module")
def shown() -> dict[str, str]:
    """What each of the programs that need PyTorch wrote to its terminal."""
    ran = run(SOON + TOGETHER)
    assert ran.status == 0, ran.text
    texts = dict(text.split("\r\n", 1) for text in ran.text.split("\n== ")[1:])
    assert texts.keys() == PROGRAMS.keys()
    return texts


def test_frontier_counts_its_plans(shown: dict[str, str]) -> None:
    assert re.search(r"planning for all budgets +(\d+)/\1 ", shown["frontier"])


def test_the_search_for_the_largest_batch_says_so_and_can_be_interrupted() -> None:
    shown = run(SOON + LARGEST)
    assert "recollect: looking for the largest batch" in shown.text
    assert shown.text.rstrip().endswith("KeyboardInterrupt")


def test_verify_says_what_it_measures_and_compares(shown: dict[str, str]) -> None:
    for text in (
        r"measuring the peak +1/18",
        "verifying the plan in 12 to 18 steps",
        r"timing steps +\d+/18",
        "verifying the plan unit by unit",
        r"comparing units +4/4",
    ):
        assert re.search(f"recollect: {text}", shown["verify"]), text


def test_without_standard_error_stages_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RECOLLECT_PROGRESS", raising=False)
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed):
        monkeypatch.setattr(sys, "stderr", stream)
        before = threading.active_count()
        with stage("outer"), stage("inner", total=2) as done:
            done()
            assert threading.active_count() == before


def test_other_threads_show_nothing() -> None:
    lines = STAGES.format(outer_s=0.5).replace("\n", "\n    ")
    shown = run(f"{SOON}import threading\ndef work():{lines}\nthread = threading.Thread(target=work)\nthread.start()")
    assert shown.text == "printed\r\n"

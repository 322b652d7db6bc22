"""Run a function in a forked process: for functions that may end their process or exhaust memory."""

from __future__ import annotations

import multiprocessing
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_LIMIT_BYTES = 2**31
_LIMIT_S = 60


class ChildError(Exception):
    """The function raised an error, or its process ended; the message says which."""


def in_child(function: Callable[[], T], *, limit_bytes: int = _LIMIT_BYTES, limit_s: int = _LIMIT_S) -> T:
    """Call a function in a forked process and return its result.

    Args:
        function: whose result can be pickled.
        limit_bytes: address space that the process may take on top of what this one has.
        limit_s: seconds of processor time that it may take.

    Raises:
        ChildError: with the error's name and its text, or the signal that ended the process.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(function, sender, limit_bytes, limit_s))
    process.start()
    sender.close()
    try:
        ok, result = receiver.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        raise ChildError(f"its process ended with {ended}") from None
    process.join()
    if not ok:
        raise ChildError(result)
    return result  # type: ignore[no-any-return]


def _call(function: Callable[[], T], sender: Connection, limit_bytes: int, limit_s: int) -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    address_space_bytes = pages * resource.getpagesize() + limit_bytes
    resource.setrlimit(resource.RLIMIT_AS, (address_space_bytes, address_space_bytes))
    used_s = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
    resource.setrlimit(resource.RLIMIT_CPU, (used_s + limit_s, used_s + limit_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        sender.send((True, function()))
    except Exception as error:  # whatever it is, it is a result for the one who asked
        text = str(error).strip().splitlines()
        sender.send((False, f"{type(error).__name__}: {text[0][:160] if text else ''}"))

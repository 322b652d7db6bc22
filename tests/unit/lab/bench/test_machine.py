import os
import platform
import subprocess
import sys

import pytest

# Page faults of the second of two equal blocks, as the C library hands them out, before and after.
_FAULTS = """
import ctypes, resource
from recollect.lab.bench.race import keep_freed_memory

malloc, free = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free
malloc.argtypes, malloc.restype, free.argtypes = [ctypes.c_size_t], ctypes.c_void_p, [ctypes.c_void_p]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = malloc(64 << 20)
    ctypes.memset(block, 1, 64 << 20)
    free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
given_back = faults()
assert keep_freed_memory()
faults()
print(given_back, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="sets glibc's allocator")
def test_freed_memory_is_kept() -> None:
    # Whoever times on a CPU has set glibc's variables to the same end.
    own = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", _FAULTS], capture_output=True, text=True, check=True, env=own)
    given_back, kept = map(int, done.stdout.split())
    # 16,384 small pages or 32 large ones, against none; a few may be Python's own.
    assert given_back >= 32
    assert kept < given_back / 4

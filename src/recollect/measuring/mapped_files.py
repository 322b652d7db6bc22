"""Maps files as memory. Their pages are the operating system's to write out, as those of other memory are not."""

from __future__ import annotations

import mmap
import os
import tempfile

import torch

_CHUNK_BYTES = 1 << 20


def mapped_file(nbytes: int) -> torch.Tensor:
    """Return bytes of a temporary file that has no name, so that nothing is left of it however the process ends.

    Raises:
        OSError: there is no room for it.

    Example:
        >>> mapped_file(100).shape
        torch.Size([100])
    """
    with tempfile.TemporaryFile(prefix="recollect") as file:
        # Not with holes: a write to a page that the disk has no room for ends the process.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, nbytes)
        else:
            for begin in range(0, nbytes, _CHUNK_BYTES):
                file.write(bytes(min(_CHUNK_BYTES, nbytes - begin)))
            file.flush()
        return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)

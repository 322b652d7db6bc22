"""Windows of `seq_length + 1` tokens, from one stream of ids, packed documents or several sources; and batches of them.

Each depends only on data, seed and position, so a resumed run needs no stored state.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recollect.errors import DataError
from recollect.lab.train.documents import Tokens
from recollect.lab.train.indexed_dataset import IndexedDataset


class TokenWindows:
    """Windows of one stream of at least `seq_length + 1` ids, each once per epoch, in an order drawn from (seed, epoch).

    An incomplete last window is not used. Without a seed, for validation, they are in the order of the stream.
    """

    def __init__(self, tokens: Tokens, *, seq_length: int, seed: int | None) -> None:
        self.num_tokens = tokens.size
        self.num_windows = (tokens.size - 1) // seq_length
        self.tokens = tokens
        self._seq_length = seq_length
        # Windows are read epoch by epoch.
        self._order = lru_cache(maxsize=1)(lambda epoch: _permutation(self.num_windows, seed, epoch, 0))

    def window(self, index: int) -> NDArray[Any]:
        epoch, place = divmod(index, self.num_windows)
        start = int(self._order(epoch)[place]) * self._seq_length
        return self.tokens[start : start + self._seq_length + 1]


class PackedDocuments:
    """Documents of an indexed dataset, concatenated in an order drawn from (seed, epoch) and cut into windows.

    As in Megatron's GPT dataset, documents are shuffled, packed without padding and cut every `seq_length` tokens, and the
    windows are shuffled again. One difference: Megatron shuffles all epochs together, so its order depends on the length of the
    run; here each document comes once per epoch, and a longer run begins like a shorter one.

    `sequences` are those to use, from and to (exclusive). An incomplete last window is not used. Without a seed, for
    validation, all are in the order of the file. `num_tokens` and `num_windows` are per epoch; there may be no window.
    """

    def __init__(
        self, dataset: IndexedDataset, sequences: tuple[int, int], *, seq_length: int, seed: int | None, vocab_size: int
    ) -> None:
        first, last = sequences
        lengths = dataset.lengths[first:last].astype(np.int64)
        self.num_tokens = int(lengths.sum())
        self.num_windows = max(0, (self.num_tokens - 1) // seq_length)
        self._dataset = dataset
        self._vocab_size = vocab_size
        self._seq_length = seq_length

        def order(epoch: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
            documents = _permutation(len(lengths), seed, epoch, 1)
            return documents + first, lengths[documents].cumsum(), _permutation(self.num_windows, seed, epoch, 0)

        self._order = lru_cache(maxsize=1)(order)

    def window(self, index: int) -> NDArray[Any]:
        epoch, place = divmod(index, self.num_windows)
        documents, ends, windows = self._order(epoch)
        start = int(windows[place]) * self._seq_length
        stop = start + self._seq_length + 1
        parts = []
        number = int(np.searchsorted(ends, start, side="right"))
        while start < stop:
            document = int(documents[number])
            begin = int(ends[number]) - int(self._dataset.lengths[document])
            end = min(stop, int(ends[number]))
            parts.append(self._dataset.read(document, start - begin, end - begin))
            start = end
            number += 1
        ids = np.concatenate(parts)
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            wrong = int(ids.max() if ids.min() >= 0 else ids.min())
            raise DataError(
                f"indexed dataset {self._dataset.prefix}: got token id {wrong}, expected 0 to {self._vocab_size - 1}. "
                f"Give the --vocab-size or --tokenizer it was made with."
            )
        return ids


class BlendedWindows:
    """Windows of several sources, mixed in given proportions: the source furthest behind its share comes next.

    This is the rule of Megatron's `BlendedDataset`, which decides the first window as if it were the second.
    """

    def __init__(self, sources: Sequence[TokenWindows | PackedDocuments], weights: Sequence[float]) -> None:
        self.num_tokens = sum(source.num_tokens for source in sources)
        self.num_windows = sum(source.num_windows for source in sources)
        self._sources = sources
        self._shares = np.array(weights, np.float64) / sum(weights)
        self._taken = np.zeros(len(sources), np.int64)
        self._places: list[tuple[int, int]] = []  # source and its window; grows on demand

    def window(self, index: int) -> NDArray[Any]:
        while index >= len(self._places):
            behind = self._shares * max(len(self._places), 1) - self._taken
            source = int(behind.argmax())
            self._places.append((source, int(self._taken[source])))
            self._taken[source] += 1
        source, place = self._places[index]
        return self._sources[source].window(place)


def _permutation(count: int, seed: int | None, epoch: int, stream: int) -> NDArray[np.int64]:
    """Draw an order; `stream` makes the orders of documents and windows independent."""
    if seed is None:
        return np.arange(count)
    key = (seed, epoch, stream) if stream else (seed, epoch)
    return np.random.default_rng(key).permutation(count)


Windows: TypeAlias = TokenWindows | PackedDocuments | BlendedWindows
"""An endless sequence of windows, epoch after epoch."""


def batch_at(position: int, windows: Windows, batch_size: int) -> tuple[Tensor, Tensor]:
    """Return a batch of tokens and labels, each int64 [batch_size, seq_length]; labels are the tokens shifted by one."""
    first = position * batch_size
    rows = np.stack([windows.window(first + row) for row in range(batch_size)]).astype(np.int64)
    both = torch.from_numpy(rows)
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()

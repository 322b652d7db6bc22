"""Small indexed datasets for tests, written by recollect's writer."""

from pathlib import Path

import numpy as np

from recollect.lab.train.indexed_dataset import write_indexed_dataset


def random_documents(*, count: int, vocab_size: int = 256, longest: int = 60, seed: int = 0) -> list[np.ndarray]:
    """Documents of 0 to `longest` tokens; the next one is mostly a function of the last, so it can be learned."""
    draw = np.random.default_rng(seed)
    documents = []
    for _ in range(count):
        ids = [int(draw.integers(vocab_size))]
        for _ in range(int(draw.integers(longest))):
            ids.append((3 * ids[-1] + 1) % vocab_size if draw.random() < 0.9 else int(draw.integers(vocab_size)))
        documents.append(np.array(ids[: int(draw.integers(len(ids) + 1))]))
    return documents


def write_dataset(folder: Path, name: str = "corpus", *, count: int = 200, seed: int = 0) -> Path:
    prefix = folder / name
    write_indexed_dataset(prefix, random_documents(count=count, seed=seed), vocab_size=256)
    return prefix

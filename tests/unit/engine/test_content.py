"""Bits of tensors of every kind: floating point, complex, sparse, in wrappers."""

import pytest
import torch
from torch import Tensor

from recollect.engine.content import checksums, glance_at, has_same_bits

NAN = torch.tensor([float("nan"), 1.0])
ZERO = torch.tensor([0.0])


def test_bits_are_compared_not_values() -> None:
    assert has_same_bits(NAN, NAN.clone())
    assert has_same_bits(NAN.expand(2, 2), NAN.repeat(2, 1))
    other_nan = torch.tensor([0x7FC00001, 0x3F800000], dtype=torch.int32).view(torch.float32)
    assert bool(other_nan[0].isnan()) and not has_same_bits(NAN, other_nan)
    assert not has_same_bits(ZERO, -ZERO)
    assert not has_same_bits(ZERO, ZERO.double())
    assert not has_same_bits(ZERO, ZERO.expand(2))
    assert has_same_bits(ZERO[:0], ZERO[:0])
    assert has_same_bits(torch.zeros(4).as_strided((1,), (4,)), ZERO)


def test_sparse_tensors() -> None:
    assert has_same_bits(NAN.to_sparse(), NAN.to_sparse())
    assert not has_same_bits(NAN.to_sparse(), 2 * NAN.to_sparse())
    assert not has_same_bits(NAN.to_sparse(), NAN)
    twice = torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (3,), check_invariants=True)
    once = torch.sparse_coo_tensor([[1]], [3.0], (3,), check_invariants=True)
    assert has_same_bits(twice, once)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_compressed_sparse_tensors() -> None:
    rows = torch.eye(3).to_sparse_csr()
    assert has_same_bits(rows, rows.clone()) and not has_same_bits(rows, 2 * rows)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_tensors() -> None:
    quantized = [torch.quantize_per_tensor(NAN[1:], scale, 0, torch.qint8) for scale in (0.1, 0.1, 0.2)]
    assert has_same_bits(quantized[0], quantized[1])
    assert not has_same_bits(quantized[0], quantized[2])


@pytest.mark.filterwarnings("ignore:Sparse")
def test_glances_at_sparse_tensors_see_nothing() -> None:
    assert glance_at(NAN) is not None
    assert glance_at(torch.eye(3).to_sparse()) is None and glance_at(torch.eye(3).to_sparse_csr()) is None


def test_complex_tensors_with_a_lazy_conjugate() -> None:
    values = torch.tensor([1 + 2j, 3 - 1j])
    assert has_same_bits(values.conj().conj(), values)
    assert has_same_bits(values.conj(), values.conj().clone())
    assert not has_same_bits(values.conj(), values)


def test_jagged_tensors() -> None:
    def jagged(scale: float) -> Tensor:
        rows = [torch.ones(2, 3), scale * torch.ones(4, 3)]
        nested: Tensor = torch.nested.nested_tensor(rows, layout=torch.jagged)
        return nested

    one = jagged(1.0)
    assert has_same_bits(one, one.clone())
    assert not has_same_bits(one, one * 3)


def test_zeros_without_memory_have_no_content() -> None:
    """PyTorch's linearize makes them; a read at their address ends the process."""
    assert checksums([torch._efficientzerotensor((4,))]) == [0]

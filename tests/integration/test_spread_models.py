"""The reference models with sequences and experts split over four gloo processes: losses, gradients, plans."""

from pathlib import Path

import pytest
import torch

from asked_cases import AskedCases
from rank_processes import rank_cases
from spread_programs import CONTEXT_MODELS, CONTEXT_PLANS, EXPERT_MODELS, RANKS
from tiers import long_but

SUPPORT = Path(__file__).parents[1] / "support"
pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs PyTorch with the gloo backend")

# Sums over parts of a sequence or batch add in another order: a few units in the last place of fp32, which is 1.2e-7.
FARTHEST = 3e-6
PLANS = ("keep_all", "full", "budget")


cases = rank_cases(SUPPORT / "spread_programs.py", RANKS)


# DeepSeek has all that Mixtral has.
@pytest.mark.parametrize("model", long_but(("llama", "gpt", "deepseek"), CONTEXT_MODELS))
def test_split_sequences_give_the_gradients_of_whole_ones_and_one_loss(cases: AskedCases, model: str) -> None:
    rows = cases[f"context {model}"]
    layouts = ("2", "4", "with data", "with tensor") if model == "llama" else ("2",)
    assert max(found[layout] for found in rows for layout in layouts) <= FARTHEST
    assert len({found["loss"] for found in rows}) == 1


@pytest.mark.parametrize("model", long_but(("gpt",), CONTEXT_PLANS))
def test_plans_change_no_bit_of_split_sequences(cases: AskedCases, model: str) -> None:
    """With dropout on; collectives may run again."""
    assert [found[plan] for found in cases[f"context plans {model}"] for plan in PLANS] == [True] * 3 * RANKS


def test_sequences_that_do_not_divide_are_refused_alike_on_all_ranks(cases: AskedCases) -> None:
    assert [found["refused"] for found in cases["context llama"]] == [
        "got seq_length=6, 2 x context_parallel_size=8: 6 is not a multiple of 8. The next multiple is 8."
    ] * RANKS


@pytest.mark.parametrize("model", long_but(("deepseek", "loop"), EXPERT_MODELS))
def test_shared_experts_give_the_gradients_of_all_experts_here(cases: AskedCases, model: str) -> None:
    """Against a model on one device that runs the ranks' batches in turn; "again" is after the bias has moved."""
    more = ("again", "with data", "with data alone", "with context") if model == "deepseek" else ()
    assert max(found[case] for found in cases[f"experts {model}"] for case in (model, *more)) <= FARTHEST


def test_the_bias_counts_the_tokens_of_all_ranks(cases: AskedCases) -> None:
    assert all(found["bias"] for found in cases["experts deepseek"])


@pytest.mark.parametrize("model", long_but(("deepseek",), ("deepseek", "mixtral")))
def test_plans_change_no_bit_of_shared_experts(cases: AskedCases, model: str) -> None:
    """With dropout on, and other batches on each rank; exchanges may run again."""
    assert [found[plan] for found in cases[f"expert plans {model}"] for plan in PLANS] == [True] * 3 * RANKS


def test_experts_without_rows_have_gradients(cases: AskedCases) -> None:
    assert all(found["without rows"] for found in cases["few experts"])


def test_experts_that_do_not_divide_are_refused_alike_on_all_ranks(cases: AskedCases) -> None:
    expected = {
        "refused": "got num_moe_experts=6, expert_model_parallel_size=4: 6 is not a multiple of 4. The next multiple is 8.",
        "none": "got num_moe_experts=None, expert_model_parallel_size=4: there are no experts to share. Leave "
        "expert_model_parallel_size out, or choose a model with experts.",
        "balanced": "got balanced=True: these are real tensors, whose routes tell where rows go. Leave it out, or record on "
        "fake tensors.",
    }
    for name, message in expected.items():
        assert [found[name] for found in cases["few experts"]] == [message] * RANKS


def test_experts_are_not_shared_by_the_ranks_that_split_them(cases: AskedCases) -> None:
    for rank, found in enumerate(cases["refused"]):
        pair = [0, 1] if rank < 2 else [2, 3]
        assert found["both refused"] == (
            f"got mesh={pair}, tensor mesh={pair}: both are to share one tensor, each along its own dimension. Pass two "
            "dimensions of one mesh, which have only this rank in common."
        )


def test_experts_that_cannot_be_split_are_refused_alike_on_all_ranks(cases: AskedCases) -> None:
    assert [found["tensor refused"] for found in cases["refused"]] == [
        "got add_bias_linear=True, tensor_model_parallel_size=2: not yet: tensor parallelism of experts that have biases. "
        "Leave tensor parallelism out for this model."
    ] * RANKS

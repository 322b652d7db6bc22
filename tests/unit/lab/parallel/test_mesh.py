"""Which ranks share what, in Megatron's order, and what one of two ranks makes of its share, for both of them."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from recollect._torch_parallel import fake_process_group
from recollect.errors import ConfigError
from recollect.lab.models.gpt import IGNORE_INDEX, GPTModel
from recollect.lab.models.router import RouterStatistics, TopKRouter
from recollect.lab.models.sizes import NAMED_CONFIGS
from recollect.lab.parallel import expert, tensor_modules
from recollect.lab.parallel.context import SequencePart
from recollect.lab.parallel.expert import balance_over
from recollect.lab.parallel.layout import DeviceLayout
from recollect.lab.parallel.mesh import layout_mesh
from recollect.lab.parallel.tensor_modules import vocabulary_parallel_loss

EACH_BY_TWO = DeviceLayout(
    pipeline_model_parallel_size=2, data_parallel_size=2, context_parallel_size=2, tensor_model_parallel_size=2
)


@pytest.mark.parametrize(
    ("experts", "expert", "replicas"), [(1, [5], [1, 3, 5, 7]), (2, [5, 7], [1, 5]), (4, [1, 3, 5, 7], [5])]
)
def test_each_rank_is_in_one_group_of_each_kind(experts: int, expert: list[int], replicas: list[int]) -> None:
    layout = replace(EACH_BY_TWO, expert_model_parallel_size=experts)
    with fake_process_group(5, 16):
        mesh = layout_mesh(layout)
        found = {name: view.mesh.tolist() for name, view in vars(mesh).items()}
    assert found == {
        "pipeline": [5, 13],
        "data": [1, 5],
        "context": [5, 7],
        "tensor": [4, 5],
        "gradients": [1, 3, 5, 7],
        "expert": expert,
        "replicas": replicas,
        "sequence": [5, 7],
        "tokens": [1, 3, 5, 7],
    }


@pytest.mark.parametrize(
    ("experts", "expert", "replicas"),
    [(2, [4, 5], [1, 3, 5, 7]), (4, [4, 5, 6, 7], [1, 5]), (8, [0, 1, 2, 3, 4, 5, 6, 7], [5])],
)
def test_whole_experts_are_shared_by_the_ranks_of_tensor_parallelism_first(
    experts: int, expert: list[int], replicas: list[int]
) -> None:
    layout = replace(
        EACH_BY_TWO, sequence_parallel=True, expert_model_parallel_size=experts, expert_tensor_parallel_size=1
    )
    with fake_process_group(5, 16):
        mesh = layout_mesh(layout)
        assert mesh.expert.mesh.flatten().tolist() == expert and mesh.replicas.mesh.tolist() == replicas
        assert mesh.sequence.mesh.tolist() == [4, 5, 6, 7] and mesh.tokens.mesh.tolist() == [*range(8)]
        assert mesh.gradients.mesh.tolist() == [1, 3, 5, 7]


def test_another_number_of_processes_is_refused() -> None:
    with fake_process_group(0, 3), pytest.raises(ConfigError, match="world_size=3: the layout has 2 devices"):
        layout_mesh(DeviceLayout(data_parallel_size=2))


X = IGNORE_INDEX


@pytest.mark.parametrize(
    "labels", [[1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, X, X, X, X, 1], [1, X, X, X, X, X, X, 1], [X, X, 1, 1, 1, 1, X, X]]
)
def test_parts_of_a_sequence_weigh_as_much_as_they_have_labels(labels: list[int]) -> None:
    """With these counts of labels all numbers are exact in floating point."""
    labels_BT = torch.tensor([labels])
    losses_BT = torch.tensor([[8.0, 24.0, 16.0, 40.0, 56.0, 64.0, 32.0, 48.0]])
    weighed = []
    for rank in range(2):
        with fake_process_group(rank, 2):
            part = SequencePart(dist.new_group())
            mean = part.own(losses_BT)[part.own(labels_BT) != IGNORE_INDEX].mean()
            weighed.append(part.loss(mean, labels_BT))
    assert torch.stack(weighed).mean() == losses_BT[labels_BT != IGNORE_INDEX].mean()


def test_a_rank_finds_the_labels_that_are_among_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[int, Tensor] = {}

    def gather(gathered: Tensor, rows: Tensor, group: dist.ProcessGroup) -> None:
        sent[dist.get_rank(group)] = rows
        gathered.copy_(torch.cat([sent.get(rank, rows) for rank in range(2)]))

    def of_rank(rank: int) -> tuple[Tensor, Tensor]:
        part_TV = logits_TV.detach().chunk(2, dim=1)[rank].requires_grad_()
        with fake_process_group(rank, 2):
            loss = vocabulary_parallel_loss(part_TV, labels_T, group=dist.new_group())
        (gradient_TV,) = torch.autograd.grad(loss, part_TV)
        return loss, gradient_TV

    monkeypatch.setattr(tensor_modules, "all_gather_rows", gather)
    torch.manual_seed(0)
    logits_TV, labels_T = torch.randn(6, 8, requires_grad=True), torch.tensor([0, 3, 4, 7, IGNORE_INDEX, 5])
    expected = nn.functional.cross_entropy(logits_TV, labels_T)
    (expected_TV,) = torch.autograd.grad(expected, logits_TV)
    # What the first one finds alone, before the other one has sent anything, does not count.
    of_rank(0)
    (of_last, last_TV), (of_first, first_TV) = of_rank(1), of_rank(0)
    assert torch.equal(of_first, of_last)
    # Sums of exponentials of all words, and of each half of them, are rounded otherwise.
    torch.testing.assert_close(of_first, expected)
    torch.testing.assert_close(torch.cat((first_TV, last_TV), dim=1), expected_TV)


def test_experts_are_balanced_by_the_tokens_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the first half of the experts has more tokens, of both ranks together the second half."""
    here, on_other_rank = torch.tensor([3] * 8 + [1] * 8), torch.tensor([1] * 8 + [9] * 8)

    def summed(counts_E: Tensor, group: dist.ProcessGroup) -> Tensor:
        assert dist.get_process_group_ranks(group) == [0, 1]
        return counts_E + on_other_rank

    monkeypatch.setattr(expert, "summed", summed)
    model = GPTModel(replace(NAMED_CONFIGS["deepseek-v3-tiny"], moe_router_bias_update_rate=0.25))
    routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
    with fake_process_group(0, 2):
        balance_over(model, init_device_mesh("cpu", (2,)))
        for router in routers:
            router.count(RouterStatistics(here, None))
        model.update_expert_bias()
    biases = [router.expert_bias.tolist() for router in routers if router.expert_bias is not None]
    assert routers and biases == [[0.25] * 8 + [-0.25] * 8] * len(routers)

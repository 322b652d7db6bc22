"""Finding the units of a model: its repeated layers wherever they hang, and the largest modules around them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn

from recollect.errors import UnknownNameError, UnsupportedModelError
from recollect.lab.models.architectures import llama_config
from recollect.lab.models.gpt import GPTModel
from recollect.recording.find_units import find_units
from zoo import ZOO, Case


def layers_of(model: nn.Module) -> list[str]:
    return [unit.path for unit in find_units(model) if unit.is_layer]


def others_of(model: nn.Module) -> list[str]:
    return [unit.path for unit in find_units(model) if not unit.is_layer]


def block(width: int = 2) -> nn.Module:
    """A layer: a module with children."""
    return Block(width)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)


class OtherBlock(Block):
    """The same structure under another name."""


class Holder(nn.Module):
    """Modules by name, as attributes."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


@pytest.mark.parametrize("case", ZOO.values(), ids=ZOO)
def test_layers_of_real_models(case: Case) -> None:
    model = case.model()
    units = find_units(model)
    assert [unit.path for unit in units if unit.is_layer] == list(case.layers)
    assert all(unit.module is model.get_submodule(unit.path) for unit in units)


@pytest.mark.parametrize("case", ZOO.values(), ids=ZOO)
def test_units_cover_each_parameter_once(case: Case) -> None:
    """But for parameters that hang on a module between the units, such as a class token."""
    model = case.model()
    modules = [unit.module for unit in find_units(model)]
    assert len(modules) == len(set(map(id, modules)))
    inside = [id(module) for root in modules for module in root.modules()]
    assert len(inside) == len(set(inside))
    covered = {id(parameter) for root in modules for parameter in root.parameters()}
    between = {name for name, parameter in model.named_parameters() if id(parameter) not in covered}
    for name in between:
        parent = model.get_submodule(name.rpartition(".")[0])
        assert any(module is not parent for module in parent.modules()), name


def test_reference_llama_in_the_order_of_its_tree() -> None:
    model = GPTModel(llama_config(num_layers=3, hidden_size=32, num_attention_heads=2, vocab_size=64))
    paths = [unit.path for unit in find_units(model)]
    layers = ["decoder.layers.0", "decoder.layers.1", "decoder.layers.2"]
    assert paths == ["embedding", "rotary_pos_emb", *layers, "decoder.final_layernorm", "output_layer"]


def test_two_stacks_of_t5() -> None:
    model = ZOO["t5"].model()
    assert layers_of(model) == ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]
    assert others_of(model) == [
        "shared",
        "encoder.embed_tokens",
        "encoder.final_layer_norm",
        "encoder.dropout",
        "decoder.embed_tokens",
        "decoder.final_layer_norm",
        "decoder.dropout",
        "lm_head",
    ]


def test_classes_of_layers_in_one_list_alternate() -> None:
    """Jamba and its kin: each class that stands there twice is a layer, one that stands alone is not."""
    model = Holder(layers=nn.ModuleList([block(), OtherBlock(2), block(), OtherBlock(2), Holder(a=block())]))
    assert layers_of(model) == ["layers.0", "layers.1", "layers.2", "layers.3"]
    assert others_of(model) == ["layers.4"]


def test_blocks_of_one_class_and_different_widths_are_layers() -> None:
    assert layers_of(nn.Sequential(nn.Linear(2, 2), block(2), block(3))) == ["1", "2"]


def test_outermost_repeated_modules_are_the_layers() -> None:
    """Experts inside of a layer, stages of blocks: one level is planned."""
    layer = lambda: Holder(experts=nn.ModuleList([block(), block()]), norm=nn.LayerNorm(2))  # noqa: E731
    assert layers_of(Holder(layers=nn.ModuleList([layer(), layer()]))) == ["layers.0", "layers.1"]


def test_lists_of_lists() -> None:
    stages = nn.ModuleList([nn.ModuleList([block(), block()]), nn.Sequential(block(), block(), nn.ReLU())])
    model = Holder(stem=nn.Linear(2, 2), stages=stages)
    assert layers_of(model) == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]
    assert others_of(model) == ["stem", "stages.1.2"]


def test_dictionary_of_layers() -> None:
    model = Holder(layers=nn.ModuleDict({"0": block(), "1": block()}), head=nn.Linear(2, 2))
    assert layers_of(model) == ["layers.0", "layers.1"]


def test_layers_that_hang_deep_and_in_two_places() -> None:
    towers = [Holder(body=Holder(blocks=nn.Sequential(block(), block()), norm=nn.LayerNorm(2))) for _ in range(2)]
    model = Holder(vision=towers[0], text=towers[1], scale=nn.Identity())
    assert layers_of(model) == [f"{tower}.body.blocks.{i}" for tower in ("vision", "text") for i in range(2)]
    assert others_of(model) == ["vision.body.norm", "text.body.norm", "scale"]


def test_layers_as_attributes() -> None:
    """`layer0`, `layer1`, ...: no container; the parent's children count where there is none anywhere."""
    model = Holder(stem=nn.Linear(2, 2), layer0=block(), layer1=block(), head=nn.Linear(2, 2))
    assert layers_of(model) == ["layer0", "layer1"]
    assert others_of(model) == ["stem", "head"]


def test_layers_as_attributes_of_a_part() -> None:
    model = Holder(body=Holder(layer0=block(), layer1=block()), head=nn.Linear(2, 2))
    assert layers_of(model) == ["body.layer0", "body.layer1"]


def test_list_of_layers_goes_before_attributes() -> None:
    tower = lambda: Holder(layers=nn.ModuleList([block(), block()]))  # noqa: E731
    assert layers_of(Holder(left=tower(), right=tower())) == [
        "left.layers.0",
        "left.layers.1",
        "right.layers.0",
        "right.layers.1",
    ]


def test_module_that_stands_in_two_places_is_one_unit() -> None:
    """ALBERT runs one layer several times."""
    shared = block()
    assert layers_of(nn.Sequential(shared, shared, block())) == ["0", "2"]


def convolutions() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 2, 3), nn.ReLU())


def test_pairs_in_lists() -> None:
    pairs = [nn.ModuleList([block(), nn.ModuleDict({"mlp": OtherBlock(2), "norm": nn.LayerNorm(2)})]) for _ in range(2)]
    model = Holder(stem=nn.Linear(2, 2), layers=nn.ModuleList(pairs))
    assert layers_of(model) == ["layers.0.0", "layers.0.1.mlp", "layers.1.0", "layers.1.1.mlp"]
    assert others_of(model) == ["stem", "layers.0.1.norm", "layers.1.1.norm"]


def test_sequentials_of_a_list() -> None:
    """Each is run as a whole; if blocks were repeated in them, these would be the layers."""
    model = Holder(layers=nn.ModuleList([nn.Sequential(block(), OtherBlock(2)) for _ in range(2)]))
    assert layers_of(model) == ["layers.0", "layers.1"]
    assert layers_of(nn.Sequential(convolutions(), convolutions(), nn.Linear(2, 2))) == ["0", "1"]
    assert layers_of(Holder(layers=nn.ModuleDict({"a": convolutions(), "b": convolutions()}))) == [
        "layers.a",
        "layers.b",
    ]


def test_sequentials_as_attributes() -> None:
    model = Holder(down=convolutions(), middle=Holder(inner=block()), up=convolutions(), head=nn.Conv2d(2, 2, 1))
    assert layers_of(model) == ["down", "up"]
    assert others_of(model) == ["middle", "head"]


def test_blocks_as_attributes_go_before_sequentials() -> None:
    model = Holder(first=block(), second=block(), head=nn.Sequential(nn.Linear(2, 2)), other=nn.Sequential(nn.ReLU()))
    assert layers_of(model) == ["first", "second"]


def test_recurrent_modules_in_a_list() -> None:
    model = Holder(embedding=nn.Embedding(9, 4), layers=nn.ModuleList([nn.LSTM(4, 4), nn.LSTM(4, 4)]))
    assert layers_of(model) == ["layers.0", "layers.1"]
    assert others_of(model) == ["embedding"]


def test_single_ops_in_a_list_are_no_layers() -> None:
    """What runs between them could not be dropped, so the model is planned as a whole."""
    assert layers_of(Holder(layers=nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))) == [""]


def test_few_parameters_in_a_list_are_not_what_the_model_is_about() -> None:
    model = Holder(gates=nn.ModuleList([nn.GRU(1, 1), nn.GRU(1, 1)]), body=nn.TransformerEncoderLayer(8, 1))
    assert layers_of(model) == ["body"]


def test_block_that_may_run_several_times() -> None:
    """In a body in a model, between an embedding and an output layer that have most of the parameters."""
    body = Holder(block=nn.TransformerEncoderLayer(8, 1, 16), norm=nn.LayerNorm(8))
    model = Holder(embedding=nn.Embedding(1000, 8), body=body, head=nn.Linear(8, 1000, bias=False))
    assert layers_of(model) == ["body.block"]
    assert others_of(model) == ["embedding", "body.norm", "head"]


def test_only_child_of_lists() -> None:
    inner = Holder(layers=nn.ModuleList([nn.TransformerEncoderLayer(8, 1, 16)]))
    assert layers_of(Holder(groups=nn.ModuleList([inner]), pooler=nn.Linear(8, 8))) == ["groups.0.layers.0"]


def test_parts_of_different_classes() -> None:
    assert layers_of(Holder(encoder=block(4), decoder=OtherBlock(4), head=nn.Linear(2, 2))) == ["encoder", "decoder"]


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Linear(2, 2),
        lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
        lambda: Holder(first=nn.Linear(9, 9), second=nn.Linear(9, 9), small=block()),
        lambda: nn.TransformerEncoderLayer(8, 1, 16),
    ],
    ids=["one op", "ops only", "most in ops", "one layer"],
)
def test_model_as_one_layer(build: Callable[[], nn.Module]) -> None:
    model = build()
    assert [(unit.path, unit.module, unit.is_layer) for unit in find_units(model)] == [("", model, True)]


@pytest.mark.parametrize("build", [nn.ModuleList, nn.ReLU, lambda: nn.ModuleDict({"a": nn.ReLU()})])
def test_model_with_nothing_to_plan(build: Callable[[], nn.Module]) -> None:
    model = build()
    message = (
        rf"^found nothing to plan in {type(model).__name__}: expected a module that computes something with parameters of its "
        r'own or of its children\. Name the modules to plan, for example units=\["encoder", "decoder"\]; units=\[""\] is the '
        r"model as a whole\.$"
    )
    with pytest.raises(UnsupportedModelError, match=message):
        find_units(model)


def test_no_paths_is_no_choice() -> None:
    with pytest.raises(UnsupportedModelError, match="found nothing to plan in Sequential"):
        find_units(nn.Sequential(block(), block()), [])


def test_units_by_hand() -> None:
    model = ZOO["llama"].model()
    paths = ["model.layers.1.mlp", "model.layers.0"]
    units = find_units(model, iter(paths))
    assert [unit.path for unit in units if unit.is_layer] == ["model.layers.0", "model.layers.1.mlp"]
    assert [unit.path for unit in units if not unit.is_layer] == [
        "model.embed_tokens",
        "model.layers.1.self_attn",
        "model.layers.1.input_layernorm",
        "model.layers.1.post_attention_layernorm",
        "model.norm",
        "model.rotary_emb",
        "lm_head",
    ]


def test_units_by_hand_where_no_layers_are_repeated() -> None:
    model = nn.Sequential(OrderedDict(encoder=nn.Linear(2, 2), decoder=nn.Linear(2, 2)))
    assert [(unit.path, unit.is_layer) for unit in find_units(model, ["encoder"])] == [
        ("encoder", True),
        ("decoder", False),
    ]


def test_whole_model_by_hand() -> None:
    model = nn.Linear(2, 2)
    assert [(unit.path, unit.module, unit.is_layer) for unit in find_units(model, [""])] == [("", model, True)]


def test_unknown_path() -> None:
    model = ZOO["llama"].model()
    with pytest.raises(
        UnknownNameError, match=r"^LlamaForCausalLM has no unit 'model\.layer\.0'\. Did you mean 'model\.layers\.0'"
    ):
        find_units(model, ["model.layer.0"])


@pytest.mark.parametrize(
    ("paths", "inner", "outer"),
    [
        (["model.layers.0", "model.layers.0.mlp"], "model.layers.0.mlp", "model.layers.0"),
        (["model.layers.0.mlp.up_proj", "model"], "model.layers.0.mlp.up_proj", "model"),
        (["", "model"], "model", ""),
    ],
)
def test_path_inside_of_another(paths: list[str], inner: str, outer: str) -> None:
    words = f"unit '{outer}'" if outer else "the model"
    with pytest.raises(UnknownNameError, match=rf"^{words} contains it.*'{inner}'"):
        find_units(ZOO["llama"].model(), paths)


def test_path_that_only_begins_like_another_is_separate() -> None:
    model = Holder(layer1=block(), layer10=block())
    assert [unit.path for unit in find_units(model, ["layer1", "layer10"])] == ["layer1", "layer10"]


def test_nothing_is_run_and_nothing_is_needed() -> None:
    """Also on the meta device, where there is nothing to run."""
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=3, n_embd=16, n_head=2))
    assert layers_of(model) == ["transformer.h.0", "transformer.h.1", "transformer.h.2"]


class _Around(nn.Module):
    """Something built around a layer, as in multi-token prediction."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.inside = inside


def _layer() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 1, 4)


def test_an_only_child_is_a_layer_where_it_holds_one() -> None:
    layers, further = nn.ModuleList([_layer(), _layer()]), nn.ModuleList([_Around(_layer())])
    model = nn.ModuleDict({"layers": layers, "mtp": nn.ModuleDict({"layers": further}), "head": nn.Linear(4, 4)})
    found = [unit.path for unit in find_units(model) if unit.is_layer]
    assert found == ["layers.0", "layers.1", "mtp.layers.0"]


def test_an_only_child_is_no_layer_where_it_holds_all_or_none() -> None:
    layers = nn.ModuleList([_layer(), _layer()])
    model = nn.ModuleDict({"whole": nn.ModuleList([_Around(layers)]), "other": nn.ModuleList([_Around(nn.ReLU())])})
    found = [unit.path for unit in find_units(model) if unit.is_layer]
    assert found == ["whole.0.inside.0", "whole.0.inside.1"]

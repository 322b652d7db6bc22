"""Finding the units of a model: its repeated layers wherever they hang, and the largest modules around them."""

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn
from torch.distributed._composable import replicate

from recollect.errors import UnknownNameError, UnsupportedModelError
from recollect.recording.find_units import find_units
from small_llama import llama_step
from zoo import ZOO, Case


class Block(nn.Module):
    """A layer: a module with children."""

    def __init__(self, width: int = 2) -> None:
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


def test_a_module_that_layers_share_with_their_model_is_theirs() -> None:
    act = nn.ReLU()
    layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4)) for _ in range(2))
    model = nn.ModuleDict({"act": act, "layers": layers, "head": nn.Linear(4, 4)})
    assert [unit.path for unit in find_units(model)] == ["layers.0", "layers.1", "head"]


def test_modules_that_a_helper_of_the_model_holds_too_are_units_once() -> None:
    """Like those of performer-pytorch, whose projections a helper draws, and of nnU-Net, whose decoder holds the encoder."""
    net = Holder(stem=nn.Linear(2, 2), layers=nn.ModuleList(Block() for _ in range(2)))
    model = Holder(net=net, helper=Holder(net=net), head=nn.Linear(2, 2))
    assert [unit.path for unit in find_units(model)] == ["net.stem", "net.layers.0", "net.layers.1", "head"]
    with pytest.raises(UnsupportedModelError, match="cannot plan 'helper.net.layers.0' .* the same module as one"):
        find_units(model, ["net.layers.0", "helper.net.layers.0"])


def test_parts_of_layers_that_the_model_lists_too_are_the_layers() -> None:
    layers = nn.ModuleList(Holder(first=Block(), second=Block()) for _ in range(2))
    model = Holder(layers=layers, blocks=nn.ModuleList(block for layer in layers for block in layer.children()))
    assert [unit.path for unit in find_units(model)] == ["layers.0", "layers.1"]


def test_what_holds_layers_under_different_names_is_no_unit() -> None:
    """Like the skip layers of MONAI's DynUNet."""
    layers = nn.ModuleList(Block() for _ in range(2))
    model = Holder(layers=layers, skip=Holder(down=layers[0], next=nn.Linear(2, 2), up=layers[1]))
    assert [unit.path for unit in find_units(model)] == ["layers.0", "layers.1", "skip.next"]
    with pytest.raises(UnknownNameError, match="^unit 'skip' contains it.*'layers.1'"):
        find_units(model, ["layers.1", "skip"])


def test_plain_modules_that_only_hold_others_are_no_units() -> None:
    """As stages of the autoencoders of latent diffusion, and what `torch.fx` leaves of a model's tree."""

    def holding(**modules: nn.Module) -> nn.Module:
        held = nn.Module()
        for name, module in modules.items():
            held.add_module(name, module)
        return held

    stages = (holding(block=nn.ModuleList([Block(), Block()]), down=nn.Linear(2, 2)) for _ in range(2))
    model = Holder(stages=nn.ModuleList(stages), mid=holding(first=OtherBlock(), second=OtherBlock()))
    blocks = [path for stage in (0, 1) for path in (f"stages.{stage}.block.{number}" for number in (0, 1))]
    expected = [*blocks, "mid.first", "mid.second"], ["stages.0.down", "stages.1.down"]
    units = find_units(model)
    assert tuple([unit.path for unit in units if unit.is_layer is is_layer] for is_layer in (True, False)) == expected
    layers = (nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2))
    assert [unit.path for unit in find_units(torch.fx.symbolic_trace(nn.Sequential(*layers)))] == [""]


def test_layers_that_are_replicated_each_have_a_class_of_their_own() -> None:
    layers = nn.ModuleList(replicate(Block()) for _ in range(3))
    units = find_units(Holder(stem=nn.Linear(2, 2), layers=layers, head=nn.Linear(2, 2)), None)
    assert {"layers.0", "layers.1", "layers.2"} <= {unit.path for unit in units}


@pytest.mark.parametrize("case", ZOO.values(), ids=ZOO)
def test_units_of_real_models(case: Case) -> None:
    """They cover each parameter once, but for those that hang on a module between the units, such as a class token."""
    model = case.model()
    units = find_units(model)
    assert [unit.path for unit in units if unit.is_layer] == list(case.layers)
    assert all(unit.module is model.get_submodule(unit.path) for unit in units)
    modules = [unit.module for unit in units]
    assert len(modules) == len(set(map(id, modules)))
    inside = [id(module) for root in modules for module in root.modules()]
    assert len(inside) == len(set(inside))
    covered = {id(parameter) for root in modules for parameter in root.parameters()}
    between = {name for name, parameter in model.named_parameters() if id(parameter) not in covered}
    for name in between:
        parent = model.get_submodule(name.rpartition(".")[0])
        assert any(module is not parent for module in parent.modules()), name


def test_reference_llama_in_the_order_of_its_tree() -> None:
    paths = [unit.path for unit in find_units(llama_step(num_layers=3)[0])]
    layers = ["decoder.layers.0", "decoder.layers.1", "decoder.layers.2"]
    assert paths == ["embedding", "rotary_pos_emb", *layers, "decoder.final_layernorm", "output_layer"]


def modules(*found: nn.Module) -> nn.ModuleList:
    return nn.ModuleList(found)


def convolutions() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 2, 3), nn.ReLU())


def encoder(width: int = 8) -> nn.Module:
    return nn.TransformerEncoderLayer(width, 1, 16)


def tower() -> nn.Module:
    return Holder(body=Holder(blocks=nn.Sequential(Block(), Block()), norm=nn.LayerNorm(2)))


def pair() -> nn.Module:
    return modules(Block(), nn.ModuleDict({"mlp": OtherBlock(), "norm": nn.LayerNorm(2)}))


def twice_the_same() -> nn.Module:
    shared = Block()
    return nn.Sequential(shared, shared, Block())


def in_a_body() -> nn.Module:
    body = Holder(block=encoder(), norm=nn.LayerNorm(8))
    return Holder(embedding=nn.Embedding(1000, 8), body=body, head=nn.Linear(8, 1000, bias=False))


def with_further_tokens() -> nn.Module:
    """As in multi-token prediction, something is built around the only layer of a list."""
    around = Holder(proj=nn.Linear(4, 4), inside=encoder(4))
    further = nn.ModuleDict({"layers": modules(around)})
    layers = modules(encoder(4), encoder(4))
    return nn.ModuleDict({"layers": layers, "mtp": further, "head": nn.Linear(4, 4)})


def with_only_children() -> nn.Module:
    """One holds all layers, the other none."""
    whole = Holder(proj=nn.Linear(4, 4), inside=modules(encoder(4), encoder(4)))
    other = Holder(proj=nn.Linear(4, 4), inside=nn.ReLU())
    return nn.ModuleDict({"whole": modules(whole), "other": modules(other)})


# A model, its layers, and its other units where they say something.
MODELS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "classes in one list": (
        lambda: Holder(layers=modules(Block(), OtherBlock(), Block(), OtherBlock(), Holder(a=Block()))),
        "layers.0 layers.1 layers.2 layers.3",
        "layers.4",
    ),
    "widths": (lambda: nn.Sequential(nn.Linear(2, 2), Block(), Block(3)), "1 2", "0"),
    "outermost": (
        lambda: Holder(layers=modules(*(Holder(experts=modules(Block(), Block()), n=nn.ReLU()) for _ in range(2)))),
        "layers.0 layers.1",
        "",
    ),
    "lists of lists": (
        lambda: Holder(
            stem=nn.Linear(2, 2),
            stages=modules(modules(Block(), Block()), nn.Sequential(Block(), Block(), nn.ReLU())),
        ),
        "stages.0.0 stages.0.1 stages.1.0 stages.1.1",
        "stem stages.1.2",
    ),
    "dictionary": (
        lambda: Holder(layers=nn.ModuleDict({"0": Block(), "1": Block()}), head=nn.Linear(2, 2)),
        "layers.0 layers.1",
        "head",
    ),
    "deep and in two places": (
        lambda: Holder(vision=tower(), text=tower(), scale=nn.Identity()),
        "vision.body.blocks.0 vision.body.blocks.1 text.body.blocks.0 text.body.blocks.1",
        "vision.body.norm text.body.norm scale",
    ),
    "attributes": (
        lambda: Holder(stem=nn.Linear(2, 2), layer0=Block(), layer1=Block(), head=nn.Linear(2, 2)),
        "layer0 layer1",
        "stem head",
    ),
    "attributes of a part": (
        lambda: Holder(body=Holder(layer0=Block(), layer1=Block()), head=nn.Linear(2, 2)),
        "body.layer0 body.layer1",
        "head",
    ),
    "lists go before attributes": (
        lambda: Holder(left=Holder(layers=modules(Block(), Block())), right=Holder(layers=modules(Block(), Block()))),
        "left.layers.0 left.layers.1 right.layers.0 right.layers.1",
        "",
    ),
    "one module in two places": (twice_the_same, "0 2", ""),
    "pairs in lists": (
        lambda: Holder(stem=nn.Linear(2, 2), layers=modules(pair(), pair())),
        "layers.0.0 layers.0.1.mlp layers.1.0 layers.1.1.mlp",
        "stem layers.0.1.norm layers.1.1.norm",
    ),
    "sequentials of different classes": (
        lambda: Holder(layers=modules(*(nn.Sequential(Block(), OtherBlock()) for _ in range(2)))),
        "layers.0 layers.1",
        "",
    ),
    "sequentials": (lambda: nn.Sequential(convolutions(), convolutions(), nn.Linear(2, 2)), "0 1", "2"),
    "sequentials by name": (
        lambda: Holder(layers=nn.ModuleDict({"a": convolutions(), "b": convolutions()})),
        "layers.a layers.b",
        "",
    ),
    "sequentials as attributes": (
        lambda: Holder(down=convolutions(), middle=Holder(inner=Block()), up=convolutions(), head=nn.Conv2d(2, 2, 1)),
        "down up",
        "middle head",
    ),
    "blocks go before sequentials": (
        lambda: Holder(a=Block(), b=Block(), head=nn.Sequential(nn.Linear(2, 2)), other=nn.Sequential(nn.ReLU())),
        "a b",
        "head other",
    ),
    "recurrent": (
        lambda: Holder(embedding=nn.Embedding(9, 4), layers=modules(nn.LSTM(4, 4), nn.LSTM(4, 4))),
        "layers.0 layers.1",
        "embedding",
    ),
    "few parameters in a list": (
        lambda: Holder(gates=modules(nn.GRU(1, 1), nn.GRU(1, 1)), body=encoder()),
        "body",
        "",
    ),
    "a block that may run often": (in_a_body, "body.block", "embedding body.norm head"),
    "only child of lists": (
        lambda: Holder(groups=modules(Holder(layers=modules(encoder()))), pooler=nn.Linear(8, 8)),
        "groups.0.layers.0",
        "pooler",
    ),
    "parts of different classes": (
        lambda: Holder(encoder=Block(4), decoder=OtherBlock(4), head=nn.Linear(2, 2)),
        "encoder decoder",
        "head",
    ),
    "further tokens": (with_further_tokens, "layers.0 layers.1 mtp.layers.0", "head"),
    "only children": (with_only_children, "whole.0.inside.0 whole.0.inside.1", "whole.0.proj"),
}


@pytest.mark.parametrize("name", MODELS)
def test_layers_and_others(name: str) -> None:
    build, layers, others = MODELS[name]
    units = find_units(build())
    assert [unit.path for unit in units if unit.is_layer] == layers.split()
    assert [unit.path for unit in units if not unit.is_layer] == others.split()


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Linear(2, 2),
        lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
        lambda: Holder(first=nn.Linear(9, 9), second=nn.Linear(9, 9), small=Block()),
        # What runs between them could not be dropped.
        lambda: Holder(layers=modules(nn.Linear(2, 2), nn.Linear(2, 2))),
        lambda: nn.TransformerEncoderLayer(8, 1, 16),
    ],
    ids=["one op", "ops only", "most in ops", "ops in a list", "one layer"],
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
        find_units(nn.Sequential(Block(), Block()), [])


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


@pytest.mark.filterwarnings(r"ignore:.*`torch\.jit\.\w+` is deprecated")
def test_what_a_scripted_module_contains_is_no_unit() -> None:
    stack = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(2)))
    model = Holder(stack=torch.jit.script(stack), other=torch.jit.script(stack))
    assert [unit.path for unit in find_units(model)] == ["stack", "other"]
    runs = "was scripted or traced by torch.jit, and runs the modules that it contains without Python"
    message = (
        rf"^cannot plan 'stack\.0' of Holder: 'stack' in it {runs}\. Name 'stack', or script the layers one by one"
    )
    with pytest.raises(UnsupportedModelError, match=message):
        find_units(model, ["stack.0"])
    with pytest.raises(
        UnsupportedModelError, match=rf"^cannot plan \w+: it {runs}\. Script the layers one by one, not what"
    ):
        find_units(model.stack)


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
    model = Holder(layer1=Block(), layer10=Block())
    assert [unit.path for unit in find_units(model, ["layer1", "layer10"])] == ["layer1", "layer10"]


def test_nothing_is_run_and_nothing_is_needed() -> None:
    """Also on the meta device, where there is nothing to run."""
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=3, n_embd=16, n_head=2))
    layers = [unit.path for unit in find_units(model) if unit.is_layer]
    assert layers == ["transformer.h.0", "transformer.h.1", "transformer.h.2"]

"""Small models of libraries that are not installed with recollect's own tests, and batches for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model, batches by number, and the loss of the model and a batch."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Any, ...]]
    loss: Callable[..., Tensor]


def _generator(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def _images(number: int, *, count: int, size: int) -> tuple[Tensor, Tensor]:
    generator = _generator(number)
    return torch.randn(count, 3, size, size, generator=generator), torch.randint(0, 10, (count,), generator=generator)


def _tokens(number: int, *, words: int, shape: tuple[int, int]) -> tuple[Tensor]:
    return (torch.randint(0, words, shape, generator=_generator(number)),)


def _classified(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    output = model(inputs)
    scores = output["out"].mean((2, 3)) if isinstance(output, dict) else output
    return F.cross_entropy(scores, labels)


_SWIN: Final = {"img_size": 64, "window_size": 4, "embed_dim": 24, "depths": (2, 4), "num_heads": (2, 4)}
# Options make them small.
_TIMM: Final[dict[str, dict[str, Any]]] = {
    "vit_tiny_patch16_224": {"img_size": 64, "patch_size": 8, "depth": 6, "embed_dim": 96, "num_heads": 3},
    "deit3_small_patch16_224": {"img_size": 64, "patch_size": 8, "depth": 4, "embed_dim": 96, "num_heads": 3},
    "swin_tiny_patch4_window7_224": _SWIN,
    "swinv2_tiny_window8_256": _SWIN,
    "eva02_tiny_patch14_224": {"img_size": 56, "depth": 4, "embed_dim": 96, "num_heads": 3},
    "vit_so400m_patch14_siglip_224": {"img_size": 56, "depth": 4, "embed_dim": 96, "num_heads": 3},
    "beit_base_patch16_224": {"img_size": 64, "patch_size": 8, "depth": 4, "embed_dim": 96, "num_heads": 3},
    "cait_xxs24_224": {"img_size": 64, "depth": 4},
    "mixer_s32_224": {"img_size": 64},
    "xcit_nano_12_p16_224": {"img_size": 64},
    "mvitv2_tiny": {"img_size": 64},
    "coatnet_pico_rw_224": {"img_size": 64},
    "maxvit_rmlp_pico_rw_256": {"img_size": 64},
    "levit_128s": {},
    "convnext_atto": {"drop_path_rate": 0.1},
    "convnextv2_atto": {},
    "resnet18": {},
    "resnet26d": {"drop_rate": 0.1},
    "efficientnet_b0": {"drop_path_rate": 0.2},
    "mobilenetv3_small_100": {},
    "regnety_002": {},
    "pvt_v2_b0": {},
    "poolformer_s12": {},
    "densenet121": {},
    "hrnet_w18_small": {},
}


def _timm() -> Iterator[Model]:
    import timm

    for name, options in _TIMM.items():
        size = 224 if name == "levit_128s" else options.get("img_size", 64)
        batch = partial(_images, count=4 if size == 224 else 16, size=size)
        make = partial(timm.create_model, name, num_classes=10, **options)
        yield Model(name=f"timm/{name}", make=make, batch=batch, loss=_classified)


_X_TRANSFORMERS: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "rotary, fused attention": {"rotary_pos_emb": True, "attn_flash": True},
    "RMSNorm, SwiGLU": {"use_rmsnorm": True, "ff_swish": True, "ff_glu": True},
    "ALiBi": {"alibi_pos_bias": True, "alibi_num_heads": 2},
    "bias of positions": {"rel_pos_bias": True},
    "learned bias of positions": {"dynamic_pos_bias": True},
    "dropout": {"attn_dropout": 0.1, "ff_dropout": 0.1},
    "macaron": {"macaron": True},
    "gated residual": {"gate_residual": True},
    "memory keys": {"attn_num_mem_kv": 4},
    "several residual streams": {"num_residual_streams": 2},
    "grouped keys, norms": {"attn_kv_heads": 2, "attn_qk_norm": True},
}


def _x_transformers() -> Iterator[Model]:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    def make(**options: Any) -> nn.Module:
        layers = Decoder(dim=64, depth=6, heads=4, **{"attn_dim_head": 16, **options})
        return AutoregressiveWrapper(TransformerWrapper(num_tokens=64, max_seq_len=128, attn_layers=layers))

    for name, options in _X_TRANSFORMERS.items():
        batch = partial(_tokens, words=64, shape=(8, 64))
        yield Model(
            name=f"x-transformers/{name}",
            make=partial(make, **options),
            batch=batch,
            loss=lambda model, tokens: model(tokens),
        )


_LLAMA: Final = {
    "n_query_groups": 2,
    "rotary_percentage": 1.0,
    "parallel_residual": False,
    "bias": False,
    "norm_class_name": "RMSNorm",
    "intermediate_size": 176,
}


def _litgpt() -> Iterator[Model]:
    from litgpt import GPT, Config, adapter_v2, lora

    sizes = {"block_size": 64, "n_layer": 6, "n_embd": 64, "n_head": 4, "padded_vocab_size": 96}
    ranks = {
        "lora_r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.1,
        "lora_query": True,
        "lora_value": True,
        "lora_mlp": True,
    }

    def with_lora() -> nn.Module:
        model = lora.GPT(lora.Config(**sizes, **ranks))
        lora.mark_only_lora_as_trainable(model)
        return model

    def with_adapter() -> nn.Module:
        model = adapter_v2.GPT(adapter_v2.Config(**sizes))
        adapter_v2.mark_only_adapter_v2_as_trainable(model)
        return model

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        scores = model(tokens)
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def gpt(**options: Any) -> nn.Module:
        return GPT(Config(**sizes, **options))

    makers = {
        "Pythia": gpt,
        "Llama": partial(gpt, mlp_class_name="LLaMAMLP", **_LLAMA),
        "Mixtral": partial(gpt, mlp_class_name="LLaMAMoE", n_expert=4, n_expert_per_token=2, **_LLAMA),
        "LoRA": with_lora,
        "adapter": with_adapter,
    }
    for name, make in makers.items():
        yield Model(name=f"litgpt/{name}", make=make, batch=partial(_tokens, words=96, shape=(4, 64)), loss=loss)


def _open_clip() -> Iterator[Model]:
    from open_clip.loss import ClipLoss
    from open_clip.model import CLIP

    image = {"layers": 4, "width": 64, "head_width": 16, "image_size": 32, "patch_size": 4}
    text = {"context_length": 16, "vocab_size": 96, "width": 64, "heads": 4, "layers": 4}

    def batch(number: int) -> tuple[Tensor, Tensor]:
        generator = _generator(number)
        return torch.randn(16, 3, 32, 32, generator=generator), torch.randint(1, 96, (16, 16), generator=generator)

    def loss(model: nn.Module, images: Tensor, texts: Tensor) -> Tensor:
        return ClipLoss()(*model(images, texts)[:3])

    yield Model(name="open_clip/CLIP", make=partial(CLIP, 64, image, text), batch=batch, loss=loss)


class _DeepGraphNet(nn.Module):
    def __init__(self) -> None:
        from torch_geometric.nn import DeepGCNLayer, GENConv

        super().__init__()
        self.encoder = nn.Linear(32, 64)
        self.layers = nn.ModuleList(
            DeepGCNLayer(
                GENConv(64, 64, aggr="softmax", learn_t=True, num_layers=2, norm="layer"),
                *(nn.LayerNorm(64), nn.ReLU()),
                block="res+",
                dropout=0.1,
            )
            for _ in range(6)
        )
        self.head = nn.Linear(64, 8)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        hidden = self.encoder(nodes)
        for layer in self.layers:
            hidden = layer(hidden, edges)
        return self.head(hidden)


def _torch_geometric() -> Iterator[Model]:
    from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE

    def batch(number: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = _generator(number)
        edges = torch.randint(0, 200, (2, 1000), generator=_generator(7))
        return torch.randn(200, 32, generator=generator), edges, torch.randint(0, 8, (200,), generator=generator)

    def loss(model: nn.Module, nodes: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(nodes, edges), labels)

    nets = {one.__name__: partial(one, 32, 64, 6, out_channels=8, dropout=0.1) for one in (GCN, GAT, GIN, GraphSAGE)}
    for name, make in {**nets, "DeepGCN": _DeepGraphNet}.items():
        yield Model(name=f"torch_geometric/{name}", make=make, batch=batch, loss=loss)


def _torchvision() -> Iterator[Model]:
    from torchvision import models
    from torchvision.models.video.swin_transformer import SwinTransformer3d

    none = {"weights": None, "weights_backbone": None}
    small = {**none, "num_classes": 4, "min_size": 96, "max_size": 96}

    def boxes(number: int) -> tuple[Any, Any]:
        images = [torch.rand(3, 96, 96, generator=_generator(2 * number + index)) for index in range(2)]
        found = {"boxes": torch.tensor([[5.0, 5, 40, 40], [20, 20, 80, 80]]), "labels": torch.tensor([1, 2])}
        return images, [found, found]

    def of_boxes(model: nn.Module, images: Any, targets: Any) -> Tensor:
        return torch.stack([*model(images, targets).values()]).sum()

    def clips(number: int) -> tuple[Tensor, Tensor]:
        generator = _generator(number)
        return torch.randn(2, 3, 8, 32, 32, generator=generator), torch.randint(0, 10, (2,), generator=generator)

    detection = models.detection
    found = {
        "fasterrcnn_mobilenet_v3": partial(detection.fasterrcnn_mobilenet_v3_large_320_fpn, **small),
        "retinanet_resnet50_v2": partial(detection.retinanet_resnet50_fpn_v2, **small),
    }
    for name, make in found.items():
        yield Model(name=f"torchvision/{name}", make=make, batch=boxes, loss=of_boxes)
    of_images = {
        "deeplabv3_mobilenet_v3": partial(models.segmentation.deeplabv3_mobilenet_v3_large, **none, num_classes=10),
        "shufflenet_v2": partial(models.shufflenet_v2_x0_5, num_classes=10),
        "densenet": partial(models.DenseNet, 8, (3, 3, 3), 16, num_classes=10),
    }
    for name, make in of_images.items():
        batch = partial(_images, count=4, size=96)
        yield Model(name=f"torchvision/{name}", make=make, batch=batch, loss=_classified)
    of_clips = {
        "r3d_18": partial(models.video.r3d_18, num_classes=10),
        "swin3d": partial(
            SwinTransformer3d, [2, 4, 4], 24, [2, 2], [2, 4], [2, 4, 4], stochastic_depth_prob=0.1, num_classes=10
        ),
    }
    for name, make in of_clips.items():
        yield Model(name=f"torchvision/{name}", make=make, batch=clips, loss=_classified)


def _torchaudio() -> Iterator[Model]:
    from torchaudio.models import Conformer

    def batch(number: int) -> tuple[Tensor, Tensor]:
        return torch.rand(2, 40, 16, generator=_generator(number)), torch.tensor([40, 35])

    def loss(model: nn.Module, sounds: Tensor, lengths: Tensor) -> Tensor:
        return model(sounds, lengths)[0].pow(2).mean()

    for norm, in_groups in (("batch", False), ("group", True)):
        make = partial(Conformer, 16, 4, 32, 4, 7, dropout=0.1, use_group_norm=in_groups)
        yield Model(name=f"torchaudio/Conformer, {norm} norm", make=make, batch=batch, loss=loss)


def _monai() -> Iterator[Model]:
    from monai.losses import DiceCELoss
    from monai.networks import nets

    def batch(number: int) -> tuple[Tensor, Tensor]:
        generator = _generator(number)
        labels = torch.randint(0, 2, (2, 1, 16, 16, 16), generator=generator)
        return torch.rand(2, 1, 16, 16, 16, generator=generator), labels

    def loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found = model(images)
        return DiceCELoss(to_onehot_y=True, softmax=True)(found.float(), labels)

    blocks = {"init_filters": 8, "blocks_down": (1, 2, 2), "blocks_up": (1, 1), "dropout_prob": 0.1}
    make = partial(nets.SegResNet, spatial_dims=3, in_channels=1, out_channels=2, **blocks)
    yield Model(name="monai/SegResNet, bf16", make=make, batch=batch, loss=loss)


def _denoising_diffusion() -> Iterator[Model]:
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    def make() -> nn.Module:
        return GaussianDiffusion(Unet(dim=16, dim_mults=(1, 2, 4), dropout=0.1), image_size=16, timesteps=20)

    def batch(number: int) -> tuple[Tensor]:
        return (torch.rand(4, 3, 16, 16, generator=_generator(number)),)

    yield Model(name="denoising_diffusion/Unet", make=make, batch=batch, loss=lambda model, images: model(images))


def _ultralytics() -> Iterator[Model]:
    from ultralytics.cfg import get_cfg
    from ultralytics.nn.tasks import DetectionModel

    def make(name: str) -> nn.Module:
        model = DetectionModel(name, nc=4, verbose=False)
        model.args = get_cfg()
        return model

    def batch(number: int) -> tuple[dict[str, Tensor]]:
        generator = _generator(number)
        boxes = {"cls": torch.tensor([[0.0], [1], [2]]), "bboxes": torch.rand(3, 4, generator=generator) * 0.4 + 0.2}
        return (
            {"img": torch.rand(2, 3, 64, 64, generator=generator), "batch_idx": torch.tensor([0.0, 0, 1]), **boxes},
        )

    for name in ("yolov8n", "yolo11n"):
        make_one = partial(make, f"{name}.yaml")
        yield Model(
            name=f"ultralytics/{name}", make=make_one, batch=batch, loss=lambda model, batch: model(batch)[0].sum()
        )


LIBRARIES: Final[dict[str, Callable[[], Iterator[Model]]]] = {
    "timm": _timm,
    "x_transformers": _x_transformers,
    "litgpt": _litgpt,
    "open_clip": _open_clip,
    "torch_geometric": _torch_geometric,
    "torchvision": _torchvision,
    "torchaudio": _torchaudio,
    "monai": _monai,
    "denoising_diffusion_pytorch": _denoising_diffusion,
    "ultralytics": _ultralytics,
}
"""By the name that is imported, the models of a library."""

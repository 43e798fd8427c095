"""The models of `memory_prediction.py`: small ones of many kinds, from their configurations alone, and data of their shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

Mode = tuple[str | float, bool]
"""(activation checkpointing, compiled)"""
EAGER: tuple[Mode, ...] = (("none", False), ("full", False))
COMPILED: tuple[Mode, ...] = (*EAGER, ("none", True))
EVERY: tuple[Mode, ...] = (
    ("none", False), ("selective", False), ("full", False),
    ("none", True), ("selective", True), ("full", True), (0.5, True),
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """A model, and the modes in which it is measured."""

    trial: dict[str, Any]
    """The fields of its TrialConfig that are its own."""
    modes: tuple[Mode, ...] = EAGER
    world_size: int = 1


def of_ranks(model: Measured, parallel: str) -> Measured:
    """Return the same on two ranks, as eager code: what is compiled is the same on each."""
    return Measured({**model.trial, "parallel": parallel, "world_size": 2}, EAGER, world_size=2)


# Text


def text(seq_len: int, vocab_size: int) -> dict[str, Any]:
    kwargs = {"seq_len": seq_len, "tokenizer": {"train_bpe": vocab_size}, "max_text_bytes": 2_000_000}
    return {"target": "python_stdlib", "kwargs": kwargs}


def gpt(num_layers: int, hidden_dim: int, seq_len: int, vocab_size: int) -> dict[str, Any]:
    kwargs = {"num_layers": num_layers, "num_heads": 4, "hidden_dim": hidden_dim}
    return {"model": {"target": "gpt", "kwargs": kwargs}, "data": text(seq_len, vocab_size)}


def causal(model_type: str, **config: Any) -> dict[str, Any]:
    """A causal language model of transformers, of four layers."""
    return {
        "model": {"target": "hf", "kwargs": {"model_type": model_type, "config": config}},
        "data": text(192, 2048),
    }


_SHAPE: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 192, "num_attention_heads": 4}
_GATED: dict[str, Any] = {**_SHAPE, "intermediate_size": 512}
_GROUPED = {**_GATED, "num_key_value_heads": 2}


# What transformers has beside: encoders, and an encoder with a decoder


def bert(vocab_size: int) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(vocab_size=vocab_size, intermediate_size=768, **_SHAPE))


_STARTS: dict[str, Any] = {"decoder_start_token_id": 0}


def t5(vocab_size: int) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(vocab_size=vocab_size, d_model=192, d_kv=48, d_ff=768, num_layers=3, num_heads=4, **_STARTS)
    )


def vit(num_classes: int = 10) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config: dict[str, Any] = {"intermediate_size": 768, "num_labels": num_classes, **_SHAPE}
    return ViTForImageClassification(ViTConfig(image_size=64, patch_size=8, **config))


def resnet(num_classes: int = 10, width: int = 48) -> nn.Module:
    """Residual blocks of convolutions with BatchNorm (He et al. 2015, arXiv 1512.03385), without a list of blocks."""
    from torch import nn

    def normed(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]

    class Residual(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.layers = nn.Sequential(*normed(channels, channels), *normed(channels, channels))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.layers(x)

    channels = [width, 2 * width, 4 * width]
    steps = [
        layer
        for before, after in zip([3, *channels], channels, strict=False)
        for layer in (*normed(before, after, 1 if before == 3 else 2), Residual(after))
    ]
    return nn.Sequential(*steps, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], num_classes))


@dataclass(frozen=True)
class Drawn:
    """Samples of the same shapes, drawn from a generator: memory does not depend on what is in them."""

    kind: str
    length: int
    vocab_size: int = 2048

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> Any:
        import torch

        generator = torch.Generator().manual_seed(index)
        if self.kind == "tokens":
            tokens = torch.randint(1, self.vocab_size, (self.length,), generator=generator)
            return {"input_ids": tokens, "labels": tokens}
        image = torch.randn((3, self.length, self.length), generator=generator)
        label = torch.tensor(index % 10)
        return {"pixel_values": image, "labels": label} if self.kind == "named images" else (image, label)


def drawn(kind: str, length: int) -> tuple[Drawn, Drawn]:
    return Drawn(kind, length), Drawn(kind, length)


def own(model: str, loss: str, kind: str, length: int) -> dict[str, Any]:
    return {
        "model": {"target": f"memory_models:{model}"},
        "loss": loss,
        "data": {"target": "memory_models:drawn", "kwargs": {"kind": kind, "length": length}},
    }


GPT_SMALL = Measured(gpt(2, 128, 128, 2048), EVERY)
GPT = Measured(gpt(6, 384, 128, 8192), COMPILED)
LLAMA = Measured(causal("llama", **_GATED), COMPILED)
T5 = Measured(own("t5", "transformers", "tokens", 96), EAGER)
GPT2_124M = Measured(
    {
        "model": {
            "target": "gpt",
            "kwargs": {"num_layers": 12, "num_heads": 12, "hidden_dim": 768, "vocab_size": 50_304},
        },
        "data": {
            "target": "python_stdlib",
            "kwargs": {"seq_len": 1024, "tokenizer": "bytes", "max_text_bytes": 8_000_000},
        },
    },
    EVERY,
)
ON_A_CPU = {
    "gpt 0.8M": GPT_SMALL,
    "gpt 0.8M, fsdp x 2": of_ranks(GPT_SMALL, "fsdp"),
    "gpt 14M": GPT,
    "gpt 14M, ddp x 2": of_ranks(GPT, "ddp"),
    "gpt 14M, fsdp x 2": of_ranks(GPT, "fsdp"),
    "llama": LLAMA,
    "llama, fsdp x 2": of_ranks(LLAMA, "fsdp"),
    "gpt2": Measured(causal("gpt2", n_layer=4, n_embd=192, n_head=4)),
    "gpt_neox": Measured(causal("gpt_neox", **_GATED)),
    "qwen2": Measured(causal("qwen2", **_GROUPED)),
    "qwen3": Measured(causal("qwen3", **_GROUPED, head_dim=48)),
    "gemma": Measured(causal("gemma", **_GROUPED, head_dim=48)),
    "mistral": Measured(causal("mistral", **_GROUPED)),
    "opt": Measured(causal("opt", **_SHAPE, ffn_dim=768, word_embed_proj_dim=192)),
    "phi": Measured(causal("phi", **_GATED)),
    "bert": Measured(own("bert", "transformers", "tokens", 192), COMPILED),
    "t5": T5,
    "vit": Measured(own("vit", "transformers", "named images", 64), COMPILED),
    "resnet": Measured(own("resnet", "cross_entropy", "images", 64), (("none", False), ("none", True))),
}
ON_A_GPU = {"gpt 124M": GPT2_124M, "llama": LLAMA}
QUICK = ("gpt 0.8M", "gpt 0.8M, fsdp x 2", "gpt 124M")

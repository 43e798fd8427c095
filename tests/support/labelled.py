"""A small transformers model and data with labels, as a Trainer would take them."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.support import tiny


def tiny_llama(vocab_size: int = 24, max_position_embeddings: int = 16, use_cache: bool = True) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    sizes |= {"vocab_size": vocab_size, "max_position_embeddings": max_position_embeddings}
    return LlamaForCausalLM(LlamaConfig(use_cache=use_cache, **sizes))


def with_z_loss(weight: float = 1e-4, vocab_size: int = 24) -> nn.Module:
    """A model that holds its logits near zero, as large ones do, wherever it is given labels."""
    model: Any = tiny_llama(vocab_size)
    own = model.forward

    def forward(**batch: Any) -> Any:
        outputs = own(**batch)
        if outputs.loss is not None:
            outputs.loss = outputs.loss + weight * outputs.logits.logsumexp(-1).square().mean()
        return outputs

    model.forward = forward
    return model


def mixture(vocab_size: int = 24) -> nn.Module:
    """A mixture of experts that balances its router by what it adds to its loss."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "output_router_logits": True,
    }
    return MixtralForCausalLM(MixtralConfig(vocab_size=vocab_size, **sizes))


def data() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Labels are the inputs, some of them masked; the first of a sample never counts."""
    sets = tiny.data()
    return tuple(
        [{"input_ids": s["input_ids"], "labels": _masked(s["input_ids"], n)} for n, s in enumerate(one)] for one in sets
    )  # pyright: ignore[reportReturnType]


def _masked(labels: Any, number: int) -> Any:
    labels = labels.clone()
    labels[: number % 5] = -100
    return labels

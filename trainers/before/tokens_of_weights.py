"""Whether text comes in the tokens that a model's weights were trained with."""

from __future__ import annotations

from pathlib import Path

from batchscout.trainers.config import ModelConfig, TrialConfig
from batchscout.trainers.data.samples import BUILT_IN
from batchscout.trainers.errors import DataFault

OF_A_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def check_tokens(config: TrialConfig) -> None:
    """Raise DataFault where a pretrained model would be given tokens that are not its own: what it knows of a number belongs to another
    text. One that was trained on bytes has no tokenizer beside its weights."""
    name, spec = _pretrained(config.model), config.data.kwargs.get("tokenizer")
    if name is None or config.data.target not in BUILT_IN or (isinstance(spec, str) and spec != "bytes"):
        return
    folder = Path(name)
    if spec == "bytes" and folder.is_dir() and not any((folder / file).is_file() for file in OF_A_TOKENIZER):
        return
    own = f"{name}/tokenizer.json" if folder.is_dir() and config.data.target != "chat" else name
    made = "bytes" if spec == "bytes" else f"{spec or 'the default, train_bpe'}, which is trained on the data"
    raise DataFault(
        f"model '{name}' is pretrained in the tokens of a tokenizer of its own, and data.kwargs.tokenizer is {made}; set "
        f"data.kwargs.tokenizer: {own}"
    )


def _pretrained(model: ModelConfig) -> str | None:
    """Return the folder or the name on the hub that a language model's weights are from; None of others."""
    if model.target == "hf":
        return model.kwargs.get("name") if model.kwargs.get("pretrained") else None
    is_of_transformers = model.target.startswith("transformers:") and model.target.endswith(".from_pretrained")
    return model.kwargs.get("pretrained_model_name_or_path") if is_of_transformers else None

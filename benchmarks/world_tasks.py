"""What recorded worlds train: tiny models with a leading dimension of members, and their data.

A model is the shapes of its weights and a function of stacked weights (see ensemble.py), written with batched matrix
products, which are faster at this size than anything that maps over modules.

Shapes: M members, B batch, T sequence, D hidden, V vocabulary, C channels.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from ensemble import Loss, Shapes
from torch import Generator, Tensor

IGNORED = -100
"""The target of a position that does not count."""
PRINTABLE = range(32, 127)
"""The bytes that have a token of their own; every other one is written as a line's end or as the token of the rest."""
NUM_VALIDATION = 256
"""The validation samples, the same for all runs of a world: what their sampling adds is common to all that is compared."""


@dataclass(frozen=True)
class Samples:
    """Inputs and targets, (number of samples, ...) each."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class Task:
    """A model, what it is trained on, and what it is judged by."""

    shapes: Shapes
    loss: Loss
    train: Samples
    val: Samples
    start: Tensor | None = None
    """(P): what every run begins with; None where each seed draws weights of its own."""


def initial_weights(shapes: Shapes, seed: int) -> Tensor:
    """Return (P): matrices keep a signal's size, embeddings and heads start small, gains at one, biases at zero."""
    generator = Generator().manual_seed(seed)
    return torch.cat([_initial(name, shape, generator).flatten() for name, shape in shapes.items()])


def _initial(name: str, shape: tuple[int, ...], generator: Generator) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape) if name.endswith("gain") else torch.zeros(shape)
    small = name.endswith(("embedding", "head"))
    return torch.randn(shape, generator=generator) * (0.05 if small else 1 / math.sqrt(shape[0]))


# Language models

HIDDEN, HEADS = 32, 2


def transformer_shapes(num_layers: int, seq_len: int, vocab_size: int, inputs: int | None = None) -> Shapes:
    """Return the weights of a pre-norm transformer; `inputs` is the width of its input where that is no token."""
    first = {"embedding": (vocab_size, HIDDEN)} if inputs is None else {"patch": (inputs, HIDDEN)}
    layers = {f"{layer}.{name}": shape for layer in range(num_layers) for name, shape in LAYER.items()}
    return (
        first | {"position_embedding": (seq_len, HIDDEN)} | layers | {"gain": (HIDDEN,), "head": (HIDDEN, vocab_size)}
    )


LAYER: Shapes = {
    "attention_gain": (HIDDEN,),
    "qkv": (HIDDEN, 3 * HIDDEN),
    "out": (HIDDEN, HIDDEN),
    "mlp_gain": (HIDDEN,),
    "up": (HIDDEN, 4 * HIDDEN),
    "down": (4 * HIDDEN, HIDDEN),
}


def language_loss(
    weights: Mapping[str, Tensor], tokens: Tensor, targets: Tensor, *, num_layers: int
) -> tuple[Tensor, Tensor]:
    """tokens (M, B, T), targets (M, B, T)"""
    hidden = _transformed(weights, _embedded(weights["embedding"], tokens), num_layers, causal=True)
    return cross_entropy(hidden @ weights["head"], targets.flatten(1))


def _embedded(embedding: Tensor, tokens: Tensor) -> Tensor:
    """Look up each member's tokens in its own rows of one table."""
    members, vocab_size, _ = embedding.shape
    rows = tokens + torch.arange(members).view(-1, 1, 1) * vocab_size
    return F.embedding(rows, embedding.reshape(members * vocab_size, -1))


def _transformed(weights: Mapping[str, Tensor], x: Tensor, num_layers: int, *, causal: bool) -> Tensor:
    """x (M, B, T, D) to (M, B x T, D)"""
    shape = x.shape
    x = (x + weights["position_embedding"][:, None]).flatten(1, 2)
    for layer in range(num_layers):
        of = {name: weights[f"{layer}.{name}"] for name in LAYER}
        mixed = _attended(_normed(x, of["attention_gain"]) @ of["qkv"], shape, causal)
        x = x + mixed @ of["out"] / math.sqrt(2 * num_layers)
        x = x + F.gelu(_normed(x, of["mlp_gain"]) @ of["up"]) @ of["down"] / math.sqrt(2 * num_layers)
    return _normed(x, weights["gain"])


def _normed(x: Tensor, gain: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]) * gain[:, None]


def _attended(qkv: Tensor, shape: torch.Size, causal: bool) -> Tensor:
    members, batch, length, hidden = shape
    q, k, v = qkv.view(members * batch, length, 3, HEADS, hidden // HEADS).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return mixed.transpose(1, 2).reshape(members, batch * length, hidden)


def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """logits (M, N, V), targets (M, N) to (sums, numbers of valid targets), each (M)"""
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED)
    return losses.view(targets.shape).sum(1), (targets != IGNORED).sum(1)


def windows(tokens: Tensor, seq_len: int, most: int) -> Samples:
    """Return up to `most` windows that do not overlap, evenly spread over the text, with the next token as target."""
    starts = torch.linspace(0, len(tokens) - seq_len - 2, min(most, len(tokens) // seq_len - 1)).long()
    cut = tokens[starts[:, None] + torch.arange(seq_len + 1)]
    return Samples(cut[:, :-1].contiguous(), cut[:, 1:].contiguous())


def gpt_stdlib(num_samples: int, seq_len: int = 24, num_layers: int = 1) -> Task:
    """A byte-level GPT on the running Python's standard library, every tenth file held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    train, val = (_byte_tokens(b"".join(file.read_bytes() for file in part)) for part in (
        [file for number, file in enumerate(files) if number % 10],
        files[::10],
    ))  # fmt: skip
    vocab_size = len(PRINTABLE) + 2
    return Task(
        transformer_shapes(num_layers, seq_len, vocab_size),
        partial(language_loss, num_layers=num_layers),
        windows(train, seq_len, num_samples),
        windows(val, seq_len, NUM_VALIDATION),
    )


def gpt_topics(num_samples: int, seq_len: int = 24, num_layers: int = 1) -> Task:
    """The same model on the English of Python's help topics, every tenth topic held out."""
    texts = [topics[name].encode() for name in sorted(topics)]
    train, val = (_byte_tokens(b"\n".join(part)) for part in (
        [text for number, text in enumerate(texts) if number % 10],
        texts[::10],
    ))  # fmt: skip
    return replace(
        gpt_stdlib(num_samples, seq_len, num_layers),
        train=windows(train, seq_len, num_samples),
        val=windows(val, seq_len, NUM_VALIDATION),
    )


def _byte_tokens(text: bytes) -> Tensor:
    table = torch.full((256,), len(PRINTABLE) + 1)
    table[list(PRINTABLE)] = torch.arange(len(PRINTABLE))
    table[ord("\n")] = len(PRINTABLE)
    return table[torch.frombuffer(bytearray(text), dtype=torch.uint8).long()]


def gpt_wikitext2(
    folder: Path, num_samples: int, seq_len: int = 16, num_layers: int = 1, num_merges: int = 128
) -> Task:
    """A GPT over byte pairs on WikiText-2: trained on its test part, judged by its validation part."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train([str(folder / "test.txt")], vocab_size=256 + num_merges, show_progress=False)
    train, val = (torch.tensor(tokenizer.encode((folder / name).read_text()).ids) for name in ("test.txt", "valid.txt"))
    used = torch.unique(train)
    train, val = torch.searchsorted(used, train), torch.searchsorted(used, val).clamp(max=len(used) - 1)
    return Task(
        transformer_shapes(num_layers, seq_len, len(used)),
        partial(language_loss, num_layers=num_layers),
        windows(train, seq_len, num_samples),
        windows(val, seq_len, NUM_VALIDATION),
    )


# Sequences of different length

LONGEST, NUM_DIGITS = 8, 10
SEPARATOR, PADDING = NUM_DIGITS, NUM_DIGITS + 1


def sequences(num_samples: int, num_layers: int = 1) -> Task:
    """A causal transformer that sorts 2 to 8 digits: it reads them and a separator, and writes them in order."""
    generator = Generator().manual_seed(1)
    train, val = (_sorting(num, generator) for num in (num_samples, 2 * NUM_VALIDATION))
    shapes = transformer_shapes(num_layers, 2 * LONGEST, NUM_DIGITS + 2)
    return Task(shapes, partial(language_loss, num_layers=num_layers), train, val)


def _sorting(num_samples: int, generator: Generator) -> Samples:
    lengths = torch.randint(2, LONGEST + 1, (num_samples, 1), generator=generator)
    digits = torch.randint(0, NUM_DIGITS, (num_samples, LONGEST), generator=generator)
    place, kept = torch.arange(2 * LONGEST + 1), torch.arange(LONGEST) < lengths
    ordered = digits.where(kept, PADDING).sort(1).values
    whole = torch.cat([digits, digits, digits[:, :1]], 1)
    answer = ordered.gather(1, (place - lengths - 1).clamp(0, LONGEST - 1))
    whole = whole.where(place < lengths, answer.where(place > lengths, SEPARATOR)).where(place <= 2 * lengths, PADDING)
    counts = (place[1:] > lengths) & (place[1:] <= 2 * lengths)
    return Samples(whole[:, :-1].contiguous(), whole[:, 1:].where(counts, IGNORED).contiguous())


# Images

IMAGE, PATCH, NUM_CLASSES = 12, 4, 8


def gratings(num_samples: int, generator: Generator, noise: float) -> Samples:
    """Return images (12 x 12) of a grating in one of 8 directions, at any phase and of any width, under noise."""
    classes = torch.randint(0, NUM_CLASSES, (num_samples,), generator=generator)
    phase, width = torch.rand(2, num_samples, 1, 1, generator=generator)
    angle = (classes * math.pi / NUM_CLASSES).view(-1, 1, 1)
    row, column = torch.meshgrid(torch.arange(IMAGE), torch.arange(IMAGE), indexing="ij")
    along = row * angle.sin() + column * angle.cos()
    clean = torch.sin(along * (0.6 + 0.9 * width) + 2 * math.pi * phase)
    return Samples(clean + noise * torch.randn(clean.shape, generator=generator), classes)


def vit_images(num_samples: int, num_layers: int = 1) -> Task:
    """A vision transformer that tells the direction of noisy gratings, from 9 patches."""
    generator = Generator().manual_seed(2)
    train, val = (_patches(gratings(num, generator, noise=1.0)) for num in (num_samples, 2 * NUM_VALIDATION))
    shapes = transformer_shapes(num_layers, (IMAGE // PATCH) ** 2, NUM_CLASSES, inputs=PATCH**2)
    return Task(shapes, partial(image_loss, num_layers=num_layers), train, val)


def _patches(images: Samples) -> Samples:
    cut = images.inputs.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)
    return Samples(cut.flatten(3).flatten(1, 2).contiguous(), images.targets)


def image_loss(
    weights: Mapping[str, Tensor], patches: Tensor, classes: Tensor, *, num_layers: int
) -> tuple[Tensor, Tensor]:
    """patches (M, B, T, 16), classes (M, B)"""
    x = (patches.flatten(1, 2) @ weights["patch"]).view(*patches.shape[:3], HIDDEN)
    hidden = _transformed(weights, x, num_layers, causal=False).view(x.shape).mean(2)
    return cross_entropy(hidden @ weights["head"], classes)


CHANNELS = (8, 16)


def sgd_momentum(num_samples: int) -> Task:
    """A convolutional network that tells the direction of noisy gratings; it is trained by SGD with momentum."""
    generator = Generator().manual_seed(3)
    train, val = (gratings(num, generator, noise=1.0) for num in (num_samples, 2 * NUM_VALIDATION))
    first, second = CHANNELS
    shapes = {
        "convolution1": (9, first),
        "bias1": (first,),
        "convolution2": (9 * first, second),
        "bias2": (second,),
        "head": (second * (IMAGE // 4) ** 2, NUM_CLASSES),
        "head_bias": (NUM_CLASSES,),
    }
    return Task(shapes, convolutional_loss, train, val)


def convolutional_loss(weights: Mapping[str, Tensor], images: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """images (M, B, 12, 12), classes (M, B)"""
    members, batch = classes.shape
    x = images.reshape(members * batch, 1, IMAGE, IMAGE)
    for number in (1, 2):
        columns = F.unfold(x, 3, padding=1, stride=2).mT  # (M x B, places, 9 C)
        places = columns.shape[1]
        flat = columns.reshape(members, batch * places, -1) @ weights[f"convolution{number}"]
        flat = F.relu(flat + weights[f"bias{number}"][:, None])
        x = flat.view(members * batch, places, -1).mT.unflatten(2, (math.isqrt(places), math.isqrt(places)))
    return cross_entropy(x.reshape(members, batch, -1) @ weights["head"] + weights["head_bias"][:, None], classes)


# Regression

NUM_INPUTS, WIDTH, LABEL_NOISE = 8, 48, 2.0


def noisy_regression(num_samples: int) -> Task:
    """A small network that learns a fixed random one through labels whose noise has 4 times the variance of the rest.

    It is judged without that noise. What a step learns is noise for the most part, which a larger batch averages out.
    """
    generator = Generator().manual_seed(4)
    teacher = torch.randn(NUM_INPUTS, 16, generator=generator), torch.randn(16, generator=generator)
    train, val = (_labelled(num, generator, teacher, noise) for num, noise in
                  ((num_samples, LABEL_NOISE), (8 * NUM_VALIDATION, 0.0)))  # fmt: skip
    shapes = {
        "in": (NUM_INPUTS, WIDTH),
        "bias1": (WIDTH,),
        "mid": (WIDTH, WIDTH),
        "bias2": (WIDTH,),
        "head": (WIDTH, 1),
    }
    return Task(shapes, regression_loss, train, val)


def _labelled(num_samples: int, generator: Generator, teacher: tuple[Tensor, Tensor], noise: float) -> Samples:
    inputs = torch.randn(num_samples, NUM_INPUTS, generator=generator)
    values = torch.tanh(inputs @ teacher[0]) @ teacher[1] / 4
    return Samples(inputs, values + noise * torch.randn(num_samples, generator=generator))


def regression_loss(weights: Mapping[str, Tensor], inputs: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """inputs (M, B, 8), values (M, B): the summed squared error"""
    x = torch.tanh(inputs @ weights["in"] + weights["bias1"][:, None])
    x = torch.tanh(x @ weights["mid"] + weights["bias2"][:, None])
    errors = (x @ weights["head"]).squeeze(2) - values
    return errors.square().sum(1), torch.full((len(values),), values.shape[1])

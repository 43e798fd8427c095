"""Data in the form that a stranger's download would have brought, made by a seed: it can be learnt, and means nothing."""

from __future__ import annotations

import csv
import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

Maker = Callable[[Path], None]
"""Writes files into the folder of a stranger's code."""
WORDS = tuple(a + b + c for a in "bdfgklmnprst" for b in "aeiou" for c in ("n", "r", "st", "l"))


def nothing(code: Path) -> None:
    """Of a script that makes its data, or has it."""


def together(*makers: Maker) -> Maker:
    def make(code: Path) -> None:
        for one in makers:
            one(code)

    return make


def digits(folder: str, train: int = 12_800, test: int = 2_000) -> Maker:
    """Return what writes the four idx files of MNIST (or FashionMNIST) as torchvision leaves them in `folder`."""

    def make(code: Path) -> None:
        (code / folder).mkdir(parents=True, exist_ok=True)
        random = np.random.default_rng(1)
        shapes = random.integers(0, 200, (10, 28, 28))
        for name, number in (("train", train), ("t10k", test)):
            labels = random.integers(0, 10, number).astype(np.uint8)
            images = (shapes[labels] + random.integers(0, 56, (number, 28, 28))).astype(np.uint8)
            header = struct.pack(">iiii", 0x803, number, 28, 28)
            (code / folder / f"{name}-images-idx3-ubyte").write_bytes(header + images.tobytes())
            (code / folder / f"{name}-labels-idx1-ubyte").write_bytes(
                struct.pack(">ii", 0x801, number) + labels.tobytes()
            )

    return make


def image_folders(folder: str, size: int, classes: int, per_class: int) -> Maker:
    """Return what writes train/ and val/, a folder of PNG files for each class."""

    def make(code: Path) -> None:
        from PIL import Image  # pyright: ignore[reportMissingImports]

        random = np.random.default_rng(2)
        colours = random.integers(0, 200, (classes, 3))
        for part, number in (("train", per_class), ("val", max(per_class // 4, 2))):
            for kind in range(classes):
                into = code / folder / part / f"class{kind}"
                into.mkdir(parents=True, exist_ok=True)
                for index in range(number):
                    pixels = colours[kind] + random.integers(0, 56, (size, size, 3))
                    Image.fromarray(pixels.astype(np.uint8)).save(into / f"{index}.png")

    return make


def sentences(number: int, seed: int = 3) -> list[str]:
    """Return sentences in which a word depends on the one before."""
    random = np.random.default_rng(seed)
    made = []
    for _ in range(number):
        at, words = int(random.integers(len(WORDS))), []
        for _ in range(int(random.integers(6, 16))):
            words.append(WORDS[at])
            at = (at * 7 + int(random.integers(3))) % len(WORDS)
        made.append(" ".join(words) + ".")
    return made


def text(path: str, lines: int = 4_000) -> Maker:
    return lambda code: _write(code / path, "\n".join(sentences(lines)) + "\n")


def hours(path: str) -> Maker:
    """Return what writes a table of hourly values in the form of ETTh1.csv."""

    def make(code: Path) -> None:
        random, at = np.random.default_rng(4), np.arange(17_420)
        waves = [np.sin(at * 2 * np.pi / period) for period in (24, 168, 12, 48, 24, 84, 36)]
        moments = np.datetime64("2016-07-01T00:00:00") + at.astype("timedelta64[h]")
        rows = zip(moments, *(wave + 0.2 * random.standard_normal(len(at)) for wave in waves), strict=True)
        (code / path).parent.mkdir(parents=True, exist_ok=True)
        with (code / path).open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["date", "HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT"])
            table.writerows(
                (str(moment).replace("T", " "), *(f"{value:.4f}" for value in values)) for moment, *values in rows
            )

    return make


def headlines(folder: str) -> Maker:
    """Return what writes lines of `text TAB class`, as THUCNews has them, and the embedding of its characters."""

    def make(code: Path) -> None:
        lines = [f"{line}\t{sum(map(ord, line[:2])) % 10}" for line in sentences(6_000)]
        _write(code / folder / "train.txt", "\n".join(lines) + "\n")
        vocabulary = pickle.loads((code / folder / "vocab.pkl").read_bytes())
        rows = np.random.default_rng(5).standard_normal((max(vocabulary.values()) + 1, 300)).astype(np.float32)
        np.savez(code / folder / "embedding_SougouNews.npz", embeddings=rows)

    return make


def word_vectors(path: str, dim: int) -> Maker:
    """Return what writes `word value value ...`, a line each."""

    def make(code: Path) -> None:
        random = np.random.default_rng(6)
        lines = (
            " ".join([word, *(f"{value:.4f}" for value in random.standard_normal(dim))]) for word in ("the", "of", "to")
        )
        _write(code / path, "\n".join(lines) + "\n")

    return make


def molecules(folder: str) -> Maker:
    """Return what writes MUTAG as TUDataset keeps it: 188 graphs of atoms of 7 kinds."""

    def make(code: Path) -> None:
        random = np.random.default_rng(7)
        edges, graphs, atoms, kinds, bonds = [], [], [], [], []
        for graph in range(188):
            first, number, kind = len(atoms), int(random.integers(10, 28)), int(random.integers(2))
            atoms += [int(a) for a in random.integers(0, 3 + 4 * kind, number)]
            graphs += [graph + 1] * number
            kinds.append(1 if kind else -1)
            for a in range(number):
                b = (a + 1) % number
                edges += [(first + a + 1, first + b + 1), (first + b + 1, first + a + 1)]
                bonds += [0, 0]
        raw = code / folder / "MUTAG" / "raw"
        columns = {"A": [f"{a}, {b}" for a, b in edges], "graph_indicator": graphs, "graph_labels": kinds}
        for name, values in (columns | {"node_labels": atoms, "edge_labels": bonds}).items():
            _write(raw / f"MUTAG_{name}.txt", "\n".join(map(str, values)) + "\n")

    return make


def citations(folder: str) -> Maker:
    """Return what writes Cora as Planetoid keeps it: 2,708 papers, 1,433 words, 7 fields, 140 to train on."""

    def make(code: Path) -> None:
        import scipy.sparse as sparse  # pyright: ignore[reportMissingImports]

        random = np.random.default_rng(8)
        papers, words, fields, tested = 2_708, 1_433, 7, 1_000
        field = random.integers(0, fields, papers)
        field[:140] = np.arange(140) % fields
        has = random.random((papers, words)) < 0.01
        has[np.arange(papers), field * 200 + random.integers(0, 200, papers)] = True
        graph = {
            paper: [int(other) for other in random.choice(np.flatnonzero(field == field[paper]), 2)]
            for paper in range(papers)
        }
        rows, one_hot = sparse.csr_matrix(has.astype(np.float32)), np.eye(fields, dtype=np.int32)[field]
        known = papers - tested
        parts = {"x": rows[:140], "tx": rows[known:], "allx": rows[:known], "graph": graph}
        parts |= {"y": one_hot[:140], "ty": one_hot[known:], "ally": one_hot[:known]}
        raw = code / folder / "Cora" / "raw"
        raw.mkdir(parents=True, exist_ok=True)
        for name, value in parts.items():
            (raw / f"ind.cora.{name}").write_bytes(pickle.dumps(value))
        _write(raw / "ind.cora.test.index", "\n".join(map(str, range(known, papers))) + "\n")

    return make


def clicks(path: str) -> Maker:
    """Return what writes a table in the form of Criteo's: 13 numbers, 26 categories, and whether it was clicked."""

    def make(code: Path) -> None:
        random = np.random.default_rng(9)
        (code / path).parent.mkdir(parents=True, exist_ok=True)
        with (code / path).open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))])
            for _ in range(2_000):
                numbers, kinds = random.integers(0, 100, 13), random.integers(0, 30, 26)
                table.writerow([int(numbers[0] + kinds[0] > 70), *numbers, *(f"{kind:08x}" for kind in kinds)])

    return make


def sentence_pairs(folder: str) -> Maker:
    """Return what writes MRPC's columns as two CSV files: two sentences, and whether they say the same."""

    def make(code: Path) -> None:
        (code / folder).mkdir(parents=True, exist_ok=True)
        for part, number in (("train", 512), ("validation", 64)):
            lines = sentences(number * 2)
            with (code / folder / f"{part}.csv").open("w", newline="") as file:
                table = csv.writer(file)
                table.writerow(["sentence1", "sentence2", "label", "idx"])
                for index in range(number):
                    same = index % 2
                    table.writerow([lines[index], lines[index if same else index + number], same, index])

    return make


def conversations(path: str, *, preferences: bool) -> Maker:
    """Return what writes a data set of chats as JSON lines: `messages`, or `chosen` and `rejected` answers to a `prompt`."""

    def make(code: Path) -> None:
        lines = sentences(1_500)
        rows = []
        for asked, good, bad in zip(lines[:500], lines[500:1000], lines[1000:], strict=True):
            question, answers = _said("user", asked), (_said("assistant", good), _said("assistant", bad))
            preferred = {"prompt": [question], "chosen": [answers[0]], "rejected": [answers[1]]}
            rows.append(preferred if preferences else {"messages": [question, answers[0]]})
        _write(code / path, "".join(json.dumps(row) + "\n" for row in rows))

    return make


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def language_model(folder: str, kind: str = "gpt2") -> Maker:
    """Return what saves a tiny model with its tokenizer in the Hugging Face form: `gpt2`, or `bert` for two classes."""

    def make(code: Path) -> None:
        import transformers
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<eos>"]
        learnt = Tokenizer(models.WordLevel(unk_token="[UNK]"))
        learnt.pre_tokenizer = pre_tokenizers.Whitespace()
        learnt.train_from_iterator(sentences(2_000), trainers.WordLevelTrainer(vocab_size=400, special_tokens=special))
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=learnt, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
            mask_token="[MASK]", eos_token="<eos>", bos_token="<eos>", model_max_length=128,
        )  # fmt: skip
        tokenizer.chat_template = (
            "{% for message in messages %}{{ message['role'] }} {{ message['content'] }}<eos>{% endfor %}"
        )
        size = len(tokenizer)
        if kind == "gpt2":
            config = transformers.GPT2Config(
                vocab_size=size, n_positions=128, n_embd=64, n_layer=2, n_head=2, bos_token_id=5, eos_token_id=5
            )
            model = transformers.GPT2LMHeadModel(config)
        else:
            config = transformers.BertConfig(
                vocab_size=size,
                hidden_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=128,
                max_position_embeddings=128,
            )
            model = transformers.BertForSequenceClassification(config)
        tokenizer.save_pretrained(code / folder)
        model.save_pretrained(code / folder)

    return make


def denoiser(folder: str) -> Maker:
    """Return what saves the configuration of a small UNet in the form of diffusers."""

    def make(code: Path) -> None:
        from diffusers import UNet2DModel  # pyright: ignore[reportMissingImports]

        blocks = {
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        }
        model = UNet2DModel(
            32, 3, 3, layers_per_block=1, block_out_channels=(16, 32), norm_num_groups=8, attention_head_dim=8, **blocks
        )
        model.save_config(str(code / folder))

    return make


def captions(folder: str) -> Maker:
    """Return what writes images, and a table of their paths and captions with tabs between."""

    def make(code: Path) -> None:
        image_folders(folder, 64, 4, 64)(code)
        lines = ["filepath\ttitle"]
        for path in sorted((code / folder / "train").rglob("*.png")):
            lines.append(f"{path.relative_to(code)}\ta picture of {path.parent.name} number {path.stem}")
        _write(code / folder / "train.csv", "\n".join(lines) + "\n")

    return make


def _write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)

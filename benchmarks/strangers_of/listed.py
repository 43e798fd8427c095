"""The strangers: where each comes from, its command, what stands in for its data, and its changed lines. Chosen by the rule in ../strangers.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from strangers_of import stand_ins as made

Why = Literal["download", "product", "learning_rate", "micro_batch_size"]


@dataclass(frozen=True)
class Change:
    file: str
    """From the root of the stranger's code."""
    line: int
    text: str
    """What the line becomes, without its indentation."""
    why: Why = "download"
    """What it is for: data that cannot be had, what batchscout needs, or a number of the answer, which `text` then has in braces."""


@dataclass(frozen=True)
class Stranger:
    name: str
    kind: str
    source: str
    """sdist:NAME==VERSION, installed:NAME==VERSION, or github:OWNER/NAME@COMMIT."""
    command: tuple[str, ...]
    batch: int
    """The samples of one of its optimizer steps."""
    data: made.Maker = made.nothing
    folder: str = "."
    """Where its command is typed, from the root of its code."""
    sha256: str = ""
    """How that of its script begins; empty where what is installed has it."""
    changes: tuple[Change, ...] = ()
    """Made before anything runs."""
    by_hand: tuple[Change, ...] = ()
    """Lines that take a number of the answer for which the script has no flag."""
    no_study: tuple[str, ...] = ()
    """Words of the reason, one of which the refusal should have, if it is no study of one loss by one optimizer; else empty."""
    launcher: tuple[str, ...] = ()
    """What goes before its command for `init`, where `python` would not."""
    tried: bool = False
    """Whether it was among what batchscout was tried on while it was written."""


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def fake(number: int, classes: int, rest: str) -> str:
    """Return the torchvision data set that stands in for CIFAR, whose files are known by their checksums."""
    return f"torchvision.datasets.FakeData({number}, (3, 32, 32), {classes}, {rest})"


MRPC = 'load_dataset("csv", data_files={"train": "data/train.csv", "validation": "data/validation.csv"})'
CIFAR100_UTILS = (
    Change("utils.py", 187, f"cifar100_training = {fake(6_400, 100, 'transform_train')}"),
    Change("utils.py", 210, f"cifar100_test = {fake(640, 100, 'transform_test')}"),
)

FROM_PACKAGES = (
    Stranger(
        "trl-sft", "text, TRL's SFTTrainer, -m", "installed:trl==1.16.0",
        words("-m trl.scripts.sft --model_name_or_path model --dataset_name data --output_dir out --use_cpu --bf16 False"), 8,
        made.together(made.language_model("model"), made.conversations("data/train.jsonl", preferences=False)),
    ),
    Stranger(
        "trl-dpo", "text, TRL's DPOTrainer, -m", "installed:trl==1.16.0",
        words("-m trl.scripts.dpo --model_name_or_path model --dataset_name data --output_dir out --use_cpu --bf16 False"), 8,
        made.together(made.language_model("model"), made.conversations("data/train.jsonl", preferences=True)),
    ),
    Stranger(
        "schedulefree-mnist", "vision, plain loop, optimizer of a package", "sdist:schedulefree==1.4.1", words("main.py"), 64,
        made.digits("../data/MNIST/raw"), "examples/mnist", "0cc2d01db7da",
    ),
    Stranger(
        "torch-optimizer-mnist", "vision, plain loop, settings in a class", "sdist:torch-optimizer==0.3.0", words("mnist.py"), 64,
        made.digits("../data/MNIST/raw"), "examples", "df45de3a2481",
        by_hand=(
            Change("examples/mnist.py", 129, "batch_size: int = {micro_batch_size},", "micro_batch_size"),
            Change("examples/mnist.py", 132, "lr: float = {learning_rate},", "learning_rate"),
        ),
    ),
    Stranger(
        "ignite-mnist", "vision, ignite's Engine", "sdist:pytorch-ignite==0.5.5", words("mnist.py"), 64,
        made.digits("MNIST/raw"), "examples/mnist", "830fca7d5b58",
    ),
    Stranger(
        "ignite-cifar10", "vision, ignite's Engine, arguments by fire", "sdist:pytorch-ignite==0.5.5",
        words("main.py run --batch_size 16 --num_workers 0 --data_path data --output_path out"), 16,
        folder="examples/cifar10", sha256="393eee390e38",
        changes=(
            Change("examples/cifar10/utils.py", 28, "train_ds = datasets.FakeData(3_200, (3, 32, 32), 10, train_transform)"),
            Change("examples/cifar10/utils.py", 29, "test_ds = datasets.FakeData(320, (3, 32, 32), 10, test_transform)"),
        ),
        by_hand=(
            Change("examples/cifar10/main.py", 143, "learning_rate: float = {learning_rate},", "learning_rate"),
            Change("examples/cifar10/main.py", 212, 'train_dataset, batch_size={micro_batch_size}, num_workers=config["num_workers"], shuffle=True, drop_last=True', "micro_batch_size"),
        ),
    ),
    Stranger(
        "opacus-mnist", "vision, private gradients", "sdist:opacus==1.6.0",
        words("mnist.py --device=cpu -n=15 --lr=.25 --sigma=1.3 -c=1.5 -b=240 --data-root data"), 240,
        made.digits("data/MNIST/raw"), "examples", "14e9a51180f5", no_study=("privacy", "changes the gradient"),
    ),
    Stranger(
        "spikingjelly-lif-fc", "vision, spiking network over time steps, -m", "installed:spikingjelly==2.0.0",
        words("-m spikingjelly.activation_based.examples.lif_fc_mnist -tau 2.0 -T 8 -device cpu -b 64 -epochs 2 -data-dir data -j 0"), 64,
        made.digits("data/MNIST/raw"),
    ),
    Stranger(
        "spikingjelly-conv", "vision, spiking network over time steps, -m", "installed:spikingjelly==2.0.0",
        words("-m spikingjelly.activation_based.examples.conv_fashion_mnist -T 4 -device cpu -b 16 -epochs 2 -data-dir data -j 0 -channels 8 -opt adam"), 16,
        made.digits("data/FashionMNIST/raw"),
    ),
    Stranger(
        "e3nn-tetris", "graphs, one batch of all", "sdist:e3nn==0.6.0", words("tetris.py"), 8,
        folder="examples", sha256="fd2c02c59108", no_study=("rows", "whole graph", "cannot be split"),
    ),
    Stranger(
        "poutyne-classification", "tabular, poutyne's Model.fit", "sdist:poutyne==1.19.0", words("basic_random_classification.py"), 32,
        folder="examples", sha256="d5e0e9fae967",
        by_hand=(
            Change("examples/basic_random_classification.py", 40, "torch.optim.SGD(network.parameters(), lr={learning_rate}),", "learning_rate"),
            Change("examples/basic_random_classification.py", 50, "batch_size={micro_batch_size},", "micro_batch_size"),
        ),
    ),
    Stranger(
        "poutyne-pure-pytorch", "vision, plain loop without flags", "sdist:poutyne==1.19.0", words("pure_pytorch.py"), 32,
        made.digits("datasets/MNIST/raw", 60_000, 10_000), "examples/medium_post", "8c35112fa148",
        by_hand=(
            Change("examples/medium_post/pure_pytorch.py", 32, "optimizer = optim.SGD(network.parameters(), lr={learning_rate})", "learning_rate"),
            Change("examples/medium_post/pure_pytorch.py", 34, "train_loader = DataLoader(train_dataset, batch_size={micro_batch_size}, shuffle=True)", "micro_batch_size"),
        ),
    ),
    Stranger(
        "forecasting-nbeats", "time series, Lightning", "sdist:pytorch-forecasting==1.8.0", words("nbeats.py"), 128,
        folder="examples", sha256="d099616908d5",
        by_hand=(
            Change("examples/nbeats.py", 48, "batch_size = {micro_batch_size}", "micro_batch_size"),
            Change("examples/nbeats.py", 77, "learning_rate={learning_rate},", "learning_rate"),
        ),
        changes=(
            Change("examples/nbeats.py", 11, 'sys.path.append(".."); NBeats.on_after_backward = pl.LightningModule.on_after_backward', "product"),
        ),
    ),
    Stranger(
        "open-clip", "images and text, contrastive loss of the whole batch, -m", "installed:open-clip-torch==3.3.0",
        words(
            "-m open_clip_train.main --train-data data/train.csv --csv-img-key filepath --csv-caption-key title --warmup 10 --batch-size 4 "
            "--lr 1e-3 --wd 0.1 --epochs 1 --workers 0 --model ViT-S-32-alt --device cpu"
        ), 4,
        made.captions("data"), no_study=("whole batch", "cannot be split", "contrastive"),
    ),
)  # fmt: skip

FROM_REPOSITORIES = (
    Stranger(
        "tiny-diffusion", "2-D points, diffusion, plain loop", "github:tanelp/tiny-diffusion@726b6bbbf2c9e3d23dff9eaea2fda10d0af6a78c",
        words("ddpm.py"), 32, sha256="faa1399945f4",
    ),
    Stranger(
        "chinese-text-cnn", "text, plain loop over an iterator of its own", "github:649453932/Chinese-Text-Classification-Pytorch@6cb26819af7b646275aff8a4693676f2849e67f6",
        words("run.py --model TextCNN"), 128, made.headlines("THUCNews/data"), sha256="c2763584b672",
        by_hand=(
            Change("models/TextCNN.py", 31, "self.batch_size = {micro_batch_size}", "micro_batch_size"),
            Change("models/TextCNN.py", 33, "self.learning_rate = {learning_rate}", "learning_rate"),
        ),
        changes=(
            Change("utils.py", 117, "iter = torch.utils.data.DataLoader([((torch.tensor(one[0]), torch.tensor(one[2])), one[1]) for one in dataset], config.batch_size)", "product"),
        ),
    ),
    Stranger(
        "pytorch-cifar100", "vision, plain loop, warm-up of its own", "github:weiaicunzai/pytorch-cifar100@11d8418f415b261e4ae3cb1ffe20d06ec95b98e4",
        words("train.py -net squeezenet -b 32"), 32, sha256="e416bd4a4b72", changes=CIFAR100_UTILS,
    ),
    Stranger(
        "ncrfpp", "text, sequence labels by a CRF, slices of a list, a config file", "github:jiesutd/NCRFpp@105a53a321eca9c1280037c473967858e01aaa43",
        words("main.py --config demo.train.config"), 10, made.word_vectors("sample_data/sample.word.emb", 50), sha256="13d29943bb7f",
        by_hand=(
            Change("demo.train.config", 36, "batch_size={micro_batch_size}", "micro_batch_size"),
            Change("demo.train.config", 46, "learning_rate={learning_rate}", "learning_rate"),
        ),
    ),
    Stranger(
        "torchdiffeq-ode", "trajectories, get_batch without arguments", "github:rtqichen/torchdiffeq@657943acefa826ef04c025ebeb1ff5e9d60dc268",
        words("ode_demo.py"), 20, folder="examples", sha256="36cc0ebfcf56",
        by_hand=(
            Change("examples/ode_demo.py", 156, "optimizer = optim.RMSprop(func.parameters(), lr={learning_rate})", "learning_rate"),
        ),
    ),
    Stranger(
        "time-series-library", "time series, loop in a class", "github:thuml/Time-Series-Library@4e938a1767106324dd753b2a44832bf870a0252e",
        words(
            "run.py --task_name long_term_forecast --is_training 1 --root_path ./dataset/ETT-small/ --data_path ETTh1.csv --model_id test_long "
            "--model DLinear --data ETTh1 --features M --seq_len 96 --pred_len 96 --enc_in 7 --dec_in 7 --c_out 7 --train_epochs 1 --num_workers 2 --no_use_gpu"
        ), 32, made.hours("dataset/ETT-small/ETTh1.csv"), sha256="db6dfa215520",
    ),
    Stranger(
        "pyg-gin", "graphs, batches of a library's own class", "github:pyg-team/pytorch_geometric@5c6461b2305ad068a6d61165b3c55852a11aaa41",
        words("mutag_gin.py"), 128, made.molecules("../data/TU"), "examples", "fb91910c14cb",
    ),
    Stranger(
        "pyg-gcn", "graphs, one graph in every step", "github:pyg-team/pytorch_geometric@5c6461b2305ad068a6d61165b3c55852a11aaa41",
        words("gcn.py"), 1, made.citations("../data/Planetoid"), "examples", "4222098f1ec1", no_study=("rows", "whole graph", "cannot be split"),
    ),
    Stranger(
        "diffusers-unconditional", "vision, diffusion, accelerate launch, average of the weights", "github:huggingface/diffusers@58eb52c0803ea9af3abec60841c2a093bdf1f951",
        words(
            "train_unconditional.py --train_data_dir data/train --model_config_name_or_path unet --resolution=32 --center_crop --random_flip --output_dir=out "
            "--train_batch_size=8 --num_epochs=100 --gradient_accumulation_steps=2 --use_ema --learning_rate=1e-4 --lr_warmup_steps=500 --mixed_precision=no"
        ), 16, made.together(made.image_folders("data", 48, 4, 64), made.denoiser("unet")), "examples/unconditional_image_generation",
        "0314b03f4fa7", launcher=words("accelerate launch"),
        changes=(
            Change("examples/unconditional_image_generation/train_unconditional.py", 624, "loss = None", "product"),
        ),
    ),
    Stranger(
        "accelerate-nlp", "text, accelerate", "github:huggingface/accelerate@16cb6eb80dd9aa8b4df1a63ef57863e455d53b83",
        words("nlp_example.py --cpu"), 16, made.together(made.language_model("model", "bert"), made.sentence_pairs("data")),
        "examples", "199f1d6d2b38",
        (
            Change("examples/nlp_example.py", 58, 'tokenizer = AutoTokenizer.from_pretrained("model")'),
            Change("examples/nlp_example.py", 59, f"datasets = {MRPC}"),
            Change("examples/nlp_example.py", 122, "metric = None"),
            Change("examples/nlp_example.py", 133, 'model = AutoModelForSequenceClassification.from_pretrained("model", return_dict=True)'),
        ),
        (
            Change("examples/nlp_example.py", 117, 'lr = {learning_rate}', "learning_rate"),
            Change("examples/nlp_example.py", 120, "batch_size = {micro_batch_size}", "micro_batch_size"),
        ),
    ),
    Stranger(
        "lightning-cli", "vision, Lightning with LightningCLI and a data module", "github:Lightning-AI/pytorch-lightning@7f0c3436cd3f6ad3753125672024fc415cbcb414",
        words("backbone_image_classifier.py"), 32, made.digits("../../Datasets/MNIST/raw", 60_000, 10_000),
        "examples/pytorch/basics", "a34c1eda8065",
        (
            Change("examples/pytorch/basics/backbone_image_classifier.py", 29, "from torchvision.datasets import MNIST"),
            Change("examples/pytorch/basics/backbone_image_classifier.py", 130, "LitClassifier, MyDataModule, seed_everything_default=1234, save_config_callback=None, run=False", "product"),
        ),
        (
            Change("examples/pytorch/basics/backbone_image_classifier.py", 66, "def __init__(self, backbone: Optional[Backbone] = None, learning_rate: float = {learning_rate}):", "learning_rate"),
            Change("examples/pytorch/basics/backbone_image_classifier.py", 106, "def __init__(self, batch_size: int = {micro_batch_size}):", "micro_batch_size"),
        ),
    ),
    Stranger(
        "rnn-regressor", "sequence, a hidden state that is carried from step to step", "github:MorvanZhou/PyTorch-Tutorial@dbe154a9e56635e51c6b0c2ccea8ae36cfb585a7",
        words("403_RNN_regressor.py"), 1, folder="tutorial-contents", sha256="f42bc41bd883",
        no_study=("h_state", "hidden state"),
    ),
    Stranger(
        "gan", "vision, two networks by turns", "github:eriklindernoren/PyTorch-GAN@36d3c77e5ff20ebe0aeefd322326a134a279b93e",
        words("gan.py"), 64, made.digits("../../data/mnist/MNIST/raw"), "implementations/gan", "0ad6b685446e",
        no_study=("two optimizers", "another optimizer"), tried=True,
    ),
    Stranger(
        "imagenet", "vision, plain loop, made data, distributed if asked", "github:pytorch/examples@77f55b912142e11fcfdf5b530231fb9c52f181e8",
        words("main.py -a squeezenet1_1 --dummy -b 4 -j 0"), 4, folder="imagenet", sha256="f67ca2cd730b",
    ),
    Stranger(
        "mnist-rnn", "vision as a sequence, plain loop, schedule by epochs", "github:pytorch/examples@77f55b912142e11fcfdf5b530231fb9c52f181e8",
        words("main.py"), 64, made.digits("../data/MNIST/raw"), "mnist_rnn", "ebd462cfda1f",
    ),
    Stranger(
        "mnist-hogwild", "vision, trains in processes of its own", "github:pytorch/examples@77f55b912142e11fcfdf5b530231fb9c52f181e8",
        words("main.py --num-processes 2 --epochs 1"), 64, made.digits("../data/MNIST/raw"), "mnist_hogwild", "ae3d2ccedb48",
        no_study=("processes", "process"),
    ),
    Stranger(
        "timm", "vision, factories for everything", "github:huggingface/pytorch-image-models@aa4b5850c1543fa488abf260f18390eda46cf85d",
        words("train.py --data-dir data --model resnet10t --num-classes 4 -b 8 --img-size 64 --epochs 2 --workers 1 --device cpu"), 8,
        made.image_folders("data", 64, 4, 64), sha256="f0bb70b9e1c8",
    ),
    Stranger(
        "tcn-pmnist", "vision as a sequence, plain loop, permuted", "github:locuslab/TCN@2f8c2b817050206397458dfd1f5a25ce8a32fe65",
        words("pmnist_test.py --cuda --nhid 8 --levels 6 --batch_size 16"), 16,
        made.digits("data/mnist/MNIST/raw"), "TCN/mnist_pixel", "9de7b920bb47",
    ),
    Stranger(
        "feedforward", "vision, plain loop without flags", "github:patrickloeber/pytorchTutorial@69637721ed9fa2ccf81a1093a928a52bbb591439",
        words("13_feedforward.py"), 100, made.digits("data/MNIST/raw"), sha256="955e3bf44b46",
        by_hand=(
            Change("13_feedforward.py", 15, "batch_size = {micro_batch_size}", "micro_batch_size"),
            Change("13_feedforward.py", 16, "learning_rate = {learning_rate}", "learning_rate"),
        ),
    ),
    Stranger(
        "logistic-regression", "tabular, all rows in every step", "github:patrickloeber/pytorchTutorial@69637721ed9fa2ccf81a1093a928a52bbb591439",
        words("08_logistic_regression.py"), 64, sha256="d7b9a4c34e11",
        by_hand=(
            Change("08_logistic_regression.py", 44, "learning_rate = {learning_rate}", "learning_rate"),
        ),
    ),
    Stranger(
        "deepctr", "tabular, Model.fit of its own", "github:shenweichen/DeepCTR-Torch@f6854257b1fc29caab655ce72c6b5528b7432574",
        words("run_classification_criteo.py"), 32, made.clicks("criteo_sample.txt"), "examples", "9b5f163169a1",
        by_hand=(
            Change("examples/run_classification_criteo.py", 58, 'model.compile(torch.optim.Adagrad(model.parameters(), lr={learning_rate}), "binary_crossentropy",', "learning_rate"),
            Change("examples/run_classification_criteo.py", 61, "history = model.fit(train_model_input, train[target].values, batch_size={micro_batch_size}, epochs=10, verbose=2,", "micro_batch_size"),
        ),
    ),
)  # fmt: skip

STRANGERS = (*FROM_PACKAGES, *FROM_REPOSITORIES)

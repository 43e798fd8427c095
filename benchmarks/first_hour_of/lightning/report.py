import lightning
import sets
import torch
from lightning.pytorch.tuner import Tuner  # pyright: ignore[reportPrivateImportUsage]
from net import Net
from torch import nn
from torch.utils.data import DataLoader


class Lit(lightning.LightningModule):
    def __init__(self, batch_size: int = 2, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = Net()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(sets.make()[0], batch_size=self.hparams["batch_size"], shuffle=True)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


model = Lit()
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu")
tuner = Tuner(trainer)
tuner.scale_batch_size(model, mode="binsearch")
finder = tuner.lr_find(model)
print("answer:", model.hparams)
assert finder is not None
figure = finder.plot(suggest=True)
figure.savefig("learning_rate.png")  # pyright: ignore[reportOptionalMemberAccess]

import torch
import toy
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size
from net import Net
from torch import nn
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)


@find_executable_batch_size(starting_batch_size=2048)
def train(batch_size: int) -> None:
    accelerator.free_memory()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(toy.make()[0], batch_size=batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
    print("answer:", batch_size)


train()  # pyright: ignore[reportCallIssue]

"""Any data of the shape that the user's model takes, for a first try."""

import torch
from torch.utils.data import Dataset, TensorDataset


def make(num_samples: int = 4096) -> tuple[Dataset, Dataset]:
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(num_samples, 64, generator=random), torch.randint(10, (num_samples,), generator=random)
    return TensorDataset(x[:-512], y[:-512]), TensorDataset(x[-512:], y[-512:])

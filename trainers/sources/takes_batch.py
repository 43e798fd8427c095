"""TakesBatch: a module whose forward takes a batch as it is."""

from __future__ import annotations

from torch import nn


class TakesBatch(nn.Module):
    """A module whose forward takes a batch as it is, however that is made up."""

"""Did two runs of the same samples end at the same weights?

rho = |w_a - w_b| / |w_a - w_0|: the distance between the two ends in units of the way travelled, in float64.
(The Jaccard similarity of the files' byte values, sometimes used, is 100 % for any two files of a few kilobytes.)
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from batchscout.trainers.checksums import Damaged, load_tensors, save_tensors
from batchscout.trainers.files import quoted
from batchscout.trainers.model.frozen import frozen_of, tensors_of
from batchscout.trainers.model.parallel import local, whole

Weights = dict[str, Tensor]


def weights_of(model: nn.Module) -> Weights:
    """Return a copy of every trained parameter and buffer that is no count on the host. If the model is sharded, all ranks call
    this."""
    frozen = frozen_of(model)
    state = {name: value for name, value in tensors_of(model.state_dict()).items() if name not in frozen}
    inexact = {name: value for name, value in state.items() if value.is_floating_point() or value.is_complex()}
    return {name: local(whole(value.detach()).cpu().clone()) for name, value in inexact.items()}


def rho(final: Weights, reference_final: Weights, initial: Weights) -> float:
    """Return the distance of two ends over the length of the reference's way. Raises ValueError where they do not
    compare."""
    if final.keys() != reference_final.keys():
        raise ValueError(
            "the two runs have different parameters and cannot be compared; use the same model configuration for both"
        )
    travelled = _distance(reference_final, initial)
    if travelled == 0:
        raise ValueError(
            "the reference run moved no weight, so rho has no scale; raise the learning rate or the budget"
        )
    return _distance(final, reference_final) / travelled


def _distance(a: Weights, b: Weights) -> float:
    return sum((a[name].double() - b[name].double()).square().sum().item() for name in a) ** 0.5


def save_weights(path: Path, initial: Weights, final: Weights) -> None:
    """Write both ends of a run to a file, for another run's rho."""
    save_tensors(path, {"initial": initial, "final": final})


def rho_to_file(final: Weights, path: Path) -> float:
    """Return rho against the run whose weights `save_weights` has written to `path`. Raises ValueError where they are
    damaged."""
    try:
        reference = load_tensors(path, mmap=True)
    except Damaged as error:
        raise ValueError(
            f"the reference weights {quoted(path)} are damaged ({error}); run the reference again"
        ) from error
    return rho(final, reference["final"], reference["initial"])

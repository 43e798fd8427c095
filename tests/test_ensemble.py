"""A member of an ensemble is the run that torch's own optimizers make of it alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from ensemble import AdamW, Ensemble, Muon, Sgd, ensemble, unstacked
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.every import for_every

SHAPES = {"matrix": (3, 5), "bias": (5,), "head": (5, 1)}
RATES, DECAYS = torch.tensor([0.003, 0.03, 0.03]), torch.tensor([0.1, 0.1, 0.4])
MEMBERS, BATCH, NUM_STEPS, CLIP = 3, 4, 12, 0.5


def loss(weights: Mapping[str, Tensor], inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    hidden = torch.tanh(inputs @ weights["matrix"] + weights["bias"][:, None])
    errors = (hidden @ weights["head"]).squeeze(-1) - targets
    return errors.square().sum(1), torch.full((len(targets),), targets.shape[1])


def members(optimizer: AdamW | Sgd | Muon) -> Ensemble:
    weights = torch.randn(MEMBERS, 25, generator=torch.Generator().manual_seed(0))
    return ensemble(SHAPES, loss, optimizer, weights, RATES, DECAYS)


def samples() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shapes = (MEMBERS, BATCH, 3), (MEMBERS, BATCH)
    steps = [tuple(torch.randn(shape, generator=generator) for shape in shapes) for _ in range(NUM_STEPS)]
    return [(inputs, 5 * targets) for inputs, targets in steps]


def schedule(step: int) -> float:
    return min(1.0, (step + 1) / 5)


def trained(state: Ensemble, data: list[tuple[Tensor, Tensor]]) -> Tensor:
    for step, (inputs, targets) in enumerate(data):
        state = state.step(inputs, targets, schedule(step))
    return state.weights


def references(
    weights: Mapping[str, nn.Parameter], optimizer: AdamW | Sgd | Muon, decay: float
) -> list[torch.optim.Optimizer]:
    """Return torch's own optimizers of these weights."""
    muons = [weights[name] for name in optimizer.matrices] if isinstance(optimizer, Muon) else []
    decayed = [weights[name] for name in ("matrix", "head") if weights[name] not in set(muons)]
    groups = [{"params": decayed, "weight_decay": decay}, {"params": [weights["bias"]], "weight_decay": 0.0}]
    if isinstance(optimizer, Sgd):
        return [torch.optim.SGD(groups, momentum=0.9)]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    if not muons:
        return [adamw]
    return [torch.optim.Muon(muons, weight_decay=decay, adjust_lr_fn="match_rms_adamw"), adamw]


def trained_alone(member: int, optimizer: AdamW | Sgd | Muon) -> tuple[Tensor, list[float]]:
    """Return the weights of one member after torch's own steps, and the norms of its gradients."""
    start = members(optimizer).weights[member : member + 1].clone()
    weights = {name: nn.Parameter(part[0].clone()) for name, part in unstacked(start, SHAPES).items()}
    reference = references(weights, optimizer, float(DECAYS[member]))
    norms: list[float] = []
    for step, (inputs, targets) in enumerate(samples()):
        for group in (group for one in reference for group in one.param_groups):
            group["lr"] = float(RATES[member]) * schedule(step)
        hidden = torch.tanh(inputs[member] @ weights["matrix"] + weights["bias"])
        for weight in weights.values():
            weight.grad = None
        F.mse_loss((hidden @ weights["head"]).squeeze(-1), targets[member]).backward()
        norms.append(float(nn.utils.clip_grad_norm_(weights.values(), CLIP)))
        for one in reference:
            one.step()
    return torch.cat([weight.detach().flatten() for weight in weights.values()]), norms


@for_every(
    optimizer=[AdamW(), Sgd(), Muon(frozenset({"matrix"})), Muon(frozenset({"matrix", "head"}))], member=range(MEMBERS)
)
def test_a_member_is_trained_as_torch_trains_it_alone(optimizer: AdamW | Sgd | Muon, member: int) -> None:
    state = replace(members(optimizer), max_gradient_norm=CLIP)
    alone, norms = trained_alone(member, optimizer)
    assert max(norms) > CLIP, "clipping must have had something to do"
    torch.testing.assert_close(trained(state, samples())[member], alone, rtol=1e-5, atol=1e-5)


def test_a_member_that_has_diverged_disturbs_no_other() -> None:
    data = samples()
    data[3][0][1, 0, 0] = torch.inf
    whole, broken = trained(members(AdamW()), samples()), trained(members(AdamW()), data)
    assert not broken[1].isfinite().any()
    torch.testing.assert_close(broken[[0, 2]], whole[[0, 2]], rtol=0, atol=0)


def test_a_copy_goes_its_own_way() -> None:
    state = members(AdamW())
    before = state.weights.clone()
    trained(state.copy(), samples())
    assert state.weights.equal(before)


def test_losses_are_means_over_all_samples_whatever_the_chunks() -> None:
    inputs, targets = torch.randn(7, 3), torch.randn(7)
    state = members(AdamW())
    torch.testing.assert_close(state.losses(inputs, targets, chunk=2), state.losses(inputs, targets, chunk=7))

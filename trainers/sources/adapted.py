"""From whatever a callable returned to a module, two loaders and what they say, if it is an object that trains elsewhere."""

from __future__ import annotations

from typing import Any

from torch import nn

from batchscout.trainers.config import Schedule
from batchscout.trainers.sources import of_lightning, of_transformers
from batchscout.trainers.sources.kinds import is_transformers_trainer
from batchscout.trainers.sources.lightning_fit import fit_of
from batchscout.trainers.sources.of_lightning import OfLightning
from batchscout.trainers.sources.of_transformers import OfTrainer
from batchscout.trainers.sources.settings import OwnRun, Settings
from batchscout.trainers.sources.watch import loop as of_script
from batchscout.trainers.sources.watch import recipe
from batchscout.trainers.sources.watch.loop import Loop, OfLoop, WithoutLoss


def module_of(found: Any) -> nn.Module | None:
    """Return the module that trains as the object would; None of anything else. Raises ValueError where that would be a guess."""
    if (fit := fit_of(found)) is not None:
        return OfLightning(fit)
    if isinstance(found, Loop):
        return OfLoop(found) if found.loss is not None else WithoutLoss(found)
    return OfTrainer(found) if is_transformers_trainer(found) else None


def loaders_of(found: Any) -> tuple[Any, Any] | None:
    """Return the DataLoaders (train, val) of the object, whose val may be None; None of anything else."""
    if (fit := fit_of(found)) is not None:
        return fit.loaders()
    if isinstance(found, Loop):
        return found.loaders
    return of_transformers.loaders_of(found) if is_transformers_trainer(found) else None


def settings_of(found: Any, train_loader: Any) -> Settings:
    """Return what the object, which is one of these, says of a study."""
    if (fit := fit_of(found)) is not None:
        return of_lightning.settings(fit, train_loader)
    if isinstance(found, Loop):
        return recipe.settings(found)
    return of_transformers.settings(found)


def own_run_of(model: nn.Module) -> OwnRun | None:
    """Return the run that the object is set to which `module_of` has made this model of; None of any other model."""
    if isinstance(model, OfTrainer):
        said = of_transformers.settings(model.trainer)
        told = of_transformers.own_arguments(model.trainer.args)
        told |= {"rate_factor": of_transformers.rate_factor(model), "has_schedule": model.was_given_its_schedule}
        return _own_run(said, **told)
    if isinstance(model, OfLoop):
        return _own_run(recipe.settings(model.loop), library="script", adds_up=recipe.added_up(model.loop) > 1)
    if not isinstance(model, OfLightning) or (fit := model.fit) is None:
        return None
    if fit.trainer is None:
        return OwnRun("lightning")
    loader = fit.loader("train")
    said = of_lightning.settings(fit, loader)
    return _own_run(said, library="lightning", arguments=of_lightning.length_of(fit.trainer, loader))


def _own_run(said: Settings, **of_library: Any) -> OwnRun:
    schedule = said.keys.get("schedule")
    return OwnRun(
        samples=said.run_samples,
        samples_per_step=said.keys["optimizer"]["reference_batch_size"],
        in_steps=said.in_steps,
        schedule=None if schedule is None else Schedule.model_validate(schedule),
        recipe={
            **{key: said.keys[key] for key in ("optimizer", "precision") if key in said.keys},
            "batch": {**said.keys["batch"], "gradient_accumulation_steps": said.accumulation},
        },
        **of_library,
    )


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameters of a model that `module_of` made, in the groups of its own optimizer."""
    if isinstance(model, OfTrainer):
        return of_transformers.groups(model)
    if isinstance(model, OfLoop | WithoutLoss):
        return of_script.groups(model)
    assert isinstance(model, OfLightning), f"the groups of a {type(model).__name__} are not known"
    return of_lightning.groups(model)

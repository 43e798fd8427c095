"""Judges GPUs: whether they, their driver and torch go together, and whether they are free and enough."""

from __future__ import annotations

import re
from collections.abc import Iterator

from batchscout.orchestrator.doctor.check import Check
from batchscout.orchestrator.doctor.facts import Driver, Gpu, Needs, Torch
from batchscout.orchestrator.installed import admitted
from batchscout.orchestrator.units import bytes_text, counted
from batchscout.trainers.knobs import knob

SHARE_OF_OTHERS = 0.1
"""Of a GPU's memory: where more is taken, something else uses the GPU."""


def gpu(driver: Driver | None, found: Torch) -> Check:
    """Judge whether GPU, driver and torch go together."""
    if driver is None and not found.gpus:
        build = f"; torch is built for CUDA {found.cuda}" if found.cuda else ""
        return Check("gpu", f"none, so studies run on the CPU{build}")
    if driver is None:
        return Check("gpu", _named(found.gpus))
    has = f"{counted(driver.num_gpus, 'GPU')}, driver {driver.version} for CUDA up to {driver.cuda[0]}.{driver.cuda[1]}"
    if found.imported.error:
        return Check("gpu", has)
    if found.cuda is None:
        return Check(
            "gpu", f"{has}; torch {found.imported.version} is a build for CPUs, and uses none of them", "fault",
            f"install a build for CUDA: {_install(driver)}",
        )  # fmt: skip
    if int(found.cuda.split(".")[0]) > driver.cuda[0]:
        return Check(
            "gpu", f"{has}; torch {found.imported.version} is built for CUDA {found.cuda}, which this driver cannot run", "fault",
            f"update the driver, or install a build for its CUDA: {_install(driver)}",
        )  # fmt: skip
    if not found.gpus:
        said = found.why_none or "it does not say why"
        return Check(
            "gpu", f"{has}; torch {found.imported.version} for CUDA {found.cuda} finds none: {said}", "fault",
            "check CUDA_VISIBLE_DEVICES, that nvidia-smi works as this user, and in a container that it was started with --gpus all",
        )  # fmt: skip
    without = [one for one in found.gpus if not has_kernels(one.capability, found.kernels)]
    if without:
        return Check(
            "gpu", f"{_named(without)} has compute capability {_dotted(without[0])}; torch {found.imported.version} has kernels for "
            f"{', '.join(found.kernels)}", "fault", "install a build of torch that has kernels for it, or use another GPU",
        )  # fmt: skip
    return Check("gpu", f"{_named(found.gpus)}; driver {driver.version}, torch for CUDA {found.cuda}")


def _install(driver: Driver) -> str:
    """Return the command that installs torch's wheels for what this driver can run."""
    build = "cu130" if driver.cuda >= (13, 0) else "cu126"
    return f"pip install '{admitted('torch')}' --index-url https://download.pytorch.org/whl/{build}"


def _named(gpus: tuple[Gpu, ...] | list[Gpu]) -> str:
    names, first = [one.name for one in gpus], {one.name: one for one in reversed(gpus)}
    return ", ".join(
        f"{names.count(name)} x {name} ({bytes_text(first[name].total_bytes)})" for name in dict.fromkeys(names)
    )


def _dotted(one: Gpu) -> str:
    return ".".join(map(str, one.capability))


def has_kernels(capability: tuple[int, int], kernels: tuple[str, ...]) -> bool:
    """True if code built for these runs on a GPU: machine code within a major version, and what is compiled for a lower one as it is
    loaded (compute_...) on all later ones."""
    for kernel in kernels:
        if found := re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", kernel):
            kind, built = found[1], (int(found[2]), int(found[3]))
            if built <= capability and (kind == "compute" or built[0] == capability[0]):
                return True
    return False


def gpus_for_ranks(gpus: tuple[Gpu, ...], needs: Needs) -> Iterator[Check]:
    """Name a study that asks for more ranks than there are GPUs."""
    if 0 < len(gpus) < needs.num_ranks:
        said = f"the study file asks for {counted(needs.num_ranks, 'rank')}, and there is {counted(len(gpus), 'GPU')}"
        remedy = "lower world_size or placement.lanes, or run on a cluster (--address)"
        yield Check("gpus for ranks", said, "fault", remedy)


def memory_knobs(needs: Needs, *, on_gpu: bool) -> Iterator[Check]:
    """Name knobs of a study for which this machine lacks a GPU."""
    for name in needs.memory_knobs:
        finding, _, remedy = knob(name).missing("cuda" if on_gpu else "cpu").rpartition("; ")
        if finding:
            yield Check("memory knobs", f"memory_knobs has {name}: {finding}", "fault", remedy)


def gpus_taken(gpus: tuple[Gpu, ...]) -> Iterator[Check]:
    """Name GPUs of which something else takes memory."""
    for number, one in enumerate(gpus):
        taken = one.total_bytes - one.free_bytes
        if taken > SHARE_OF_OTHERS * one.total_bytes:
            yield Check(
                f"gpu {number}", f"{bytes_text(taken)} of its {bytes_text(one.total_bytes)} are in use", "warning",
                "end what else uses it (see: nvidia-smi): a study measures memory and speed of what is left",
            )  # fmt: skip

"""Judges what was observed: each check is a pure function of facts, so that every verdict can be tested without the hardware."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from orchestrator.doctor.facts import (
    Cluster,
    Compiler,
    Disk,
    Driver,
    Gpu,
    Hub,
    Imported,
    Limits,
    Memory,
    Needs,
    Processors,
    Seen,
    Torch,
    Tracker,
)
from orchestrator.units import bytes_text, counted
from trainers.files import quoted

Verdict = Literal["ok", "warning", "fault"]
"""ok: a study works here as far as this goes. warning: it works, and something will be slower, or less sure. fault: something that was
asked for does not work."""

GIB = 2**30
LEAST_MEMORY_BYTES = 2 * GIB
"""Driver, Ray's servers and one rank take about 1 GiB before a model does, and Ray ends processes where a host is nearly full."""
LEAST_DISK_BYTES, LITTLE_DISK_BYTES = GIB, 10 * GIB
LEAST_SHARED_MEMORY_BYTES = GIB
"""Docker gives 64 MiB, which Ray's object store or a few batches of data workers fill."""
LEAST_OPEN_FILES = 4096
"""Ray itself warns below this."""
SHARE_OF_OTHERS = 0.1
"""Of a GPU's memory: where more is taken, something else uses the GPU."""
BUSY_SHARE = 0.5
"""Of the cores: where the load is higher before a study has begun, timings will scatter."""


@dataclass(frozen=True)
class Check:
    name: str
    finding: str
    verdict: Verdict = "ok"
    remedy: str = ""
    """What to do; empty where all is well."""


def all_checks(seen: Seen) -> list[Check]:
    """Return what there is to say of a machine, in the order in which a study would need it."""
    needs = replace(seen.needs, world_size=1) if seen.cluster.address else seen.needs  # ranks are the cluster's then
    return [
        processors(seen.processors, needs, has_gpus=bool(seen.torch.gpus)),
        memory(seen.memory),
        torch(seen.torch.imported),
        gpu(seen.driver, seen.torch),
        *gpus_for_ranks(seen.torch.gpus, needs),
        *gpus_taken(seen.torch.gpus),
        compiler(seen.compiler, seen.needs, on_gpu=bool(seen.torch.gpus)),
        *map(disk, seen.disks),
        ray(seen.ray),
        *limits(seen.limits),
        cluster(seen.cluster),
        hub(seen.hub, seen.needs),
        libraries(seen.installed, seen.needs),
        wandb(seen.tracker),
    ]


def worst(checks: list[Check]) -> Verdict:
    verdicts = {check.verdict for check in checks}
    return "fault" if "fault" in verdicts else "warning" if "warning" in verdicts else "ok"


def processors(found: Processors, needs: Needs, *, has_gpus: bool) -> Check:
    held = [
        f"this process may use {found.allowed}" if found.allowed < found.cores else "",
        f"its control group gives it the time of {found.quota:g}" if found.quota is not None else "",
    ]
    said = ", ".join([f"{found.system}, {counted(found.cores, 'core')}", *filter(None, held)])
    if found.system != "Linux":
        return Check("processors", said, "fault", "run on Linux: memory limits and processes are Linux's here")
    ranks = 1 if has_gpus else needs.world_size
    if found.usable < ranks:
        return Check(
            "processors", f"{said}; the study file asks for {counted(ranks, 'rank')}", "fault", f"set world_size to {max(1, int(found.usable))}, or give it more cores"
        )  # fmt: skip
    if found.usable < 2:
        return Check(
            "processors",
            said,
            "warning",
            "give it two cores: with one, driver and rank take turns, and timings scatter",
        )
    if found.load > BUSY_SHARE * found.usable:
        busy = f"{said}; a load of {found.load:.1f} before a study has begun"
        return Check("processors", busy, "warning", "end what else runs, as a study decides by timings (see: top)")
    return Check("processors", said)


def memory(found: Memory) -> Check:
    group = f"; the control group's limit is {bytes_text(found.group_limit_bytes)}" if found.group_limit_bytes else ""
    said = f"{bytes_text(found.available_bytes)} available of {bytes_text(found.total_bytes)}{group}"
    if found.available_bytes < LEAST_MEMORY_BYTES:
        least = bytes_text(LEAST_MEMORY_BYTES)
        return Check("memory", said, "fault", f"free or add memory: a study wants {least} before its model's own")
    return Check("memory", said)


def torch(found: Imported) -> Check:
    return _imported("torch", found, "install it anew: pip install 'torch>=2.11,<2.14'")


def ray(found: Imported) -> Check:
    return _imported("ray", found, "install it anew: pip install 'ray[default,tune,train]>=2.60,<2.61'")


def _imported(name: str, found: Imported, remedy: str) -> Check:
    if found.error:
        return Check(name, f"cannot be imported: {found.error}", "fault", remedy)
    return Check(name, f"{name} {found.version}")


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
            f"install a build for CUDA: pip install 'torch>=2.11,<2.14' --index-url https://download.pytorch.org/whl/{_wheels(driver)}",
        )  # fmt: skip
    if int(found.cuda.split(".")[0]) > driver.cuda[0]:
        return Check(
            "gpu", f"{has}; torch {found.imported.version} is built for CUDA {found.cuda}, which this driver cannot run", "fault",
            f"update the driver, or install a build for its CUDA: pip install 'torch>=2.11,<2.14' --index-url https://download.pytorch.org/whl/{_wheels(driver)}",
        )  # fmt: skip
    if not found.gpus:
        said = found.why_none or "it says no more"
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


def _wheels(driver: Driver) -> str:
    """Return the folder of torch's wheels for what this driver can run."""
    return "cu130" if driver.cuda >= (13, 0) else "cu126"


def _named(gpus: tuple[Gpu, ...] | list[Gpu]) -> str:
    names = [one.name for one in gpus]
    return ", ".join(
        f"{names.count(name)} x {name} ({bytes_text(_of(gpus, name).total_bytes)})" for name in dict.fromkeys(names)
    )


def _of(gpus: tuple[Gpu, ...] | list[Gpu], name: str) -> Gpu:
    return next(one for one in gpus if one.name == name)


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
    if 0 < len(gpus) < needs.world_size:
        said = f"the study file asks for {counted(needs.world_size, 'rank')}, and there is {counted(len(gpus), 'GPU')}"
        yield Check("gpus for ranks", said, "fault", f"set world_size to {len(gpus)}, or run on a cluster (--address)")


def gpus_taken(gpus: tuple[Gpu, ...]) -> Iterator[Check]:
    """Name GPUs of which something else takes memory."""
    for number, one in enumerate(gpus):
        taken = one.total_bytes - one.free_bytes
        if taken > SHARE_OF_OTHERS * one.total_bytes:
            yield Check(
                f"gpu {number}", f"{bytes_text(taken)} of its {bytes_text(one.total_bytes)} are taken", "warning",
                "end what else uses it (see: nvidia-smi): a study measures memory and speed of what is left",
            )  # fmt: skip


def compiler(found: Compiler, needs: Needs, *, on_gpu: bool) -> Check:
    """Judge what torch.compile calls: on a CPU it writes C++, on a GPU Triton builds what calls its kernels in C."""
    language, package = ("C", "gcc python3-dev") if on_gpu else ("C++", "g++")
    bad: Verdict = "fault" if needs.compiles else "warning"
    without = "" if needs.compiles else "; the study file compiles nothing"
    install = f"install one (apt-get install {package}), name yours in {'CC' if on_gpu else 'CXX'}, or set compile: false, and compile: [false] in the frontier stage"
    if found.path is None:
        return Check(
            "compiler",
            f"torch.compile needs a {language} compiler, and there is no '{found.command}'{without}",
            bad,
            install,
        )
    if found.error:
        return Check(
            "compiler",
            f"{quoted(found.path)} cannot build what torch.compile writes: {found.error}{without}",
            bad,
            install,
        )
    return Check("compiler", f"{quoted(found.path)} builds what torch.compile writes")


def disk(found: Disk) -> Check:
    name, where = found.holds, quoted(found.path)
    if found.error:
        return Check(
            name,
            f"{where} cannot be written: {found.error}",
            "fault",
            f"make it writable, or choose another place: {found.key}",
        )
    said = f"{where} has {bytes_text(found.free_bytes)} free"
    if found.free_bytes < LEAST_DISK_BYTES:
        return Check(
            name, said, "fault", f"free at least {bytes_text(LEAST_DISK_BYTES)}, or choose another place: {found.key}"
        )
    if found.free_bytes < LITTLE_DISK_BYTES:
        return Check(
            name,
            said,
            "warning",
            f"keep an eye on it, or choose another place: {found.key}; a full disk halts a study, and loses nothing",
        )
    return Check(name, said)


def limits(found: Limits) -> Iterator[Check]:
    shared, files = found.shared_memory_bytes, found.open_files
    if shared is None or shared < LEAST_SHARED_MEMORY_BYTES:
        said = "there is no /dev/shm" if shared is None else f"/dev/shm has {bytes_text(shared)}"
        yield Check(
            "shared memory", f"{said}: Ray's object store goes to the disk, and data workers may die of a bus error", "warning",
            "in a container: docker run --shm-size=2g; elsewhere: mount -o remount,size=2G /dev/shm",
        )  # fmt: skip
    else:
        yield Check("shared memory", f"/dev/shm has {bytes_text(shared)}")
    if files < LEAST_OPEN_FILES:
        yield Check(
            "open files", f"at most {files:,}, and Ray wants {LEAST_OPEN_FILES:,}", "warning",
            "raise the limit (ulimit -Hn 65536 as root, or nofile in /etc/security/limits.conf)",
        )  # fmt: skip
    else:
        yield Check("open files", f"up to {files:,}")


def cluster(found: Cluster) -> Check:
    if not found.address:
        return Check("ray cluster", "RAY_ADDRESS is not set: batchscout run starts a cluster of its own")
    if found.error:
        return Check(
            "ray cluster", f"RAY_ADDRESS is {found.address}, and nothing answers there: {found.error}", "fault",
            "start the cluster, correct the address (6379 is Ray's default port), or unset RAY_ADDRESS",
        )  # fmt: skip
    return Check("ray cluster", f"one answers at RAY_ADDRESS, {found.address}: batchscout run --address auto uses it")


def hub(found: Hub, needs: Needs) -> Check:
    """Judge whether models and data can be had by their names. Being offline is no fault."""
    names = ", ".join(needs.hub_names)
    if not found.error and not found.is_offline:
        return Check("network", f"{found.address} answers")
    said = "HF_HUB_OFFLINE is set" if found.is_offline else f"{found.address} does not answer: {found.error}"
    if names:
        return Check(
            "network", f"{said}; the study file names {names}", "warning",
            "make sure that it was downloaded before, or name a folder in its place",
        )  # fmt: skip
    return Check("network", f"{said}; a study needs no network, but for models and data that it names as on the hub")


def libraries(installed: dict[str, str], needs: Needs) -> Check:
    said = ", ".join(f"{name} {version}" for name, version in installed.items()) or "no optional ones"
    missing = [name for name in needs.libraries if name not in installed]
    if missing:
        return Check(
            "libraries", f"the study file needs {', '.join(missing)}", "fault", f"pip install {' '.join(missing)}"
        )
    return Check("libraries", said)


def wandb(found: Tracker) -> Check:
    key = "a key is there" if found.has_key else "no key is there"
    if found.mode == "online" and not found.has_key:
        return Check(
            "wandb",
            f"tracking.wandb is online, and {key}",
            "fault",
            "run wandb login, set WANDB_API_KEY, or set tracking.wandb: offline",
        )
    return Check("wandb", f"tracking.wandb is {found.mode}; {key}")

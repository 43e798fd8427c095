"""Judges what was observed: each check is a pure function of facts, so that every verdict can be tested without the hardware."""

from __future__ import annotations

from collections.abc import Iterator

from batchscout.orchestrator.doctor.check import Check, Verdict
from batchscout.orchestrator.doctor.facts import (
    Cluster,
    Compiler,
    Disk,
    Hub,
    Imported,
    Memory,
    Needs,
    Processors,
    Seen,
)
from batchscout.orchestrator.doctor.gpus import gpu, gpus_for_ranks, gpus_taken, memory_knobs
from batchscout.orchestrator.environment import (
    Environment,
    Limits,
    beyond_memory,
    launcher_text,
    obstacles,
    obstacles_between_ranks,
    obstacles_here,
    settings_to_suspect,
)
from batchscout.orchestrator.installed import admitted, is_admitted
from batchscout.orchestrator.units import bytes_text, counted
from batchscout.trainers.files import quoted
from batchscout.trainers.launcher import is_a_launchers

GIB = 2**30
LEAST_MEMORY_BYTES = 2 * GIB
"""Driver, Ray's servers and one rank take about 1 GiB before a model does, and Ray ends processes where a host is nearly full."""
LEAST_DISK_BYTES, LITTLE_DISK_BYTES = GIB, 10 * GIB
LEAST_SHARED_MEMORY_BYTES = GIB
"""Docker gives 64 MiB, which Ray's object store or a few batches of data workers fill."""
LEAST_OPEN_FILES = 4096
"""Ray itself warns below this."""
BUSY_SHARE = 0.5
"""Of the cores: where the load is higher before a study has begun, timings will scatter."""
_AS_GOOD_AS = {"lightning": "pytorch-lightning"}
"""Another package of the same library."""


def all_checks(seen: Seen) -> list[Check]:
    """Return what there is to say of a machine, in the order in which a study would need it."""
    on_cluster = seen.cluster.address != "" and not seen.cluster.error
    needs = Needs() if on_cluster else seen.needs  # ranks are the cluster's then
    return [
        *environment(seen.environment, needs, on_gpu=bool(seen.torch.gpus)),
        processors(seen.processors, needs),
        memory(seen.memory, needs, on_gpu=bool(seen.torch.gpus)),
        imported("torch", seen.torch.imported, seen.environment),
        gpu(seen.driver, seen.torch),
        *gpus_for_ranks(seen.torch.gpus, needs),
        *gpus_taken(seen.torch.gpus),
        *memory_knobs(needs, on_gpu=bool(seen.torch.gpus)),
        compiler(seen.compiler, seen.needs, on_gpu=bool(seen.torch.gpus)),
        *map(disk, seen.disks),
        imported("ray", seen.ray, seen.environment),
        *limits(seen.environment.most),
        cluster(seen.cluster),
        hub(seen.hub, seen.needs),
        libraries(seen.installed, seen.needs),
        wandb(seen.needs, has_key=seen.has_wandb_key),
    ]


def environment(found: Environment, needs: Needs, *, on_gpu: bool) -> list[Check]:
    """Judge the settings and limits that the program is launched with."""
    in_the_way = (*obstacles(found), *obstacles_here(found, needs.world_size, on_gpu=on_gpu))
    checks = [Check("environment", one.finding, "fault", one.remedy) for one in in_the_way]
    if needs.world_size == 1:
        checks += [
            Check("environment", f"{one.finding}; a study of several ranks does not run so", "warning", one.remedy)
            for one in obstacles_between_ranks(found, on_gpu=on_gpu)
        ]
    launchers = [name for name in sorted(found.variables) if is_a_launchers(name)]
    unused = f"; {launcher_text(launchers)}" if launchers else ""
    return checks or [Check("environment", f"no setting or limit is in a study's way{unused}")]


def processors(found: Processors, needs: Needs) -> Check:
    held = [
        f"this process may use {found.allowed}" if found.allowed < found.cores else "",
        f"its control group gives it the time of {found.quota:g}" if found.quota is not None else "",
    ]
    said = ", ".join([f"{found.system}, {counted(found.cores, 'core')}", *filter(None, held)])
    if found.system != "Linux":
        return Check("processors", said, "fault", "run on Linux: memory limits and processes need it")
    needed = needs.num_ranks * needs.cpus_per_rank
    if int(found.usable) < needed and needed > 1:
        asked = f"{counted(needs.num_ranks, 'rank')} of {counted(needs.cpus_per_rank, 'core')} each"
        return Check(
            "processors", f"{said}; the study file asks for {asked}", "fault",
            "lower world_size, placement.lanes or placement.cpus_per_rank, or give it more cores",
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


def memory(found: Memory, needs: Needs, *, on_gpu: bool) -> Check:
    group = f"; the control group's limit is {bytes_text(found.group_limit_bytes)}" if found.group_limit_bytes else ""
    said = f"{bytes_text(found.available_bytes)} available of {bytes_text(found.total_bytes)}{group}"
    if found.available_bytes < LEAST_MEMORY_BYTES:
        least = bytes_text(LEAST_MEMORY_BYTES)
        return Check("memory", said, "fault", f"free or add memory: a study needs {least} besides its model")
    ranks = needs.memory_limit_bytes, needs.num_ranks
    if not on_gpu and (beyond := beyond_memory(*ranks, found.total_bytes, found.group_limit_bytes)) is not None:
        return Check("memory", beyond, "fault", "lower memory_limit, or leave it out, and each rank has an equal share")
    return Check("memory", said)


def imported(name: str, found: Imported, environment: Environment) -> Check:
    wanted = admitted(name)
    if found.error:
        suspects = settings_to_suspect(environment.variables)
        remedy = f"reinstall it: pip install '{wanted}'{suspects and f'; or {suspects}'}"
        return Check(name, f"cannot be imported: {found.error}", "fault", remedy)
    if not is_admitted(name, found.version):
        said = f"{name} {found.version}; batchscout runs with {wanted.specifier}"
        return Check(name, said, "fault", f"pip install '{wanted}'")
    return Check(name, f"{name} {found.version}")


def compiler(found: Compiler, needs: Needs, *, on_gpu: bool) -> Check:
    """Judge what torch.compile calls: on a CPU it writes C++, on a GPU Triton builds what calls its kernels in C."""
    language, package = ("C", "gcc python3-dev") if on_gpu else ("C++", "g++")
    bad: Verdict = "fault" if needs.compiles else "warning"
    without = "" if needs.compiles else "; the study file compiles nothing"
    install = f"install one (apt-get install {package}), name yours in {'CC' if on_gpu else 'CXX'}, or set compile: false, and compile: [false] in the frontier stage and in a grid that lists it"
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
            "open files", f"at most {files:,}, and Ray needs {LEAST_OPEN_FILES:,}", "warning",
            "raise the limit (ulimit -Hn 65536 as root, or nofile in /etc/security/limits.conf)",
        )  # fmt: skip
    else:
        yield Check("open files", f"up to {files:,}")


def cluster(found: Cluster) -> Check:
    if not found.address:
        return Check("ray cluster", "RAY_ADDRESS is not set: batchscout run starts a cluster of its own")
    if found.error:
        said = f"{found.error}: batchscout run starts a cluster of its own, and refuses --address auto"
        return Check("ray cluster", said, "warning", found.remedy)
    return Check(
        "ray cluster", f"a cluster answers at RAY_ADDRESS, {found.address}: batchscout run --address auto uses it"
    )


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
    return Check("network", f"offline, and needed only for models and data on the hub ({said})")


def libraries(installed: dict[str, str], needs: Needs) -> Check:
    said = ", ".join(f"{name} {version}" for name, version in installed.items()) or "no optional ones"
    missing = [name for name in needs.libraries if not {name, _AS_GOOD_AS.get(name)} & installed.keys()]
    if missing:
        return Check(
            "libraries", f"the study file needs {', '.join(missing)}", "fault", f"pip install {' '.join(missing)}"
        )
    return Check("libraries", said)


def wandb(needs: Needs, *, has_key: bool) -> Check:
    key = "a key is set" if has_key else "no key is set"
    if needs.wandb == "online" and not has_key:
        return Check(
            "wandb",
            f"tracking.wandb is online, and {key}",
            "fault",
            "run wandb login, set WANDB_API_KEY, or set tracking.wandb: offline",
        )
    return Check("wandb", f"tracking.wandb is {needs.wandb}; {key}")

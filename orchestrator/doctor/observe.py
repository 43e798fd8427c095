"""Looks at the machine. Everything that acts is here; nothing here judges."""

from __future__ import annotations

import importlib.metadata
import json
import netrc
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from batchscout.orchestrator.doctor.facts import (
    Cluster,
    Compiler,
    Disk,
    Driver,
    Gpu,
    Hub,
    Imported,
    Memory,
    Processors,
    Seen,
    Torch,
)
from batchscout.orchestrator.doctor.needs import needs_of, tree_of
from batchscout.orchestrator.environment import host_bytes, observed_environment
from batchscout.orchestrator.output.tracking import EXTRAS
from batchscout.orchestrator.units import ending_text
from batchscout.trainers.data.cache import cache_directory
from batchscout.trainers.device import cgroup

SECONDS_TO_IMPORT = 90
SECONDS_TO_CONNECT = 3
OPTIONAL = (
    *("transformers", "datasets", "peft", "lightning", "pytorch-lightning", "trl", "accelerate", "torchao", "wandb"),
    *(package for packages in EXTRAS.values() for package in packages),
)
_HUB = "https://huggingface.co"
# What inductor writes on a CPU includes OpenMP; Triton's launchers on a GPU include Python's header.
_SOURCES = {"c++": "#include <omp.h>\nint threads() { return omp_get_max_threads(); }\n", "c": "#include <Python.h>\n"}


def observe(study: Path | None, cluster: Cluster) -> Seen:
    """Return what is to be seen of this machine. study: a study file that is to run on it, whose code is not run. cluster: what was seen
    of one. Raises ValueError where the file cannot be read."""
    tree = {} if study is None else tree_of(study)
    needs = needs_of(tree)
    torch = _torch()
    name = str(tree.get("name") or (study.stem if study else "study"))
    return Seen(
        needs=needs,
        environment=observed_environment(),
        processors=Processors(
            platform.system(),
            os.cpu_count() or 1,
            len(os.sched_getaffinity(0)),
            cgroup.cpu_quota(),
            os.getloadavg()[0],
        ),
        memory=Memory(host_bytes(), cgroup.available_bytes(), cgroup.limit_bytes()),
        driver=_driver(),
        torch=torch,
        compiler=compiler_for("c" if torch.gpus else "c++"),
        disks=(
            disk_at("data cache", cache_directory(), "BATCHSCOUT_CACHE"),
            disk_at("run directory", Path("runs", name).absolute(), "--dir"),
        ),
        ray=import_elsewhere("ray")[0],
        cluster=cluster,
        hub=hub_at(os.environ.get("HF_ENDPOINT") or _HUB),
        has_wandb_key=_has_wandb_key(),
        installed=_installed(),
    )


def _driver() -> Driver | None:
    import pynvml

    try:
        pynvml.nvmlInit()
        cuda = pynvml.nvmlSystemGetCudaDriverVersion()
        version = pynvml.nvmlSystemGetDriverVersion()
        return Driver(str(version), (cuda // 1000, cuda % 1000 // 10), pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:  # there is no such library, or no GPU behind it
        return None


def _torch() -> Torch:
    imported, told = import_elsewhere("torch")
    if imported.error:
        return Torch(imported)
    gpus = tuple(Gpu(**{**one, "capability": tuple(one["capability"])}) for one in told["gpus"])
    return Torch(imported, told["cuda"], tuple(told["kernels"]), gpus, told["why_none"])


def import_elsewhere(name: str) -> tuple[Imported, dict[str, Any]]:
    """Import a library in a process of its own, and return what came of it, with what the process told."""
    command = [sys.executable, "-m", "batchscout.orchestrator.doctor.probe", name]
    path = os.pathsep.join([str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=SECONDS_TO_IMPORT
        )
    except subprocess.TimeoutExpired:
        return Imported(error=f"it has not returned for {SECONDS_TO_IMPORT} s"), {}
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        return Imported(error=said[-1] if said else ending_text(done.returncode)), {}
    told = json.loads(done.stdout.splitlines()[-1])
    return Imported(version=told["version"]), told


def compiler_for(language: str) -> Compiler:
    """Have the compiler that torch would call build a small library."""
    variable, usual = ("CXX", ["g++"]) if language == "c++" else ("CC", ["gcc", "clang"])
    commands = [own] if (own := os.environ.get(variable)) else usual
    path = next(filter(None, map(shutil.which, commands)), None)
    if path is None:
        return Compiler(" or ".join(commands), None)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "seen.cpp" if language == "c++" else "seen.c")
        source.write_text(_SOURCES[language])
        options = ["-fopenmp"] if language == "c++" else [f"-I{sysconfig.get_path('include')}"]
        command = [path, "-shared", "-fPIC", *options, str(source), "-o", str(source.with_suffix(".so"))]
        done = subprocess.run(command, capture_output=True, text=True)
    said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
    return Compiler(commands[0], path, said.replace(f"{source}:", "").strip() if done.returncode else "")


def disk_at(holds: str, path: Path, key: str) -> Disk:
    """Write a file where this would lie, or as near above it as there is a folder."""
    folder = next(parent for parent in (path, *path.parents) if parent.exists())
    try:
        free = shutil.disk_usage(folder).free
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"written")
    except OSError as error:
        return Disk(holds, path, key, error=error.strerror or str(error))
    return Disk(holds, path, key, free)


def hub_at(address: str) -> Hub:
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return Hub(address, is_offline=True)
    found = [Hub(address, error=f"no answer within {SECONDS_TO_CONNECT} s")]
    asking = threading.Thread(target=lambda: found.append(_asked(address)), daemon=True)
    asking.start()
    asking.join(SECONDS_TO_CONNECT)  # a name that no server resolves takes longer than the connection may
    return found[-1]


def _asked(address: str) -> Hub:
    try:
        request = urllib.request.Request(address, method="HEAD")
        urllib.request.urlopen(request, timeout=SECONDS_TO_CONNECT).close()
    except urllib.error.HTTPError as answer:
        answer.close()
    except (OSError, ValueError) as error:
        return Hub(address, error=str(getattr(error, "reason", error)))
    return Hub(address)


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("://")[2].strip("/")
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):  # no such file, or none that can be read
        return False


def _installed() -> dict[str, str]:
    named = [one for one in importlib.metadata.distributions() if one.metadata["Name"]]
    there = {one.metadata["Name"].lower(): one.version for one in named}
    return {name: there[name] for name in OPTIONAL if name in there}

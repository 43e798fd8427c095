"""What the doctor says of machines that are not at hand: every verdict by its text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchscout.orchestrator.doctor.check import Check, Verdict, worst
from batchscout.orchestrator.doctor.checks import (
    GIB,
    all_checks,
    cluster,
    compiler,
    disk,
    environment,
    hub,
    imported,
    libraries,
    limits,
    memory,
    processors,
    wandb,
)
from batchscout.orchestrator.doctor.facts import (
    Cluster,
    Compiler,
    Disk,
    Driver,
    Gpu,
    Hub,
    Imported,
    Memory,
    Needs,
    Processors,
    Seen,
    Torch,
)
from batchscout.orchestrator.doctor.gpus import gpu, gpus_for_ranks, gpus_taken, has_kernels, memory_knobs
from batchscout.orchestrator.doctor.told import as_json, in_all, print_checks
from batchscout.orchestrator.environment import Environment, Limits
from batchscout.orchestrator.installed import admitted

H100 = Gpu("NVIDIA H100", (9, 0), 80 * GIB, 79 * GIB)
DRIVER = Driver("550.54", (12, 4), 1)
FOR_GPUS = Torch(Imported("2.13.0+cu126"), "12.6", ("sm_80", "sm_90"), (H100,))
FOR_CPUS = Torch(Imported("2.13.0+cpu"))
CORES = Processors("Linux", 8, 8, None, 0.5)
ROOMY = Limits(open_files=65536, shared_memory_bytes=8 * GIB)
WELL = Seen(
    needs=Needs(),
    environment=Environment({}, most=ROOMY),
    processors=CORES,
    memory=Memory(32 * GIB, 20 * GIB, None),
    driver=DRIVER,
    torch=FOR_GPUS,
    compiler=Compiler("gcc", "/usr/bin/gcc"),
    disks=(Disk("data cache", Path("/cache"), "BATCHSCOUT_CACHE", 100 * GIB),),
    ray=Imported("2.60.0"),
    cluster=Cluster(""),
    hub=Hub("https://huggingface.co"),
    has_wandb_key=False,
    installed={"transformers": "5.0"},
)


def said(check: Check) -> tuple[Verdict, str]:
    return check.verdict, check.finding


def test_a_machine_that_lacks_nothing_has_no_remedy() -> None:
    checks = all_checks(WELL)
    assert [check.name for check in checks if check.verdict != "ok"] == []
    assert [check.name for check in checks if check.remedy] == []
    assert (worst(checks), in_all(checks)) == ("ok", "Studies run here.")


ILL: dict[str, dict[str, Any]] = {
    "environment": {"environment": Environment({"RAY_TRAIN_V2_ENABLED": "0"}, most=ROOMY)},
    "processors": {"processors": replace(CORES, allowed=1)},
    "memory": {"memory": Memory(32 * GIB, GIB, None)},
    "torch": {"torch": Torch(Imported(error="no"))},
    "gpu": {"torch": FOR_CPUS},
    "gpu 0": {"torch": replace(FOR_GPUS, gpus=(replace(H100, free_bytes=8 * GIB),))},
    "gpus for ranks": {"needs": Needs(world_size=2)},
    "compiler": {"compiler": Compiler("gcc", None)},
    "data cache": {"disks": (Disk("data cache", Path("/cache"), "BATCHSCOUT_CACHE", error="Permission denied"),)},
    "ray": {"ray": Imported(error="no")},
    "shared memory": {"environment": Environment({}, most=replace(ROOMY, shared_memory_bytes=None))},
    "open files": {"environment": Environment({}, most=replace(ROOMY, open_files=1024))},
    "ray cluster": {"cluster": Cluster("head:6379", "nothing answers at head:6379 (Connection refused)", "start it")},
    "network": {"hub": Hub("https://huggingface.co", error="timed out"), "needs": Needs(hub_names=("gpt2",))},
    "libraries": {"needs": Needs(libraries=("peft",))},
    "wandb": {"needs": Needs(wandb="online")},
}


@pytest.mark.parametrize("name", ILL)
def test_what_is_amiss_is_told_alone_and_ends_with_a_remedy(name: str) -> None:
    found = [check for check in all_checks(replace(WELL, **ILL[name])) if check.verdict != "ok"]
    assert [check.name for check in found] == [name]
    assert found[0].remedy


@pytest.mark.parametrize(
    ("found", "verdict", "finding"),
    [
        (CORES, "ok", "Linux, 8 cores"),
        (replace(CORES, allowed=2, quota=1.5), "warning", "Linux, 8 cores, this process may use 2, its control group gives it the time of 1.5"),
        (replace(CORES, quota=0.5), "warning", "Linux, 8 cores, its control group gives it the time of 0.5"),
        (replace(CORES, load=6.0), "warning", "Linux, 8 cores; a load of 6.0 before a study has begun"),
        (replace(CORES, system="Darwin"), "fault", "Darwin, 8 cores"),
    ],
)  # fmt: skip
def test_processors(found: Processors, verdict: Verdict, finding: str) -> None:
    assert said(processors(found, Needs())) == (verdict, finding)


@pytest.mark.parametrize("needs", [Needs(world_size=4), Needs(lanes=4), Needs(world_size=2, lanes=2)])
def test_ranks_of_all_lanes_want_cores_and_gpus_where_there_are_some(needs: Needs) -> None:
    check = processors(replace(CORES, cores=3, allowed=3), needs)
    assert said(check) == ("fault", "Linux, 3 cores; the study file asks for 4 ranks of 1 core each")
    assert check.remedy == "lower world_size, placement.lanes or placement.cpus_per_rank, or give it more cores"
    assert processors(CORES, replace(needs, cpus_per_rank=2)).verdict == "ok"
    assert processors(CORES, replace(needs, cpus_per_rank=3)).finding.endswith("asks for 4 ranks of 3 cores each")
    (check,) = gpus_for_ranks((H100,), needs)
    assert said(check) == ("fault", "the study file asks for 4 ranks, and there is 1 GPU")
    assert list(gpus_for_ranks((), needs)) == []


def test_ranks_of_a_cluster_are_not_held_against_this_machine() -> None:
    asked = Needs(world_size=64, lanes=2, cpus_per_rank=9, memory_limit_bytes=GIB, memory_knobs=("activation_offload",))
    seen = replace(WELL, needs=asked, cluster=Cluster("head:6379"), driver=None, torch=FOR_CPUS)
    assert worst(all_checks(seen)) == "ok"
    faults = {check.name for check in all_checks(replace(seen, **ILL["ray cluster"])) if check.verdict == "fault"}
    assert faults == {"processors", "memory", "memory knobs"}


def test_memory() -> None:
    held = Memory(32 * GIB, GIB, 4 * GIB)
    assert said(memory(held, Needs(), on_gpu=False)) == (
        "fault",
        "1 GiB available of 32 GiB; the control group's limit is 4 GiB",
    )


def test_a_memory_limit_of_all_ranks_is_held_against_the_memory_of_a_cpu_host() -> None:
    needs, host = Needs(lanes=2, world_size=2, memory_limit_bytes=8 * GIB), Memory(32 * GIB, 20 * GIB, None)
    assert memory(host, needs, on_gpu=False).verdict == "ok"
    more = replace(needs, memory_limit_bytes=9 * GIB)
    assert said(memory(host, more, on_gpu=False)) == (
        "fault",
        "memory_limit is 9 GiB for each of 4 ranks, and this machine has 32 GiB",
    )
    assert memory(host, more, on_gpu=True).verdict == "ok", "it is the GPU's"
    assert memory(replace(host, group_limit_bytes=30 * GIB), needs, on_gpu=False).finding.endswith(
        "this machine has 32 GiB, of which its control group lets this process have 30 GiB"
    )


def test_a_knob_that_needs_a_gpu_is_a_fault_on_a_cpu() -> None:
    needs = Needs(memory_knobs=("chunked_cross_entropy", "activation_offload"))
    (check,) = memory_knobs(needs, on_gpu=False)
    assert check.verdict == "fault"
    assert check.finding.startswith("memory_knobs has activation_offload: it moves ")
    assert check.remedy == "leave it out, or train on a GPU"
    assert list(memory_knobs(needs, on_gpu=True)) == []


def test_a_library_that_cannot_be_imported_is_quoted() -> None:
    check = imported(
        "torch", Imported(error="ImportError: libcudart.so.12: cannot open shared object file"), Environment({})
    )
    assert check.finding == "cannot be imported: ImportError: libcudart.so.12: cannot open shared object file"
    assert check.remedy.startswith("reinstall it: pip install 'torch")


def test_what_a_launcher_has_left_is_no_fault_and_told_of() -> None:
    (check,) = environment(Environment({"RANK": "0", "HOME": "/"}), Needs(), on_gpu=False)
    assert check.verdict == "ok"
    assert "not used are RANK," in check.finding


@pytest.mark.parametrize(("num_ranks", "verdict"), [(1, "warning"), (2, "fault")])
def test_an_interface_that_is_not_there_is_told_to_whoever_may_run_several_ranks(num_ranks: int, verdict: str) -> None:
    set_up = Environment({"GLOO_SOCKET_IFNAME": "ib0"}, interfaces=("eth0",))
    (check,) = environment(set_up, Needs(world_size=num_ranks), on_gpu=False)
    assert said(check)[0] == verdict
    assert check.finding.startswith("GLOO_SOCKET_IFNAME is ib0, and ")
    assert check.remedy == "unset GLOO_SOCKET_IFNAME, or name one that is there"


def test_settings_that_may_keep_a_library_from_being_imported_are_named() -> None:
    settings = Environment(
        {"PYTHONMALLOC": "debug", "PYTHONUNBUFFERED": "1", "RAY_BACKEND_LOG_LEVEL": "?", "HOME": "/"}
    )
    check = imported("ray", Imported(error="no"), settings)
    assert check.remedy.endswith("; or the environment has PYTHONMALLOC, RAY_BACKEND_LOG_LEVEL: try it without")


@pytest.mark.parametrize("number", ["2.51.1", "99.0.0"])
def test_a_library_that_was_installed_by_force_is_held_against_what_is_admitted(number: str) -> None:
    check = imported("ray", Imported(number), Environment({}))
    wanted = admitted("ray")
    assert said(check) == ("fault", f"ray {number}; batchscout runs with {wanted.specifier}")
    assert check.remedy == f"pip install '{wanted}'"


@pytest.mark.parametrize(
    ("driver", "found", "verdict", "finding", "remedy"),
    [
        (None, FOR_CPUS, "ok", "none, so studies run on the CPU", ""),
        (None, replace(FOR_GPUS, gpus=()), "ok", "none, so studies run on the CPU; torch is built for CUDA 12.6", ""),
        (DRIVER, FOR_GPUS, "ok", "1 x NVIDIA H100 (80 GiB); driver 550.54, torch for CUDA 12.6", ""),
        (DRIVER, FOR_CPUS, "fault",
         "1 GPU, driver 550.54 for CUDA up to 12.4; torch 2.13.0+cpu is a build for CPUs, and uses none of them", "/whl/cu126"),
        (replace(DRIVER, cuda=(13, 0)), FOR_CPUS, "fault",
         "1 GPU, driver 550.54 for CUDA up to 13.0; torch 2.13.0+cpu is a build for CPUs, and uses none of them", "/whl/cu130"),
        (DRIVER, Torch(Imported("2.13.0+cu130"), "13.0"), "fault",
         "1 GPU, driver 550.54 for CUDA up to 12.4; torch 2.13.0+cu130 is built for CUDA 13.0, which this driver cannot run",
         "update the driver, or install a build for its CUDA"),
        (DRIVER, replace(FOR_GPUS, gpus=(), why_none="CUDA unknown error"), "fault",
         "1 GPU, driver 550.54 for CUDA up to 12.4; torch 2.13.0+cu126 for CUDA 12.6 finds none: CUDA unknown error",
         "check CUDA_VISIBLE_DEVICES"),
        (DRIVER, replace(FOR_GPUS, gpus=(replace(H100, name="Tesla K80", capability=(3, 7)),)), "fault",
         "1 x Tesla K80 (80 GiB) has compute capability 3.7; torch 2.13.0+cu126 has kernels for sm_80, sm_90",
         "install a build of torch that has kernels for it, or use another GPU"),
    ],
)  # fmt: skip
def test_gpu_driver_and_torch_go_together_or_it_is_said_which_does_not(
    driver: Driver | None, found: Torch, verdict: Verdict, finding: str, remedy: str
) -> None:
    check = gpu(driver, found)
    assert said(check) == (verdict, finding)
    assert remedy in check.remedy


@pytest.mark.parametrize(
    ("capability", "kernels", "runs"),
    [
        ((9, 0), ("sm_80",), False),
        ((8, 9), ("sm_80",), True),
        ((8, 0), ("sm_86",), False),
        ((9, 0), ("compute_80",), True),
        ((7, 5), ("compute_80",), False),
        ((10, 0), ("sm_100a",), True),
        ((12, 0), ("sm_90", "compute_90"), True),
    ],
)
def test_machine_code_runs_within_a_major_version_and_what_is_compiled_when_loaded_on_later_ones(
    capability: tuple[int, int], kernels: tuple[str, ...], runs: bool
) -> None:
    assert has_kernels(capability, kernels) is runs


def test_a_gpu_that_something_else_uses_is_named() -> None:
    (check,) = gpus_taken((H100, replace(H100, free_bytes=60 * GIB)))
    assert (check.name, *said(check)) == ("gpu 1", "warning", "20 GiB of its 80 GiB are in use")


NO_COMPILER = Compiler("g++", None)


@pytest.mark.parametrize(
    ("found", "needs", "on_gpu", "verdict", "finding"),
    [
        (NO_COMPILER, Needs(), False, "fault", "torch.compile needs a C++ compiler, and there is no 'g++'"),
        (NO_COMPILER, Needs(compiles=False), False, "warning",
         "torch.compile needs a C++ compiler, and there is no 'g++'; the study file compiles nothing"),
        (Compiler("gcc", "/usr/bin/gcc", "Python.h: No such file or directory"), Needs(), True, "fault",
         "/usr/bin/gcc cannot build what torch.compile writes: Python.h: No such file or directory"),
        (Compiler("g++", "/usr/bin/g++"), Needs(), False, "ok", "/usr/bin/g++ builds what torch.compile writes"),
    ],
)  # fmt: skip
def test_compiler(found: Compiler, needs: Needs, on_gpu: bool, verdict: Verdict, finding: str) -> None:
    check = compiler(found, needs, on_gpu=on_gpu)
    assert said(check) == (verdict, finding)
    assert ("python3-dev" in check.remedy) == (on_gpu and verdict != "ok")


@pytest.mark.parametrize(
    ("found", "verdict", "finding"),
    [
        (Disk("x", Path("/a b"), "--dir", error="Read-only file system"), "fault", "'/a b' cannot be written: Read-only file system"),
        (Disk("x", Path("/a"), "--dir", GIB // 2), "fault", "/a has 512 MiB free"),
        (Disk("x", Path("/a"), "--dir", 5 * GIB), "warning", "/a has 5 GiB free"),
        (Disk("x", Path("/a"), "--dir", 50 * GIB), "ok", "/a has 50 GiB free"),
    ],
)  # fmt: skip
def test_disk(found: Disk, verdict: Verdict, finding: str) -> None:
    check = disk(found)
    assert said(check) == (verdict, finding)
    assert ("--dir" in check.remedy) == (verdict != "ok")


def test_limits_of_the_operating_system() -> None:
    small, few = limits(Limits(open_files=1024, shared_memory_bytes=64 * 2**20))
    assert small.finding.startswith("/dev/shm has 64 MiB: ")
    assert said(few) == ("warning", "at most 1,024, and Ray needs 4,096")


def test_being_offline_is_no_fault_unless_the_study_names_what_is_on_the_hub() -> None:
    away = Hub("https://huggingface.co", error="timed out")
    assert hub(away, Needs()).verdict == hub(replace(away, is_offline=True), Needs()).verdict == "ok"
    check = hub(away, Needs(hub_names=("gpt2",)))
    assert said(check) == ("warning", "https://huggingface.co does not answer: timed out; the study file names gpt2")


def test_cluster_libraries_and_wandb() -> None:
    away = cluster(Cluster("head:6379", "nothing answers at head:6379 (timed out)", "start the cluster"))
    assert away.verdict == "warning", "a study on this machine alone does not use it"
    assert away.finding.startswith(
        "nothing answers at head:6379 (timed out): batchscout run starts a cluster of its own"
    )
    assert away.remedy == "start the cluster"
    assert cluster(Cluster("head:6379")).verdict == "ok"
    missing = libraries({"transformers": "5.0"}, Needs(libraries=("transformers", "peft")))
    assert (missing.finding, missing.remedy) == ("the study file needs peft", "pip install peft")
    assert libraries({"pytorch-lightning": "2.5"}, Needs(libraries=("lightning",))).verdict == "ok"
    online = wandb(Needs(wandb="online"), has_key=False)
    assert said(online) == ("fault", "tracking.wandb is online, and no key is set")
    assert wandb(Needs(wandb="online"), has_key=True).verdict == "ok"


@pytest.mark.parametrize("columns", [50, 80, 120])
def test_everything_is_said_within_the_width_of_the_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    checks = all_checks(replace(WELL, **ILL["gpu"], **ILL["wandb"]))
    print_checks(checks)
    out = capsys.readouterr().out
    words = " ".join(out.split())
    assert all(len(line) <= columns or " " not in line.strip() for line in out.splitlines())
    assert all(check.finding in words and check.remedy in words for check in checks)
    assert in_all(checks) == "2 faults to fix before a study runs here as asked."
    assert words.endswith(in_all(checks))


def test_programs_are_told_name_finding_verdict_and_remedy() -> None:
    told = as_json([Check("a", "b", "warning", "c")])
    assert told == {
        "verdict": "warning",
        "checks": [{"name": "a", "finding": "b", "verdict": "warning", "remedy": "c"}],
    }

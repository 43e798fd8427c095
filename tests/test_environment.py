"""What in the environment that the program is launched in is in a study's way: each is named with its remedy before it costs anything."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.environment import (
    Environment,
    fit_environment,
    launcher_text,
    observed_environment,
    obstacles,
    obstacles_here,
)
from batchscout.orchestrator.preflight import check_host
from tests.support.every import for_every
from tests.support.processes import python

ROOT = Path(__file__).parents[1]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
HERE = ("lo", "eth0")
NOBODYS = 54_321
"""The number of a user whom no machine has."""


BREAKS_RAY = {"RAY_TRAIN_V2_ENABLED": "0", "PYTHONOPTIMIZE": "1", "PYTHONWARNINGS": "error"}


@for_every(name=BREAKS_RAY)
def test_a_setting_that_breaks_ray_is_named_in_a_line_before_ray_is_imported(name: str) -> None:
    done = python("-m", "batchscout", "run", QUICKSTART, cwd=ROOT, **{name: BREAKS_RAY[name]})
    (said,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert name in said.partition(";")[0]
    assert f"unset {name}" in said


@for_every(
    words=[("-m", "batchscout", "plan"), ("-m", "batchscout", "trial"), ("-c", "import batchscout; batchscout.find()")]
)
def test_so_it_is_by_all_that_import_ray(words: tuple[str, ...]) -> None:
    done = python(*words, QUICKSTART, cwd=ROOT, RAY_TRAIN_V2_ENABLED="0")
    assert "RAY_TRAIN_V2_ENABLED is '0'" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("option", "is_in_the_way"),
    [
        ("error", True), ("e", True), ("error::DeprecationWarning", True), ("error:::my_module", False), ("default", False),
        ("error:unclosed", False), ("ignore", False), ("", False),
    ],
)  # fmt: skip
def test_warnings_may_be_errors_in_the_users_own_module(option: str, is_in_the_way: bool) -> None:
    assert bool([*obstacles(Environment({}, warning_options=[option]))]) is is_in_the_way


@pytest.mark.parametrize(
    ("value", "gloo_finds_it", "nccl_finds_it"),
    [
        ("eth0", True, True), ("ib0", False, False), ("", True, True), ("eth0,lo", True, True), ("ib0,eth0", False, True),
        ("eth", False, True), ("=eth", False, False), ("=eth0", False, True), ("^docker", False, True),
    ],
)  # fmt: skip
def test_ranks_need_a_network_interface_that_is_there(value: str, gloo_finds_it: bool, nccl_finds_it: bool) -> None:
    def found(variable: str, num_ranks: int, *, on_gpu: bool) -> bool:
        return not [*obstacles_here(Environment({variable: value}, interfaces=HERE), num_ranks, on_gpu=on_gpu)]

    assert found("GLOO_SOCKET_IFNAME", 2, on_gpu=False) == gloo_finds_it
    assert found("NCCL_SOCKET_IFNAME", 2, on_gpu=True) == nccl_finds_it
    assert found("GLOO_SOCKET_IFNAME", 1, on_gpu=False), "nobody reads it"
    assert found("GLOO_SOCKET_IFNAME", 2, on_gpu=True)
    assert found("NCCL_SOCKET_IFNAME", 2, on_gpu=False)


def test_a_network_interface_that_is_not_there_is_refused_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"name": "two", "model": {"target": "gpt"}, "data": {"target": "python_stdlib"}}
    two, one = (StudyConfig.model_validate({**keys, "world_size": size}) for size in (2, 1))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none-such0")
    with pytest.raises(
        ValueError, match=r"GLOO_SOCKET_IFNAME is none-such0, .* it has .*\blo\b.*; unset GLOO_SOCKET_IFNAME"
    ):
        check_host(two)
    check_host(one)


def test_an_interface_without_an_address_serves_no_ranks() -> None:
    names = [name for _, name in socket.if_nameindex()]
    found = observed_environment()
    assert "lo" in found.interfaces
    assert sorted([*found.interfaces, *found.without_address]) == sorted(names)
    down = Environment({"GLOO_SOCKET_IFNAME": "ib0"}, interfaces=HERE, without_address=["ib0"])
    (told,) = obstacles_here(down, 2, on_gpu=False)
    assert "network interface ib0 has no address" in told.finding
    assert "unset GLOO_SOCKET_IFNAME" in told.remedy


def test_a_folder_for_rays_sessions_that_is_not_there_is_named_by_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert [*obstacles_here(observed_environment(), 1, on_gpu=False)] == []
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "not made"))
    (told,) = obstacles_here(observed_environment(), 1, on_gpu=False)
    assert f"RAY_TMPDIR is {tmp_path}/not made" in told.finding
    assert "unset RAY_TMPDIR" in told.remedy


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (Environment({}, directory="/tmp/ünï"), None),
        (Environment({}, directory="/tmp/caf\udce9"), r"b'/tmp/caf\\xe9', is not UTF-8, .*; rename it"),
        (Environment({}, directory="/tmp/\udcc3\udcbc", reads_utf8=False), r"LC_ALL, .*b'/tmp/\\xc3\\xbc'.*; set LC_ALL=C.UTF-8"),
    ],
)  # fmt: skip
def test_a_folder_whose_name_ray_cannot_tell_is_named_with_its_bytes(found: Environment, told: str | None) -> None:
    said = [f"{one.finding}; {one.remedy}" for one in obstacles_here(found, 1, on_gpu=False)]
    assert said == [] if told is None else re.search(told, "".join(said))


def test_encryption_without_its_files_is_told_by_their_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"):
        monkeypatch.setenv(name, __file__)
    monkeypatch.setenv("RAY_USE_TLS", "1")
    assert [*obstacles(observed_environment())] == []
    monkeypatch.setenv("RAY_TLS_SERVER_KEY", "/none/such")
    (told,) = obstacles(observed_environment())
    assert "RAY_USE_TLS is 1, and RAY_TLS_SERVER_KEY names no file" in told.finding
    assert "unset RAY_USE_TLS" in told.remedy


def test_resources_that_ray_is_told_to_count_are_named_by_their_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", '{"CPU": 0}')
    (told,) = obstacles_here(observed_environment(), 1, on_gpu=False)
    assert 'RAY_OVERRIDE_RESOURCES is {"CPU": 0}' in told.finding
    assert "unset RAY_OVERRIDE_RESOURCES" in told.remedy


def as_a_user_without_a_name(first: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """What is refused to a user whom the machine does not know; `first` is what the shell does before."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    code = (
        "import os; from batchscout.trainers.device import cgroup; from batchscout.orchestrator.environment import *; "  # as it may read no file of ours
        f"os.setuid({NOBODYS}); found = observed_environment(); "
        "refuse([*obstacles(found), *obstacles_here(found, 1, on_gpu=False)])"
    )
    command = shlex.join([sys.executable, "-c", code])
    settings = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(["bash", "-c", f"{first}; exec {command}"], env=settings, capture_output=True, text=True)


def test_a_user_without_a_home_is_told_to_set_one() -> None:
    assert as_a_user_without_a_name("true", HOME="/tmp").returncode == 0
    (said,) = [line for line in as_a_user_without_a_name("true").stderr.splitlines() if "HOME" in line]
    assert f"no user {NOBODYS}" in said
    assert "; set HOME to a folder" in said


@for_every(limit=["n 64", "f 1000", "v 4000000", "u 80"])
def test_a_limit_under_which_ray_does_not_start_is_told_with_how_it_is_raised(limit: str) -> None:
    name = "Hn" if limit[0] == "n" else limit[0]
    done = as_a_user_without_a_name(f"ulimit -{limit}", HOME="/tmp")
    (said,) = [line for line in done.stderr.splitlines() if f"(ulimit -{name})" in line]
    finding, remedy = said.split("; ", 1)
    assert re.search(r"\d.* Ray|\d.* study", finding), "it has the limit, and what is needed"
    assert f"ulimit -{name}" in remedy


LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
            "ACCELERATE_USE_DEEPSPEED": "true"}  # fmt: skip


@pytest.mark.slow
def test_a_trainer_waits_for_no_ranks_of_a_launcher_that_is_gone() -> None:
    example = ROOT / "examples/transformers_trainer"
    done = python("-m", "batchscout", "plan", "study.yaml", "--no-memory", cwd=example, **LAUNCHED)
    assert done.returncode == 0, done.stderr
    assert f"not used are {', '.join(sorted(LAUNCHED))}," in done.stderr.splitlines()[0]


def test_whoever_calls_find_has_its_launchers_settings_back_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")  # of one process, too
    before = dict(os.environ)
    with fit_environment():
        assert os.environ.keys() == before.keys() - LAUNCHED.keys()
    assert dict(os.environ) == before


def test_whoever_trained_in_a_launchers_precision_is_told_where_a_study_has_its_own() -> None:
    assert "precision" not in launcher_text(["RANK"])
    assert "(precision: bfloat16)" in launcher_text(["ACCELERATE_MIXED_PRECISION"])


def test_this_process_is_launched_in_nothing_of_it() -> None:
    found = observed_environment()
    assert [*obstacles(found), *obstacles_here(found, 2, on_gpu=False)] == []

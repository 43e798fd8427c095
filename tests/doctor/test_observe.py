"""What the doctor observes of this machine, and of what the test makes of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from batchscout.orchestrator.doctor.facts import Cluster, Needs
from batchscout.orchestrator.doctor.needs import needs_of, tree_of
from batchscout.orchestrator.doctor.observe import (
    OPTIONAL,
    compiler_for,
    disk_at,
    hub_at,
    import_elsewhere,
)
from batchscout.orchestrator.execution.session import reachable_address
from batchscout.orchestrator.verbs.helping import named_cluster
from tests.support.command_line import Typed
from tests.support.processes import HANGS_AFTER_SECONDS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise OSError('libcudart.so.12: cannot open shared object file')", "OSError: libcudart.so.12: cannot open shared object file"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
    ],
)  # fmt: skip
def test_a_library_that_cannot_be_imported_ends_its_own_process_alone(
    code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "library_of_a_test.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert import_elsewhere("library_of_a_test")[0].error == said


def test_what_a_library_prints_is_not_taken_for_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "library_of_a_test.py").write_text("print('welcome')\n__version__ = '1.2'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert import_elsewhere("library_of_a_test")[0].version == "1.2"


def test_a_compiler_is_asked_to_build_what_torch_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiler_for("c++").error == ""
    fails = tmp_path / "cxx"
    fails.write_text("#!/bin/sh\necho 'seen.cpp:1: fatal error: omp.h: No such file or directory' >&2\nexit 1\n")
    fails.chmod(0o755)
    monkeypatch.setenv("CXX", str(fails))
    assert compiler_for("c++").error.endswith("omp.h: No such file or directory")
    fails.write_text("#!/bin/sh\necho 'warning: this will be an error' >&2\n")
    assert compiler_for("c++").error == "", "it has only warned"
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert compiler_for("c++").path is None


def test_a_disk_is_written_where_the_directory_would_lie_and_nothing_is_left(tmp_path: Path) -> None:
    found = disk_at("runs", tmp_path / "a" / "b", "--dir")
    assert (found.error, found.path) == ("", tmp_path / "a" / "b")
    assert found.free_bytes > 0
    assert list(tmp_path.iterdir()) == []
    assert disk_at("runs", Path("/proc/a"), "--dir").error != ""


@pytest.fixture
def port() -> Iterator[int]:
    """A port at which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("named", ["127.0.0.1:1", "127.0.0.1:{port}", "ray://127.0.0.1:{port}", "head", "local"])
def test_a_cluster_that_a_study_would_refuse_is_told_with_the_remedy(
    named: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", named.format(port=port))
    found = named_cluster()
    with pytest.raises(ValueError, match="RAY_ADDRESS") as refused:
        reachable_address("auto")
    assert str(refused.value) == f"{found.error}; {found.remedy}"


def test_without_ray_address_no_cluster_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert named_cluster() == Cluster("")


class _Answers(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response(404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def test_a_hub_that_answers_anything_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("no_proxy", "*")
    with HTTPServer(("127.0.0.1", 0), _Answers) as server:
        threading.Thread(target=server.handle_request).start()
        assert hub_at(f"http://127.0.0.1:{server.server_port}").error == ""
    assert "refused" in hub_at("http://127.0.0.1:1").error
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub_at("http://127.0.0.1:1").is_offline


@pytest.mark.parametrize(
    ("tree", "needs"),
    [
        ({}, Needs()),
        ({"model": {"target": "hf", "kwargs": {"name": "gpt2"}, "peft": {"r": 8}}},
         Needs(libraries=("transformers", "peft"), hub_names=("gpt2",))),
        ({"from": {"lightning": "a:b"}, "world_size": 4, "tracking": {"wandb": "online"}},
         Needs(libraries=("lightning",), world_size=4, wandb="online")),
        ({"from": {"transformers": "a:b"}, "optimizer": "adamw_8bit"},
         Needs(libraries=("transformers", "accelerate", "torchao"))),
        ({"memory_knobs": ["optimizer_8bit"]}, Needs(libraries=("torchao",))),
        ({"stages": [{"type": "frontier", "memory_knobs": ["fsdp", "optimizer_8bit"]}, "train"], "optimizer": {"lr": 1}},
         Needs(libraries=("torchao",), memory_knobs=("fsdp",))),
        ({"loss": {"type": "transformers"}}, Needs(libraries=("transformers",))),
        ({"memory_limit": "512MiB", "placement": {"lanes": 2, "cpus_per_rank": None}, "memory_knobs": ["activation_ofload"]},
         Needs(memory_limit_bytes=2**29, lanes=2)),
        ({"memory_limit": "much", "placement": {"cpus_per_rank": 3}}, Needs(cpus_per_rank=3)),
        ({"stages": [{"type": "frontier", "compile": [False]}], "tracking": {"wandb": False}}, Needs(compiles=False)),
        ({"tracking": {"mlflow": True, "trackio": True}},
         Needs(libraries=("mlflow-skinny", "sqlalchemy", "alembic", "trackio"))),
        ({"tracking": {"mlflow": False}}, Needs()),
        ({"stages": [{"type": "frontier"}]}, Needs()),
        ({"stages": [{"type": "train"}], "compile": False}, Needs(compiles=False)),
        ({"stages": [{"type": "grid"}], "compile": False}, Needs(compiles=False)),
        ({"stages": [{"type": "grid", "compile": [True]}], "compile": False}, Needs()),
    ],
)  # fmt: skip
def test_what_a_study_file_asks_of_the_machine_is_read_from_it(tree: dict[str, object], needs: Needs) -> None:
    assert needs_of(tree) == needs


def test_what_a_study_file_may_need_is_looked_for() -> None:
    trackers = needs_of({"tracking": {"mlflow": True, "trackio": True}})
    others = needs_of({"from": {"transformers": "a:b"}, "optimizer": "adamw_8bit", "model": {"peft": {"r": 8}}})
    assert {*trackers.libraries, *others.libraries, "lightning"} <= {*OPTIONAL}


def test_stages_may_be_named_by_a_word(tmp_path: Path) -> None:
    (study := tmp_path / "study.yaml").write_text("stages: [train]\ncompile: false\n")
    assert needs_of(tree_of(study)) == Needs(compiles=False)


@pytest.mark.slow
def test_faults_of_this_machine_are_exit_code_1_and_all_else_is_looked_at_even_so(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("name: own\nmodel: {target: 'never_imported:Model'}\n")
    settings = os.environ | {
        "PYTHONPATH": str(ROOT), "CXX": "no-such-compiler", "RAY_ADDRESS": "127.0.0.1:1", "RAY_TRAIN_V2_ENABLED": "0", "BATCHSCOUT_CACHE": "/proc/a",
        "HF_ENDPOINT": "http://127.0.0.1:1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    settings.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-m", "batchscout", "doctor", "own.yaml", "--json"]
    done = subprocess.run(
        command, cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=HANGS_AFTER_SECONDS
    )
    assert (done.returncode, done.stderr) == (1, "")
    told = json.loads(done.stdout)
    verdicts = {check["name"]: check["verdict"] for check in told["checks"]}
    assert {name for name, verdict in verdicts.items() if verdict == "fault"} == {
        "environment",
        "compiler",
        "data cache",
    }
    assert verdicts["ray cluster"] == "warning"
    assert verdicts["torch"] == verdicts["ray"] == verdicts["network"] == verdicts["run directory"] == "ok"
    assert list(tmp_path.iterdir()) == [tmp_path / "own.yaml"]


def test_a_study_file_that_is_not_there_is_bad_input(typed: Typed) -> None:
    code, _, told = typed("doctor", "nowhere.yaml")
    assert (code, told) == (2, "batchscout: there is no study file nowhere.yaml; check the path, or leave it out\n")

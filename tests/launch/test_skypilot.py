"""A study as a task of SkyPilot: the file as SkyPilot reads it, and what its nodes run, as two processes of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from batchscout.orchestrator.launch import job
from batchscout.orchestrator.launch.node import inherited, start_command, this_node
from tests.support.processes import without_rays_settings
from tests.support.studies import TINY, grid

CLONE = Path(__file__).parents[2]
FILE = CLONE / "configs" / "launch" / "skypilot.yaml"
TASK = {
    "SKYPILOT_NODE_RANK": "0",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_TASK_ID": "sky-2026-11-25-10-00-00-000000_batchscout_1",
    "SKYPILOT_NUM_GPUS_PER_NODE": "4",
}


def task() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text())


def test_skypilot_reads_the_file_and_asks_for_what_has_no_default() -> None:
    sky = pytest.importorskip("sky", reason="pip install 'skypilot>=0.14.1'")
    given = {"RUN_DIR": "s3://bucket/runs/x"}
    read = sky.Task.from_yaml_config(
        task(), env_overrides=list(given.items()), secrets_overrides=[("RAY_AUTH_TOKEN", "0")]
    )
    assert (read.num_nodes, read.envs["RUN_DIR"]) == (1, given["RUN_DIR"])
    with pytest.raises(ValueError, match="RUN_DIR"):
        sky.Task.from_yaml_config(task(), secrets_overrides=[("RAY_AUTH_TOKEN", "0")])
    assert not read.managed_secret_refs
    without = sky.Task.from_yaml_config(task(), env_overrides=list(given.items()))
    assert [secret.name for secret in without.managed_secret_refs] == ["RAY_AUTH_TOKEN"], "`sky` asks for it at launch"


def test_the_files_defaults_are_a_study_of_the_clone() -> None:
    assert (CLONE / task()["envs"]["STUDY"]).is_file()


def test_no_value_is_read_by_the_shell(tmp_path: Path) -> None:
    given = "a b;touch never $(touch never) `touch never` 'x' \"y\""
    *_, line = task()["run"].splitlines()
    line = line.replace("exec python -m batchscout.orchestrator.launch.job --", "printf '%s\\n'")
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=tmp_path,
        env=os.environ | {"STUDY": given, "RUN_DIR": given},
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == ["batchscout", "run", given, "--dir", given]
    assert list(tmp_path.iterdir()) == []


def test_the_first_node_is_the_head() -> None:
    head, other = this_node(TASK), this_node(TASK | {"SKYPILOT_NODE_RANK": "1"})
    assert head.address == other.address == f"10.0.0.1:{head.port}"
    assert {"--head", "--num-gpus=4", f"--port={head.port}"} < set(start_command(head, Path("/t")))
    assert f"--address={head.address}" in start_command(other, Path("/t"))
    another = this_node(TASK | {"SKYPILOT_TASK_ID": "sky-2026-11-25-10-00-01-000000_batchscout_2"})
    assert another.port != head.port, "two tasks of one cluster do not meet"


def test_ranks_have_more_threads_than_skypilots_own_ray_gives_a_task() -> None:
    assert inherited(TASK | {"OMP_NUM_THREADS": "1", "A": "b"}) == TASK | {"A": "b"}
    assert inherited(TASK | {"OMP_NUM_THREADS": "4"})["OMP_NUM_THREADS"] == "4", "the user's"
    assert inherited({"OMP_NUM_THREADS": "1"}) == {"OMP_NUM_THREADS": "1"}, "in a job of SLURM it is the user's"


def test_without_a_token_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TASK.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    with pytest.raises(
        ValueError, match=r"RAY_AUTH_TOKEN is not set.*--secret RAY_AUTH_TOKEN=\$\(openssl rand -hex 32\)"
    ):
        job.main(["batchscout"])


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_a_study_runs_on_two_nodes_each_of_which_ends_its_own_ray(tmp_path: Path) -> None:
    study = TINY | {"sample_budget": 512, "stages": grid(learning_rate=[1e-3, 2e-3])}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    own = without_rays_settings()
    settings = own | TASK | {
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
        "SKYPILOT_NUM_GPUS_PER_NODE": "0",
        "SKYPILOT_TASK_ID": f"test-{os.getpid()}",
        "RAY_AUTH_TOKEN": "ab" * 32,
        "PYTHONPATH": str(CLONE),
    }  # fmt: skip
    run = [sys.executable, "-m", "batchscout", "run", "study.yaml", "--dir", "runs/x"]
    command = [sys.executable, "-m", "batchscout.orchestrator.launch.job", "--", *run]
    nodes = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env=settings | {"SKYPILOT_NODE_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    said = [node.communicate()[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert "Train with micro-batch 4" in " ".join(said[0].split())
    assert "ab" * 32 not in said[0] + (tmp_path / "runs" / "x" / "journal.jsonl").read_text()

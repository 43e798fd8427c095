"""A study on the cluster of a file for `ray up`: what Ray's launcher is given, and a real one, with real sshds, whose laptop, head
and worker are machines in namespaces."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from batchscout.orchestrator.launch.over_ssh import SentStudy, make_token, run_command, status_command
from tests.faults.driver import has
from tests.support import ssh_site
from tests.support.command_line import Typed
from tests.support.machines import HOME, missing
from tests.support.ssh_site import ON_THE_LAPTOP, Site
from tests.support.studies import TINY, grid

HOSTILE = "a b;touch INJECTED $(touch INJECTED) `touch INJECTED` 'x' \"y\" $HOME ~ * !! && | >INJECTED"


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's clone, entered, and a home without a token."""
    folder = tmp_path / "clone"
    (folder / "mine").mkdir(parents=True)
    (folder / "cluster.yaml").write_text("cluster_name: mine\n")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(folder)
    return folder


def read_by_a_shell(words: list[str]) -> list[str]:
    """What a program is given that Ray starts on the head: it joins the words, and bash reads them."""
    started = f"printf '%s\\0' {' '.join(words)}"
    return subprocess.run(["bash", "-c", started], capture_output=True, text=True, check=True).stdout.split("\0")[:-1]


def test_the_head_is_given_what_was_typed(clone: Path) -> None:
    options = ("--set", f"name={HOSTILE}", "--tmux", "--stop")
    sent = SentStudy(Path("cluster.yaml"), "s", Path("mine", f"{HOSTILE}.yaml".replace("/", "_")), options)
    ray, verb, end_of_options, cluster, *words = run_command(sent)
    assert (ray, verb, end_of_options, cluster) == ("ray", "exec", "--", "cluster.yaml")
    assert len(words) == 1
    given = read_by_a_shell(words)
    assert given == ["python", "batchscout/configs/submit.py", f"mine/{HOSTILE}.yaml", *options]
    assert list(clone.glob("INJECTED")) == []
    (asked,) = status_command(SentStudy(Path("cluster.yaml"), HOSTILE, Path("mine/s.yaml")))[4:]
    assert read_by_a_shell([asked]) == ["batchscout", "status", f"batchscout/runs/{HOSTILE}"]


def test_what_the_cluster_would_not_have_is_refused(clone: Path) -> None:
    with pytest.raises(
        ValueError, match=r"s\.yaml is not in .*clone, which is all that the cluster is sent; move it there"
    ):
        SentStudy(Path("cluster.yaml"), "s", Path("../s.yaml"))
    with pytest.raises(
        ValueError, match=r"there is no other\.yaml, which is to say where the cluster is; run this in the"
    ):
        SentStudy(Path("other.yaml"), "s", Path("mine/s.yaml"))


def test_a_study_with_a_fault_reaches_no_cluster(clone: Path, typed: Typed) -> None:
    Path("mine/s.yaml").write_text(yaml.safe_dump(TINY | {"what_is_this": 1}))
    code, _, said = typed("launch", "ray", "mine/s.yaml")
    assert code == 2
    assert "what_is_this: no such key" in said
    assert not Path("~/.ray").expanduser().exists()


def test_the_key_is_made_once_and_is_its_owners_alone(clone: Path) -> None:
    token = Path("~/.ray/auth_token").expanduser()
    make_token()
    made = token.read_text()
    assert re.fullmatch("[0-9a-f]{64}", made)
    assert [oct(path.stat().st_mode & 0o777) for path in (token.parent, token)] == ["0o700", "0o600"]
    token.chmod(0o644)  # as `ray get-auth-token --generate` leaves it
    make_token()
    assert token.read_text() == made
    assert token.stat().st_mode & 0o777 == 0o600
    assert list(token.parent.iterdir()) == [token]


# With real daemons

STUDY = TINY | {"name": "sent", "sample_budget": 64, "stages": grid(learning_rate=[1e-3])}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    why = missing()
    if why is not None:
        pytest.skip(why)
    with ssh_site.site(tmp_path_factory.mktemp("machines"), tmp_path_factory.mktemp("shared"), lanes=[2]) as made:
        yield made


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_a_cluster_is_started_given_studies_looked_at_and_ended_over_ssh(site: Site) -> None:
    name = "a b;touch INJECTED $(touch INJECTED) `touch INJECTED` 'x' \"y\" $HOME ~ * !!"
    site.laptop.write(ON_THE_LAPTOP / f"mine/{HOSTILE}.yaml", yaml.safe_dump(STUDY))
    sent = ("launch", "ray", f"mine/{HOSTILE}.yaml", "--yes", "--min-nodes", "2", "--set", f"name={name}", "--tmux")
    assert "how far it is:    ray exec -- cluster.yaml" in site.batchscout(*sent)
    until_complete(site, name)
    assert any("raylet" in process for process in site.workers[0].processes())

    site.laptop.write(ON_THE_LAPTOP / "mine/plain.yaml", yaml.safe_dump(STUDY | {"name": name}))
    site.ray("rsync-up", "cluster.yaml", "./", "~/batchscout/")
    again = site.ray("submit", "cluster.yaml", "configs/submit.py", "mine/plain.yaml")
    assert "Train with  micro-batch 4" in again, "the same study, which has ended"

    site.ray("rsync-down", "cluster.yaml", "~/batchscout/runs/", "runs/")
    found = site.laptop.run("cat", str(ON_THE_LAPTOP / "runs" / name / "recommendation.json"))
    assert json.loads(found)["micro_batch_size"] == 4
    nothing_leaks(site)

    site.ray("down", "--yes", "cluster.yaml")
    left = site.head.processes()
    assert [process for process in left if "raylet" in process or "gcs_server" in process] == []


def until_complete(site: Site, name: str) -> None:
    """Wait for the study in tmux, and look at it as a user outside of the cluster does."""
    deadline = time.monotonic() + 400
    run_dir = f"batchscout/runs/{name}"
    while '"kind":"concluded"' not in site.head.run("sh", "-c", 'cat "$0"/journal.jsonl || true', run_dir):
        assert time.monotonic() < deadline
        time.sleep(1)
    assert "grid: complete" in site.ray("exec", "cluster.yaml", shlex.join(["batchscout", "status", run_dir]))


def nothing_leaks(site: Site) -> None:
    """No word of the user's was run, and nothing but its own file, closed to others, has the token."""
    token = site.laptop.run("cat", ".ray/auth_token")
    for machine in (site.laptop, site.head, *site.workers):
        where = ["/home", "/tmp/ray"]
        assert machine.run("find", *where, "-name", "INJECTED") == ""
        assert machine.run("stat", "--format=%a", ".ray", ".ray/auth_token").split() == ["700", "600"]
        told = machine.run("sh", "-c", 'grep -rlsF "$0" "$@" || true', token, *where).split("\n")
        assert told == [f"{HOME}/.ray/auth_token", ""]


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_study_that_was_submitted_over_ssh_and_killed_goes_on_where_it_was_when_it_is_submitted_again(
    site: Site,
) -> None:
    model = {"target": "tests.support.studies:Sleeps", "kwargs": {"seconds": 0.02}}
    study = STUDY | {"name": "killed", "sample_budget": 512, "evaluations": 8, "model": model}
    site.write_study(study)
    site.laptop.run("sh", "-c", "umask 077; ray get-auth-token --generate")
    site.ray("up", "--yes", "cluster.yaml")
    with site.submitted("killed", num_nodes=2) as first:
        site.wait_for(has("evaluated"), "killed", first)
        site.kill_driver()
        said, _ = first.communicate(timeout=60)
    assert first.returncode != 0, said
    before = site.journal("killed").read_text()
    again = site.laptop.run(*site.submit("killed", num_nodes=2), folder=ON_THE_LAPTOP)
    assert "Train with  micro-batch 4" in again
    assert site.journal("killed").read_text().startswith(before), "nothing that was journaled is lost"
    kinds = Counter(event.kind for event in site.events("killed"))
    assert (kinds["run_began"], kinds["evaluated"], kinds["ended"]) == (2, 8, 1), "no evaluation is made twice"

"""The version that the program says it has."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from batchscout.orchestrator.installed import admitted
from tests.support.processes import python

ROOT = Path(__file__).parents[1]


def version_where(path: Path) -> subprocess.CompletedProcess[str]:
    """What `batchscout --version` prints, and what it has loaded, where this directory holds the installed metadata."""
    code = (
        "import sys\nfrom batchscout.orchestrator.cli import main\n"
        "try: main(['--version'])\n"
        "except SystemExit as ended: assert not ended.code\n"
        "print(sorted({'torch', 'ray', 'pydantic', 'numpy', 'yaml'} & set(sys.modules)))"
    )
    return python("-c", code, cwd=path, PYTHONPATH=os.pathsep.join([str(path), str(ROOT)]))


def test_version_is_that_of_the_installation_and_loads_nothing_heavy(tmp_path: Path) -> None:
    installed = tmp_path / "batchscout-9.8.7.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.4\nName: batchscout\nVersion: 9.8.7\n")
    found = version_where(tmp_path)
    assert found.stdout.splitlines() == ["batchscout 9.8.7", "[]"], found.stderr


@pytest.mark.parametrize(("library", "number"), [("ray", "2.51.1"), ("ray", "99.0"), ("torch", "2.10.0+cpu")])
def test_a_version_that_was_installed_by_force_is_refused_with_both_numbers_and_the_remedy(
    library: str, number: str, tmp_path: Path
) -> None:
    forced = tmp_path / f"{library}-{number}.dist-info"
    forced.mkdir()
    (forced / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {library}\nVersion: {number}\n")
    wanted = admitted(library)
    told = f"{library} {number} is installed, and {library}{wanted.specifier} is needed; pip install '{wanted}'"

    def typed(*words: str) -> subprocess.CompletedProcess[str]:
        return python(*words, cwd=tmp_path, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))

    for verb in ("run", "plan", "trial"):
        done = typed("-m", "batchscout", verb, str(ROOT / "configs" / "quickstart.yaml"))
        assert (done.returncode, done.stderr) == (2, f"batchscout: {told}\n")
    assert typed("-c", "import batchscout; batchscout.find()").stderr.endswith(f"ValueError: {told}\n")


def test_the_pages_name_the_versions_that_would_be_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    least, beyond = re.findall(r"3\.(\d+)", project["requires-python"])
    for page in ("README.md", "CONTRIBUTING.md", "docs/quickstart.md", "cluster.yaml"):
        said = (ROOT / page).read_text()
        assert re.findall(r"Python (?:must be )?(3\.\d+ to 3\.\d+)", said) == [f"3.{least} to 3.{int(beyond) - 1}"], (
            page
        )
        assert set(re.findall(r"torch[>=][^']*", said)) <= set(project["dependencies"]), page


def test_the_changelog_begins_with_the_version_that_would_be_installed() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    assert headings[0].startswith(f"## {version} "), "say in CHANGELOG.md what is new"


def test_the_group_and_the_extra_for_tests_are_the_same() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["dependency-groups"]["test"] == settings["project"]["optional-dependencies"]["test"]

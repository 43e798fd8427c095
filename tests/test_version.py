"""The version that the program says it has."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def version_where(path: Path) -> subprocess.CompletedProcess[str]:
    """What `batchscout --version` prints, and what it has loaded, where this directory holds the installed metadata."""
    code = (
        "import sys\nfrom orchestrator.cli import main\n"
        "try: main(['--version'])\n"
        "except SystemExit as ended: assert not ended.code\n"
        "print(sorted({'torch', 'ray', 'pydantic', 'numpy', 'yaml'} & set(sys.modules)))"
    )
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), str(ROOT)])}
    return subprocess.run([sys.executable, "-c", code], env=settings, cwd=path, capture_output=True, text=True)


def test_version_is_that_of_the_installation_and_loads_nothing_heavy(tmp_path: Path) -> None:
    installed = tmp_path / "batchscout-9.8.7.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.4\nName: batchscout\nVersion: 9.8.7\n")
    found = version_where(tmp_path)
    assert found.stdout.splitlines() == ["batchscout 9.8.7", "[]"], found.stderr


def test_the_changelog_begins_with_the_version_that_would_be_installed() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    assert headings[0].startswith(f"## {version} "), "say in CHANGELOG.md what is new"


def test_the_group_and_the_extra_for_tests_are_the_same() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["dependency-groups"]["test"] == settings["project"]["optional-dependencies"]["test"]

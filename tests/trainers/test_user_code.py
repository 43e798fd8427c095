"""What a trial runs of the user's code is known by what it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainers.user_code import code_of

FILES = {
    "script.py": "import os\nimport torch\nimport beside\nfrom package.inner import layers\n\ndef model():\n    from late import Late\n    return Late\n",
    "beside.py": "width = 8\n",
    "late.py": "class Late: ...\n",
    "unused.py": "width = 9\n",
    "package/__init__.py": "from .shared import one\n",
    "package/shared.py": "one = 1\n",
    "package/unused.py": "two = 2\n",
    "package/inner/__init__.py": "",
    "package/inner/layers.py": "from ..other import three\nfrom . import near\n",
    "package/inner/near.py": "import script\n",
    "package/other.py": "three = 3\n",
}
RUN = {"script.py", "beside.py", "late.py"} | {
    name for name in FILES if name.startswith("package/") and "unused" not in name
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("home")
def test_what_is_named_and_what_it_imports_is_known_and_nothing_else() -> None:
    assert set(code_of(["script:model"])) == RUN
    assert set(code_of(["beside:width", None, "gpt"])) == {"beside.py"}
    assert set(code_of(["package.inner.layers:x"])) == RUN, "it imports the script"
    assert set(code_of(["package.other:three"])) == {"package/__init__.py", "package/shared.py", "package/other.py"}


@pytest.mark.parametrize(
    "path", ["torch.optim:Muon", "os.path:join", "trainers.loop:train", "no_such:thing", "gpt", "sys:exit"]
)
def test_what_is_not_the_users_has_no_code(path: str) -> None:
    assert code_of([path]) == {}


@pytest.mark.parametrize(
    ("name", "old", "new", "changes"),
    [
        ("beside.py", "width = 8", "width = 16", True),
        ("package/inner/near.py", "import script", "import script\nx = 1", True),
        ("late.py", "class Late: ...", "class Late:\n    width = 2", True),
        ("beside.py", "width = 8", "# how wide\n\nwidth  =  8  # very", False),
        ("unused.py", "width = 9", "width = 10", False),
        ("package/unused.py", "two = 2", "two = 3", False),
    ],
    ids=["a number", "far below", "imported late", "a comment", "not imported", "not imported from a package"],
)
def test_a_change_of_what_runs_is_seen_and_no_other(home: Path, name: str, old: str, new: str, changes: bool) -> None:
    before = code_of(["script:model"])
    (home / name).write_text(FILES[name].replace(old, new))
    after = code_of(["script:model"])
    assert before.keys() == after.keys()
    assert [one for one in before if before[one] != after[one]] == ([name] if changes else [])


def test_a_file_that_is_no_python_is_known_by_its_bytes(home: Path) -> None:
    (home / "beside.py").write_text("width = (\n")
    before = code_of(["beside:width"])
    (home / "beside.py").write_text("width = ((\n")
    assert before != code_of(["beside:width"])

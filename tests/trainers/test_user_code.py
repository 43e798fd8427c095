"""What a trial runs of the user's code is known by what it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchscout.orchestrator.study.reuse import source_digest
from batchscout.trainers.user_code import SCRIPT, code_of, import_path_of

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


SCRIPTS = {
    "scripts/train.py": "import net\nfrom models.wide import Wide\nimport beside\n",
    "scripts/net.py": "width = 8\n",
    "scripts/models/wide.py": "from .narrow import Narrow\n",
    "scripts/models/narrow.py": "width = 4\n",
}


@pytest.mark.parametrize("how", ["relative", "absolute", "from elsewhere"])
def test_a_script_counts_by_its_path_with_what_it_imports_from_its_own_folder(
    home: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    for name, text in SCRIPTS.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    (home / "elsewhere").mkdir()
    monkeypatch.chdir(home / ("elsewhere" if how == "from elsewhere" else "."))
    script = {"relative": "scripts/train.py", "absolute": str(home / "scripts/train.py")}.get(
        how, "../scripts/train.py"
    )
    path = [import_path_of(SCRIPT, {"script": script})]
    before, measured = code_of(path), source_digest(path)
    its_own = "train.py" if how == "from elsewhere" else "scripts/train.py"
    assert set(before) == {its_own, "net.py", "models/wide.py", "models/narrow.py", "beside.py"}
    (home / "scripts/models/narrow.py").write_text("width = 5\n")
    assert [name for name, digest in code_of(path).items() if before[name] != digest] == ["models/narrow.py"]
    assert source_digest(path) != measured, "what was measured of other code is not taken for this one's"


@pytest.mark.usefixtures("home")
def test_what_a_folder_without_an_init_holds_is_no_measurement_of_other_code(home: Path) -> None:
    (home / "loose").mkdir()
    digests = set[str]()
    for width in (8, 9):
        (home / "loose/net.py").write_text(f"width = {width}\n")
        digests.add(source_digest(["loose.net:Net"]))
    assert len(digests) == 2


@pytest.mark.parametrize(
    "path", ["torch.optim:Muon", "os.path:join", "batchscout.trainers.loop:train", "no_such:thing", "gpt", "sys:exit"]
)
def test_what_is_not_the_users_has_no_code(path: str) -> None:
    assert code_of([path]) == {}


@pytest.mark.parametrize(
    ("name", "old", "new", "changes"),
    [
        ("beside.py", "width = 8", "width = 16", True),
        ("package/inner/near.py", "import script", "import script\nx = 1", True),
        ("late.py", "class Late: ...", "class Late:\n    width = 2", True),
        ("beside.py", "width = 8", "# how wide\n\nwidth = 8  # very\n\n", False),
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


def test_of_an_installed_package_the_module_that_is_named_counts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "site-packages"
    (place / "company").mkdir(parents=True)
    (place / "company/__init__.py").write_text("")
    (place / "company/nets.py").write_text("from company import layers\n")
    (place / "company/layers.py").write_text("width = 1\n")
    monkeypatch.syspath_prepend(str(place))
    before = code_of(["company.nets:Net"])
    assert set(before) == {"company/__init__.py", "company/nets.py"}
    (place / "company/nets.py").write_text("from company import layers\nwidth = 2\n")
    assert code_of(["company.nets:Net"])["company/nets.py"] != before["company/nets.py"]


def test_the_same_text_has_the_same_digest_in_every_version_of_python(home: Path) -> None:
    """The syntax tree is another in each."""
    (home / "beside.py").write_text("text = f'{1!r:>{2}}'\n\n\ndef width(x, /): return x  # wide\n")
    assert code_of(["beside:width"]) == {"beside.py": "60a03540b8f00ab0"}


def test_lines_of_a_string_are_no_comments_and_count_where_they_are_empty(home: Path) -> None:
    (home / "beside.py").write_text('text = """\n# one\n\n"""\n')
    before = code_of(["beside:text"])
    (home / "beside.py").write_text('text = """\n# one\n"""\n')
    assert before != code_of(["beside:text"])


@pytest.mark.parametrize("between", ["\n", "\n\f\n", "\ntext = 'a\u2028b'\n", "\r\n", "\rx = 1\r"])
def test_lines_are_told_apart_as_python_does(home: Path, between: str) -> None:
    """A text editor may end them, and a page, in other ways."""

    def digest(width: int, *, bom: str = "", after: str = "") -> str:
        text = f"{bom}import os  # to read{between}{between}class A:{after}\n    width = 0{between}width = {width}{after}\n"
        (home / "beside.py").write_bytes(text.encode())
        return code_of(["beside:width"])["beside.py"]

    assert digest(1) != digest(2)
    assert digest(1) == digest(1, bom="\ufeff") == digest(1, after="  ") == digest(1, after="  # mine")


def test_a_module_of_the_users_counts_though_python_has_one_of_its_name(home: Path) -> None:
    (home / "nturl2path.py").write_text("width = 1\n")
    assert set(code_of(["nturl2path:width"])) == {"nturl2path.py"}


def test_a_file_that_is_no_python_is_known_by_its_bytes(home: Path) -> None:
    (home / "beside.py").write_text("width = (\n")
    before = code_of(["beside:width"])
    (home / "beside.py").write_text("width = ((\n")
    assert before != code_of(["beside:width"])

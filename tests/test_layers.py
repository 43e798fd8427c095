"""Imports run one way, and each room loads only what belongs to it: a training run is debugged without Ray, a journal read
without torch."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import batchscout.orchestrator
import batchscout.trainers
from tests.support.every import for_every

ROOT = Path(__file__).parents[1]
# A room imports itself, `trainers`, the files that know nothing of studies, and the rooms that stand here beside it.
LEAVES = {"environment", "installed", "near_words", "units", "signals", "terminal"}
ROOMS = {
    "config": set[str](),
    "study": {"config"},
    "stages": {"config", "study"},
    "decisions": {"config", "study", "stages"},
    "execution": {"config", "study", "decisions"},
    "launch": {"execution"},
    "output": {"config", "study", "stages", "decisions"},
    "doctor": {"config", "output"},
    "init": {"config", "output"},
    # And the files on top, below cli.py alone.
    "verbs": {"config", "study", "execution", "launch", "output", "doctor", "init", "preflight", "run", "trial"},
}
# The same of `trainers`, with the files on top as rooms of one file. Only `loop`, which imports them all, is not here.
LEAVES_OF_TRAINERS = {
    "checksums",
    "config",
    "counted",
    "criteria",
    "descendants",
    "errors",
    "files",
    "having",
    "knobs",
    "launcher",
    "lines",
    "metrics",
    "notices",
    "report",
    "step_log",
    "strict",
    "user_code",
}
PARTS_OF_A_RUN = {"checkpoints", "data", "device", "model", "noise", "sources", "speed", "step"}
ROOMS_OF_TRAINERS = {
    **{leaf: set[str]() for leaf in sorted(LEAVES_OF_TRAINERS)},
    "sources": set[str](),
    "data": {"device", "sources"},
    "device": set[str](),
    "model": {"data", "device", "sources"},
    "noise": {"device", "model"},
    "step": {"data", "model", "noise"},
    "speed": {"data", "device", "model", "noise"},
    "checkpoints": {"data", "model"},
    "run": PARTS_OF_A_RUN,
    "reporting": {*PARTS_OF_A_RUN, "run"},
    "before": {*PARTS_OF_A_RUN, "run"},
}
# What each room may load, of the libraries that take seconds or a cluster.
HEAVY = {"ray", "torch", "wandb"}
ALLOWED: dict[str, set[str]] = {"execution": {"ray", "torch"}}


LOAD_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(getattr(package, "__path__", ()), package.__name__ + "."):
    importlib.import_module(module.name)
print(*sys.modules)
"""


def loaded_with(name: str) -> set[str]:
    """The libraries, of those that matter here, that a fresh process has loaded after importing a module and all below it."""
    done = subprocess.run([sys.executable, "-c", LOAD_ALL, name], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {*HEAVY, "batchscout.orchestrator"} & set(done.stdout.split())


def imports(source: str) -> set[str]:
    """The dotted names that a file imports, at its head or inside a function."""
    found = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def imported_rooms(file: Path, package: str) -> set[str]:
    """The rooms of a package, and the files on top, that a file imports."""
    ours = f"batchscout.{package}."
    return {name.removeprefix(ours).split(".")[0] for name in imports(file.read_text()) if name.startswith(ours)}


def upward(package: str, room: str, below: set[str]) -> dict[str, set[str]]:
    """What the files of a room, or a file on top, import of their package that is not below them."""
    place = ROOT / package / room
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    found = {str(f.relative_to(ROOT)): imported_rooms(f, package) - below - {room} for f in files}
    return {file: rooms for file, rooms in found.items() if rooms}


@for_every(room=ROOMS)
def test_a_room_imports_only_the_rooms_below_it(room: str) -> None:
    assert upward("orchestrator", room, ROOMS[room] | LEAVES) == {}


@for_every(room=ROOMS_OF_TRAINERS)
def test_a_room_of_the_trainers_imports_only_the_rooms_below_it(room: str) -> None:
    assert upward("trainers", room, ROOMS_OF_TRAINERS[room] | LEAVES_OF_TRAINERS) == {}


def modules_of(package: str) -> dict[str, Path]:
    """The files of a package, by the names that they are imported by."""
    files = (ROOT / package).rglob("*.py")
    return {
        f"batchscout.{'.'.join(file.relative_to(ROOT).with_suffix('').parts)}".removesuffix(".__init__"): file
        for file in files
    }


def at_run_time(file: Path) -> str:
    """The file's text without what only a type checker reads."""
    tree = ast.parse(file.read_text())
    for_types = ast.dump(ast.Name("TYPE_CHECKING", ast.Load()))
    tree.body = [one for one in tree.body if not (isinstance(one, ast.If) and ast.dump(one.test) == for_types)]
    return ast.unparse(tree)


def test_no_files_import_each_other_in_a_circle() -> None:
    """Wherever in a file an import stands: one inside a function only hides the circle. Those for types alone load nothing."""
    modules = modules_of("trainers") | modules_of("orchestrator")
    below = {
        module: {name if name in modules else name.rpartition(".")[0] for name in imports(at_run_time(file))} - {module}
        for module, file in modules.items()
    }
    in_order = list(TopologicalSorter(below).static_order())  # or a CycleError names the circle
    assert modules.keys() <= {*in_order}


@pytest.mark.parametrize("inner", ["stages.estimates", "study.storage"])
def test_an_inner_room_knows_nothing_of_the_room_around_it(inner: str) -> None:
    around, _, name = inner.partition(".")
    known = {one for file in (ROOT / "orchestrator" / around / name).glob("*.py") for one in imports(file.read_text())}
    assert {
        one for one in known if one.startswith(f"batchscout.orchestrator.{around}.") and f".{name}." not in one
    } == set()


def test_of_the_room_around_them_nodes_know_what_is_private_to_ray() -> None:
    files = (ROOT / "orchestrator" / "execution" / "nodes").glob("*.py")
    known = {name for file in files for name in imports(file.read_text())}
    around = {name for name in known if name.startswith("batchscout.orchestrator.execution.") and ".nodes." not in name}
    assert {name.split(".")[3] for name in around} == {"ray_private"}


def test_every_room_is_known_here() -> None:
    packages = {module.name for module in pkgutil.iter_modules(batchscout.orchestrator.__path__) if module.ispkg}
    assert packages == ROOMS.keys()
    packages = {module.name for module in pkgutil.iter_modules(batchscout.trainers.__path__) if module.ispkg}
    assert packages == {room for room in ROOMS_OF_TRAINERS if (ROOT / "trainers" / room).is_dir()}


@pytest.mark.slow
@pytest.mark.parametrize("room", ROOMS)
def test_a_room_loads_only_the_libraries_that_belong_to_it(room: str) -> None:
    assert loaded_with(f"batchscout.orchestrator.{room}") - {"batchscout.orchestrator"} <= ALLOWED.get(room, set())


@pytest.mark.slow
def test_the_training_loop_loads_torch_alone() -> None:
    assert loaded_with("batchscout.trainers.loop") == {"torch"}


@pytest.mark.parametrize("module", ["config", "lines", "notices", "step.ramps", "report", "step_log"])
def test_what_the_driver_reads_of_a_run_loads_no_torch(module: str) -> None:
    assert loaded_with(f"batchscout.trainers.{module}") == set()


@pytest.mark.slow
def test_the_trainers_know_neither_ray_nor_a_tracker_nor_a_study() -> None:
    assert loaded_with("batchscout.trainers") == {"torch"}
    files = Path(batchscout.trainers.__path__[0]).rglob("*.py")
    foreign = ("ray.", "wandb.", "batchscout.orchestrator.")
    for file in files:
        assert not [name for name in imports(file.read_text()) if f"{name}.".startswith(foreign)], file


def imported_test_modules(source: str) -> set[str]:
    """The names of test modules, or of what is in them, that a file imports."""
    return {name for name in imports(source) if any(part.startswith("test_") for part in name.split("."))}


@for_every(file=sorted((ROOT / "tests").rglob("*.py")))
def test_no_file_imports_a_test_module(file: Path) -> None:
    """What tests share lives in tests/support: a test module can then be moved, or split, alone."""
    assert imported_test_modules(file.read_text()) == set()


@pytest.mark.parametrize(
    "line",
    [
        "from tests.stages.test_search import World",
        "from tests.stages import test_search",
        "import tests.stages.test_search",
        "from .test_search import World",
        "def inside():\n    from tests.test_cli import call",
    ],
)
def test_an_import_of_a_test_module_is_seen_however_it_is_written(line: str) -> None:
    assert imported_test_modules(line)


OURS = [file for place in ("orchestrator", "trainers", "tests", "benchmarks") for file in (ROOT / place).rglob("*.py")]


PLACES = ("batchscout.", "tests.")


def private_names_of_others(source: str) -> list[str]:
    """Those that a file imports, and those that it takes from a module that it imports."""
    ours = {name for name in imports(source) if name.startswith(PLACES)}
    modules = {name.rpartition(".")[2] for name in ours}
    taken = [
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules
    ]
    return [name for name in (*ours, *taken) if "._" in name.replace(".__", "")]


def test_no_private_name_is_used_from_another_file() -> None:
    """Of a name with an underscore one knows that nobody else uses it."""
    found = {
        str(file.relative_to(ROOT)): names for file in OURS if (names := private_names_of_others(file.read_text()))
    }
    assert found == {}


def test_a_private_name_is_seen_however_it_is_taken() -> None:
    source = "from batchscout.trainers import loop\nfrom batchscout.trainers.loop import _train\nloop._warm()\nloop.__name__\nother._own"
    assert sorted(private_names_of_others(source)) == ["batchscout.trainers.loop._train", "loop._warm"]

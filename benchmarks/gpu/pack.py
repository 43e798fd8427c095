"""Pack what a run needs on a GPU machine that has Python, a CUDA build of torch and no package registry, and count it.

    python benchmarks/gpu/pack.py --have LIST [--into .whl] [--python 3.12] [--limit-mib 64]

LIST names what is installed there, one distribution a line (`pip list --format=freeze` writes such a list). The wheels of all that is
missing go into the folder, the project's own, too, and Ray's without what a study never uses; the working tree's files travel beside. README.md beside this has the
command for the other machine. Exits with 1 where both together are more than may be carried.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
MIB = 2**20
REQUIREMENTS = (
    "ray[tune,train]>=2.60,<2.61", "datasets", "tokenizers", "pydantic", "pyyaml", "numpy", "pyarrow", "cloudpickle", "rich",
    "nvidia-ml-py",
)  # fmt: skip
"""The project's without wandb (20 MiB, and off unless asked for), torch (there, as a CUDA build) and Ray's dashboard."""
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")
UNUSED_OF_RAY = re.compile(r"ray/(jars|rllib|serve|llm|dashboard/client)/")
"""Half of its wheel: Java, reinforcement learning, serving, and the dashboard's pages."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--have", type=Path, required=True, metavar="LIST", help="what is installed on the other machine"
    )
    parser.add_argument("--into", type=Path, default=ROOT / ".whl", help="the folder of the wheels")
    parser.add_argument("--python", default="3.12", help="the other machine's")
    parser.add_argument("--limit-mib", type=float, default=64, help="the most that may be carried")
    chosen = parser.parse_args()
    have = {normal(re.split(r"[=@ ]", line)[0]) for line in chosen.have.read_text().splitlines() if line.strip()}
    missing = [wanted for wanted in resolved(chosen.python) if normal(wanted.partition("==")[0]) not in have]
    chosen.into.mkdir(exist_ok=True)
    for old in chosen.into.glob("*.whl"):  # two versions of one package stop the whole installation
        old.unlink()
    pip("download", *for_python(chosen.python), "--no-deps", "--dest", str(chosen.into), *missing)
    pip("wheel", "--no-deps", "--wheel-dir", str(chosen.into), str(ROOT))
    for wheel in chosen.into.glob("ray-*.whl"):
        slim(wheel)
    wheels = sum(wheel.stat().st_size for wheel in chosen.into.glob("*.whl"))
    tree = sum((ROOT / name).stat().st_size for name in tracked() if (ROOT / name).is_file())
    total = (wheels + tree) / MIB
    print(f"{len(missing) + 1} wheels {wheels / MIB:.1f} MiB, working tree {tree / MIB:.1f} MiB: {total:.1f} MiB")
    if total > chosen.limit_mib:
        raise SystemExit(f"{total:.1f} MiB are more than the {chosen.limit_mib:g} MiB that may be carried")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def for_python(version: str) -> list[str]:
    platforms = (f"--platform={name}_x86_64" for name in PLATFORMS)
    return ["--only-binary=:all:", f"--python-version={version}", "--implementation=cp", *platforms]


def resolved(version: str) -> list[str]:
    """Return NAME==VERSION of all that REQUIREMENTS need."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        nowhere = ("--dry-run", "--ignore-installed", f"--target={folder}/none", f"--report={report}")
        pip("install", *nowhere, *for_python(version), *REQUIREMENTS)
        found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return [f"{metadata['name']}=={metadata['version']}" for metadata in found]


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", arguments[0], "--quiet", *arguments[1:]], check=True)


def slim(wheel: Path) -> None:
    """Take what is unused out of Ray's wheel, and out of its list of files."""
    whole = wheel.with_suffix(".whole")
    wheel.rename(whole)
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
        for item in old.infolist():
            if UNUSED_OF_RAY.match(item.filename):
                continue
            data = old.read(item)
            if item.filename.endswith(".dist-info/RECORD"):
                kept = (line for line in data.decode().splitlines(keepends=True) if not UNUSED_OF_RAY.match(line))
                data = "".join(kept).encode()
            new.writestr(item, data, compress_type=zipfile.ZIP_DEFLATED)
    whole.unlink()


def tracked() -> list[str]:
    """Return the files of the working tree that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]


if __name__ == "__main__":
    main()

"""The first minutes on a GPU: what is worth most first, under one deadline, a JSON line for each thing as soon as it is known.

    python benchmarks/gpu/all.py --limit-seconds 420 --out FILE [--after NAME] [--without NAME ...] [--device cpu --tiny]

Whatever no longer fits is left out by name; `--after` begins behind the line of that name, as a second run does, and `--without` leaves
out what is known already. A line that is not as expected has `ok: false`, and the exit code is 1 then. Beside FILE, FILE.studies.tar.gz
holds the studies that were run. README.md beside this says how to bring all that is needed to a machine without a package registry.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path

import checks
import speed
import studies
from lines import HERE, ROOT, Line, Lines, Setting, end


def main() -> None:
    chosen = options()
    lines, until = Lines(chosen.out), time.monotonic() + chosen.limit_seconds
    ours = [str(HERE), str(ROOT / "benchmarks")]
    sys.path[:0] = ours
    sys.path.append(str(ROOT))
    with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as folder:
        os.environ |= {
            # What is installed comes before the tree, whose links to the packages a copy may have lost.
            "PYTHONPATH": os.pathsep.join([*ours, *filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]),
            "BATCHSCOUT_CACHE": f"{folder}/cache",
        }
        if chosen.device == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"  # what it takes to compile is a figure there
        setting = Setting(chosen.device, chosen.tiny, Path(folder), lines, until, set())
        leave_nothing(setting)
        for group in side_by_side(line for line in after(chosen.after) if line.name not in chosen.without):
            # On a CPU they would only be in each other's way: ranks that wait for each other take what others need.
            with ThreadPoolExecutor(len(group) if chosen.device == "cuda" else 1) as threads:
                list(threads.map(lambda line: line.take(setting), group))
            if chosen.out is not None:
                studies.pack(setting, Path(f"{chosen.out}.studies.tar.gz"))
    lines.say("end", num_amiss=lines.num_amiss)
    raise SystemExit(1 if lines.num_amiss else 0)


def in_order() -> list[Line]:
    """Return everything that is to be found out, the most valuable first. Seconds are those of an H200, or estimates."""

    def fresh(module: str, function: str, **told: object):
        return lambda setting: setting.in_fresh_process(module, function, **told)

    def sides(size: int, *names: str):
        return partial(speed.turns, size=size, names=names)

    whole, blocks, chunked = "ours, whole", "ours, blocks", "ours, whole, chunked"
    return [
        Line("versions", 8, fresh("checks", "versions")),
        Line("product of 8192 x 8192 in bfloat16", 5, fresh("checks", "product")),
        Line("Ray sees the GPU", 10, fresh("checks", "ray_sees_it")),
        Line("a small study, whole", 235, studies.main_job),
        Line("float32 gradient of every split", 25, fresh("checks", "gradient_of_splits"), alone=False),
        Line("bfloat16 gradient", 20, fresh("checks", "gradient_in_bfloat16"), alone=False),
        Line("no wait in a step", 15, fresh("checks", "steps_do_not_wait"), alone=False),
        Line("memory is back after running out of it", 25, checks.memory_comes_back, alone=False),
        Line("sides of a step, m=32", 105, sides(32, whole, blocks, f"{whole}, statistics", f"{blocks}, statistics")),
        Line("the frontier to the edge", 200, partial(studies.frontier, compiled=False)),
        # A second run begins here.
        Line(
            "bitwise resume under deterministic algorithms",
            30,
            partial(checks.resumed, deterministic=True),
            alone=False,
        ),
        Line("resume", 40, partial(checks.resumed, deterministic=False), alone=False),
        Line("float16 over 30 steps", 17, fresh("checks", "float16"), alone=False),
        Line("a driver killed while it trains", 110, studies.killed, alone=False),
        Line("targets out of range", 80, studies.out_of_range, alone=False),
        Line("gradient_error.py", 60, checks.gradient_error, alone=False),
        Line("communication.py", 20, checks.communication, alone=False),
        Line("first loss and peak of every mode", 67, fresh("checks", "modes"), alone=False),
        *(
            Line(f"compiling with {gib:g} GiB left", 38, partial(checks.little_is_left, gib=gib))
            for gib in (0.2, 1.0, 2.0)
        ),
        Line("sides of a step, m=8", 95, sides(8, whole, blocks)),
        Line("sides of a step, m=64", 120, sides(64, whole, chunked)),
        Line("sides of a step, m=16", 95, sides(16, whole, chunked)),
        Line("longest kernels", 40, fresh("speed", "longest_kernels", size=32)),
        Line("sum of the timed steps against the clock", 15, fresh("checks", "clocks_agree")),
        Line("the compiled frontier to the edge", 150, partial(studies.frontier, compiled=True)),
    ]


def after(name: str | None) -> list[Line]:
    """Return the lines behind the one of this name, and the versions, which no figure is without."""
    versions, *others = lines = in_order()
    return [versions, *others[[line.name for line in lines].index(name) :]] if name is not None else lines


def side_by_side(lines: Iterable[Line]) -> Iterator[list[Line]]:
    """Yield those that run at the same time: one that must be alone, or all neighbours that need not."""
    for alone, neighbours in groupby(lines, lambda line: line.alone):
        group = list(neighbours)
        yield from ([line] for line in group) if alone else [group]


def leave_nothing(setting: Setting) -> None:
    """End what the lines have started where this program is ended, by Ctrl-C for instance."""

    def end_all(number: int, _: object) -> None:
        for group in set(setting.running):
            end(group, signal.SIGKILL)
        os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end_all)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-seconds", type=float, required=True, help="whatever runs then is ended")
    parser.add_argument("--out", type=Path, help="also append the lines to this file")
    names = [line.name for line in in_order()]
    parser.add_argument("--after", choices=names, metavar="NAME", help="begin behind this line")
    parser.add_argument("--without", choices=names, metavar="NAME", nargs="+", default=[], help="leave these out")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU takes: to see that each line runs")
    return parser.parse_args()


if __name__ == "__main__":
    main()

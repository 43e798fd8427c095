"""The first minutes on a GPU: what is worth most first, under one deadline, a JSON line for each thing as soon as it is known.

    python benchmarks/gpu/all.py --limit-seconds 420 --out FILE [--after NAME] [--device cpu --tiny]

Whatever no longer fits is left out by name; `--after` begins behind the line of that name, as a second run does. A line that is not
as expected has `ok: false`, and the exit code is 1 then. Beside FILE, FILE.studies.tar.gz holds the studies that were run. README.md
beside this says how to bring all that is needed to a machine without a package registry.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import checks
import speed
import studies
from lines import HERE, ROOT, Line, Lines, Setting


def main() -> None:
    chosen = options()
    lines, until = Lines(chosen.out), time.monotonic() + chosen.limit_seconds
    ours = [str(ROOT), str(HERE), str(ROOT / "benchmarks")]
    sys.path[:0] = ours
    with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as folder:
        os.environ |= {
            "PYTHONPATH": os.pathsep.join([*ours, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "BATCHSCOUT_CACHE": f"{folder}/cache",
        }
        if chosen.device == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        setting = Setting(chosen.device, chosen.tiny, Path(folder), lines, until)
        for line in after(chosen.after):
            line.take(setting)
            packed = setting.folder / "studies.tar.gz"
            if chosen.out is not None and packed.exists():
                shutil.copy(packed, f"{chosen.out}.studies.tar.gz")
    lines.say("end", num_amiss=lines.num_amiss)
    raise SystemExit(1 if lines.num_amiss else 0)


def in_order() -> list[Line]:
    """Return everything that is to be found out, the most valuable first. Seconds are estimates for one H100."""

    def fresh(module: str, function: str, **told: object):
        return lambda setting: setting.in_fresh_process(module, function, **told)

    def sides(size: int, *names: str):
        return partial(speed.turns, size=size, names=names)

    whole, blocks, chunked = "ours, whole", "ours, blocks", "ours, whole, chunked"
    return [
        Line("versions", 10, fresh("checks", "versions")),
        Line("product of 8192 x 8192 in bfloat16", 5, fresh("checks", "product")),
        Line("Ray sees the GPU", 10, fresh("checks", "ray_sees_it")),
        Line("a small study, whole", 120, studies.main_job),
        Line("float32 gradient of every split", 20, fresh("checks", "gradient_of_splits")),
        Line("bfloat16 gradient", 10, fresh("checks", "gradient_in_bfloat16")),
        Line("no wait in a step", 10, fresh("checks", "steps_do_not_wait")),
        Line("memory is back after running out of it", 30, checks.memory_comes_back),
        Line("sides of a step, m=32", 120, sides(32, whole, blocks, f"{whole}, statistics", f"{blocks}, statistics")),
        Line("the frontier to the edge", 80, partial(studies.frontier, compiled=False)),
        # A second run begins here.
        Line("bitwise resume under deterministic algorithms", 30, partial(checks.resumed, deterministic=True)),
        Line("resume", 20, partial(checks.resumed, deterministic=False)),
        Line("float16 over 30 steps", 10, fresh("checks", "float16")),
        *(
            Line(f"compiling with {gib:g} GiB left", 25, partial(checks.little_is_left, gib=gib))
            for gib in (0.2, 1.0, 2.0)
        ),
        Line("a driver killed while it trains", 60, studies.killed),
        Line("targets out of range", 40, studies.out_of_range),
        Line("sides of a step, m=64", 100, sides(64, whole, chunked)),
        Line("sides of a step, m=16", 70, sides(16, whole, chunked)),
        Line("sides of a step, m=8", 60, sides(8, whole, chunked)),
        Line("gradient_error.py", 60, checks.gradient_error),
        Line("communication.py", 40, checks.communication),
        Line("longest kernels", 40, fresh("speed", "longest_kernels", size=32)),
        Line("first loss and peak of every mode", 60, fresh("checks", "modes")),
        Line("sum of the timed steps against the clock", 15, fresh("checks", "clocks_agree")),
        Line("the same command repeats nothing", 40, studies.again),
        Line("the compiled frontier to the edge", 150, partial(studies.frontier, compiled=True)),
    ]


def after(name: str | None) -> list[Line]:
    lines = in_order()
    return lines[[line.name for line in lines].index(name) + 1 :] if name is not None else lines


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-seconds", type=float, required=True, help="everything has ended by then")
    parser.add_argument("--out", type=Path, help="also append the lines to this file")
    parser.add_argument("--after", choices=[line.name for line in in_order()], metavar="NAME", help="begin behind it")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU takes: to see that each line runs")
    return parser.parse_args()


if __name__ == "__main__":
    main()

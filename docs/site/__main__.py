"""Build the site: `python -m docs.site [--into FOLDER]`. It ends with 1 where a page has a link or an anchor that leads nowhere."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from docs.site.gather import gather
from docs.site.pages import ROOT


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.site", description=__doc__)
    parser.add_argument("--into", type=Path, default=ROOT / "build" / "site", help="a folder, for pages and site")
    into = parser.parse_args().into.absolute()
    gather(into)
    # In a process of its own, whose working directory is the folder: Zensical keeps a cache there.
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", "mkdocs.yml"]
    built = subprocess.run(command, cwd=into)
    if built.returncode == 0:
        print(f"the site: {into / 'site' / 'index.html'}")
    return built.returncode


if __name__ == "__main__":
    sys.exit(main())

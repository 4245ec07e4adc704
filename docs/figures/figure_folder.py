"""Where the programs here write their figures."""

import argparse
from pathlib import Path


def figure_folder(description: str | None) -> Path:
    """Return the folder that is the only argument of a program that draws (this one by default), and make it."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n\n")[0])
    default = Path(__file__).resolve().parent
    parser.add_argument("folder", nargs="?", type=Path, default=default, help="where the figures go (docs/figures)")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    return folder

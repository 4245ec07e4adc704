"""The files of this repository, for the sanity tests."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_HIDDEN_BUT_OURS = {".ci", ".dockerignore", ".gitignore", ".pre-commit-config.yaml"}
_GENERATED = {"build", "dist", "runs", "__pycache__"}
_BINARY = {".so", ".png", ".jpg", ".gif", ".pdf", ".npz", ".pyc"}


def list_text_files():
    """List every text file that belongs to the repository, generated and hidden ones left out."""
    return [path for path in _list_files(ROOT) if path.suffix not in _BINARY]


def list_python_files(*folders):
    return [path for folder in folders for path in _list_files(ROOT / folder) if path.suffix == ".py"]


def found_in(paths, find, words=("",)):
    """Map the place of each file to what a function finds in its text; texts without one of the words have nothing to find."""
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in paths}
    likely = {name: text for name, text in texts.items() if any(word in text for word in words)}
    return {name: found for name, text in likely.items() if (found := find(text))}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _list_files(folder):
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        hidden = path.name.startswith(".") and path.name not in _HIDDEN_BUT_OURS
        if hidden or path.name in _GENERATED or path.name.endswith(".egg-info"):
            continue
        if path.is_dir():
            yield from _list_files(path)
        else:
            yield path

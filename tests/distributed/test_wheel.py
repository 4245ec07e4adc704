"""A wheel, installed where the source cannot be seen, trains from any folder and decides by its C++ kernels."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.distributed.launch import REPOSITORY
from tests.distributed.small_run import working_flags, write_working_files

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(find_spec("pip") is None or shutil.which("c++") is None, reason="needs pip and a C++ compiler"),
]
BUILT = ("setup.py", "pyproject.toml", "LICENSE", "pretrain_mllm.py")
OFFLINE = ("--no-deps", "--no-index", "--quiet", "--disable-pip-version-check")


def copy_source(folder: Path) -> None:
    """Copy the files that a wheel is built of, without what was built beside them; kernels are not optimised."""
    for name in ("csrc", "megatron", "multimodal"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in BUILT:
        shutil.copy(REPOSITORY / name, folder)
    setup = folder / "setup.py"
    setup.write_text(setup.read_text().replace("-O3", "-O0"))  # compiling takes most of the test


def install_wheel(folder: Path, *, source: Path, wheels: Path) -> None:
    """Install a wheel alone; dependencies come from this environment."""
    python(source, "-m", "pip", "wheel", *OFFLINE, "--no-build-isolation", "--wheel-dir", wheels, source)
    (wheel,) = wheels.iterdir()
    python(source, "-m", "pip", "install", *OFFLINE, "--target", folder, wheel)


def python(folder: Path, *arguments: object, path: Path | None = None) -> str:
    """Run Python in a folder, with `path` before everything that is installed; returns what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, *map(str, arguments)]
    ended = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def test_it_trains_from_another_folder_by_its_kernels(tmp_path: Path) -> None:
    source, installed, folder = (tmp_path / name for name in ("source", "installed", "elsewhere"))
    copy_source(source)
    install_wheel(installed, source=source, wheels=tmp_path / "wheels")
    folder.mkdir()
    write_working_files(folder)
    flags = [item for pair in working_flags(folder).items() for item in pair if pair[0] != "--vision-dp"]
    output = python(folder, "-m", "pretrain_mllm", *flags, path=installed)
    assert "decisions by C++ kernels" in output
    assert "step 2 done" in output
    assert places_of("pretrain_mllm", "multimodal._kernels", "megatron.runtime.session", folder=folder, path=installed) <= {
        installed
    }, "the source was run, not the wheel"
    assert places_of("megatron.core", folder=folder, path=installed).isdisjoint({installed})
    say = "from multimodal.kernels import describe_kernels; print(describe_kernels())"
    beside = "Python references, which are slow: the C++ kernels are not built beside the Python files that run"
    assert beside in python(source, "-c", say, path=installed), "a folder of sources hides the installed kernels"


def places_of(*names: str, folder: Path, path: Path) -> set[Path]:
    """Which of `path` and the root each module is found below."""
    code = f"from importlib.util import find_spec\nfor name in {names}: print(find_spec(name).origin)"
    found = [Path(line) for line in python(folder, "-c", code, path=path).splitlines()]
    assert len(found) == len(names)
    return {path if file.is_relative_to(path) else Path("/") for file in found}

"""What gets installed, and that it leaves the installed megatron-core visible."""

import importlib.util
import re
import tomllib
from fnmatch import fnmatch

from packaging.requirements import Requirement
from setuptools import find_namespace_packages

from tests.sanity.repository import ROOT, list_text_files

DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_megatron_stays_a_namespace():
    assert not (ROOT / "megatron" / "__init__.py").exists()
    assert [path.name for path in (ROOT / "megatron").iterdir() if path.name != "__pycache__"] == ["runtime"]
    assert importlib.util.find_spec("megatron").origin is None


def test_megatron_core_and_the_runtime_are_found_side_by_side():
    core, runtime = (importlib.util.find_spec(f"megatron.{name}") for name in ("core", "runtime"))
    assert core is not None, "install megatron-core"
    assert not core.origin.startswith(str(ROOT / "megatron"))
    assert next(iter(runtime.submodule_search_locations)).endswith("megatron/runtime")


def test_only_braids_packages_are_installed():
    find = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    packages = set(find_namespace_packages(ROOT, include=find["include"], exclude=find["exclude"]))
    assert {"multimodal", "multimodal.values", "multimodal.balance", "megatron.runtime"} <= packages
    assert all(f"{name}.".startswith(("multimodal.", "megatron.runtime.")) for name in packages)


def test_all_that_packages_read_is_installed():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    globs = [(ROOT / package.replace(".", "/"), pattern) for package, patterns in data.items() for pattern in patterns]
    installed = {path for folder, pattern in globs for path in folder.glob(pattern)}
    files = {path for path in list_text_files() if path.relative_to(ROOT).parts[0] in ("multimodal", "megatron")}
    assert {path for path in files if path.suffix != ".py"} <= installed


def is_left_out_of_the_image(path):
    """As docker reads .dockerignore, for the patterns that are there: a name at the root, or with **/ in any folder."""
    patterns = (ROOT / ".dockerignore").read_text().split()
    parts = path.relative_to(ROOT).parts
    return any(
        any(fnmatch(part, pattern.removeprefix("**/")) for part in (parts if pattern.startswith("**/") else parts[:1]))
        for pattern in patterns
    )


def test_the_image_gets_all_that_is_built_and_run_and_builds_its_own_kernels():
    assert not [path for path in list_text_files() if is_left_out_of_the_image(path)]
    assert is_left_out_of_the_image(ROOT / "multimodal" / "_kernels.cpython-311-x86_64-linux-gnu.so")
    assert "assert kernels is not None" in DOCKERFILE


def test_the_image_has_all_that_runs_ask_for_and_lies_where_slurm_looks_for_it():
    extras = re.search(r"'\.\[([\w,]+)\]'", DOCKERFILE)[1].split(",")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras) == project["optional-dependencies"].keys() - {"all", "docs", "test", "triton", "vision"}
    allowed = next(each for each in map(Requirement, project["dependencies"]) if each.name == "megatron-core")
    assert allowed.specifier.contains(re.search(r"megatron-core==([\d.]+)", DOCKERFILE)[1])
    folder = re.search(r"^WORKDIR (\S+)$", DOCKERFILE, re.MULTILINE)[1]
    assert f'BRAID="${{BRAID:-{folder}}}"' in (ROOT / "scripts" / "slurm" / "pretrain.sh").read_text()

"""Which files a manifest may name: those in its own folder, unless the person says otherwise."""

import os
from pathlib import Path

from multimodal.values.errors import DataError


class ManifestPaths:
    """Looks up the files that a manifest names; a manifest that somebody else wrote must not reach beside its folder."""

    def __init__(self, folder: Path, *, allows_outside: bool) -> None:
        """folder: the manifest's; allows_outside: whether absolute paths, `..` and links may lead out of it."""
        self._folder, self._allows_outside = folder, allows_outside
        self._root = os.path.realpath(folder)
        self._real_folders: dict[str, str] = {}

    def resolve(self, path: str, *, where: str) -> str:
        """Return a path that can be opened; raises DataError when there is no such file or it lies outside."""
        full = os.path.join(self._folder, path)
        if not os.path.isfile(full):
            raise DataError(f"{where}: {full} does not exist; restore the file or remove that line")
        if not self._allows_outside and not self._is_inside(real := self._real_path(full)):
            raise DataError(
                f"{where}: {path} leads to {real}, which is not in the manifest's folder {self._root}; move the file there, "
                "or add --allow-outside-paths if you trust the manifest"
            )
        return full

    def _is_inside(self, real: str) -> bool:
        return os.path.commonpath((real, self._root)) == self._root

    def _real_path(self, path: str) -> str:
        """Follow links; a folder's only once, since a manifest names many files in few folders."""
        if os.path.islink(path):
            return os.path.realpath(path)
        folder, name = os.path.split(path)
        if folder not in self._real_folders:
            self._real_folders[folder] = os.path.realpath(folder)
        return os.path.join(self._real_folders[folder], name)

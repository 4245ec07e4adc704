"""Makes README the site's start page, and links that leave docs/ lead to the repository."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?![a-z]+:|#)([^)\s]+)\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the start page."""
    readme = Path(config.config_file_path).with_name("README.md").read_text()
    files.append(File.generated(config, "index.md", content=rewritten(readme, "", config.repo_url)))
    return files


def on_page_markdown(text: str, *, page: Any, config: Any, **_: Any) -> str:
    """Rewrite a page's links."""
    return text if page.file.src_uri == "index.md" else rewritten(text, "docs", config.repo_url)


def rewritten(text: str, folder: str, repository: str | None) -> str:
    """Return a page of a folder of the repository as one of docs/."""

    def link(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        if path.startswith("docs/"):
            return f"{mark}[{label}]({path.removeprefix('docs/')})"
        return f"[{label}]({repository}/blob/main/{path})" if repository else label

    return LINK.sub(link, text)

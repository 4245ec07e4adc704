"""What README and docs say that can be looked up: names of registries, links, paths, and the README's own example."""

import re

import pytest

from multimodal.balance import BALANCERS
from multimodal.plan.planners import PLANNERS
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes import PASSES
from multimodal.values.action import ActionKind
from tests.sanity.registry_tables import TABLES
from tests.sanity.repository import ROOT, list_text_files

DOCUMENTS = [path for path in list_text_files() if path.suffix == ".md"]
README = (ROOT / "README.md").read_text()

NAME = re.compile(r"`([a-z0-9][a-z0-9-]*)`")
NAME_OF_KIND = re.compile(r"`([A-Z]{1,2})`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FOLDERS = "benchmarks|csrc|docs|examples|megatron/runtime|multimodal|scripts|tests|tools"
PATH = re.compile(rf"(?<![\w/.-])((?:{FOLDERS})/[\w./*-]*\w\.(?:py|md|yaml|sh|png|cpp|h)\b)")


def row(title):
    """Return the text of a row of README's table."""
    return next(line for line in README.splitlines() if line.startswith(f"| {title} |"))


def between(text, first, last):
    return text[text.index(first) + len(first) : text.index(last)]


def anchors(text):
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = [heading.lower().replace("`", "") for heading in HEADING.findall(text)]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (between(row("Schedules"), "builders ", " over the unit graph"), BUILDERS),
        (between(row("Schedules"), "passes ", "; one validator"), PASSES),
        (between(row("Balancers"), "with ", ": whichever"), BALANCERS),
        (between(row("Planning"), "with ", "a search"), PLANNERS),
    ],
)
def test_readme_lists_what_can_be_chosen(text, names):
    assert sorted(NAME.findall(text)) == sorted(names)


@pytest.mark.parametrize(
    ("page", "pattern", "names"),
    [
        ("balance.md", r"^\| `([\w-]+)` \| .* \|.*\|$", BALANCERS),
        ("passes.md", r"^## ([\w-]+)(?: \(.*\))?$", PASSES),
        ("passes.md", r"^\| `([\w-]+)` \|", PASSES),
        ("schedule.md", r"^\*\*`([\w-]+)`\*\*", [name for name in BUILDERS if not name.startswith("dip-")]),
    ],
)
def test_pages_describe_what_can_be_chosen(page, pattern, names):
    found = set(re.findall(pattern, (ROOT / "docs" / page).read_text(), re.MULTILINE))
    assert found == set(names)


@pytest.mark.parametrize(("page", "render"), TABLES)
def test_tables_say_what_the_rows_say(page, render):
    """`python -m tests.sanity.registry_tables` writes them anew."""
    assert f"\n{render()}\n" in (ROOT / "docs" / page).read_text()


def test_the_table_of_actions_has_every_kind():
    table = between((ROOT / "docs" / "schedule.md").read_text(), "## The actions", "## The text form")
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert {kind for line in lines for kind in re.findall(r"`([A-Z]{1,2}) ", line)} == {kind.value for kind in ActionKind}


def test_the_table_of_what_the_executor_does_has_every_kind():
    table = between((ROOT / "docs" / "runtime.md").read_text(), "| action | what happens |", "Where weights are sharded")
    names = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert {kind for name in names for kind in NAME_OF_KIND.findall(name)} == {kind.value for kind in ActionKind}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    text = path.read_text()
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        page = path.parent / name if name else path
        assert page.exists(), f"{path}: {target}"
        assert not anchor or anchor in anchors(page.read_text()), f"{path}: {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_in_documents_exist(path):
    missing = {found for found in PATH.findall(path.read_text()) if not list(ROOT.glob(found))}
    assert missing == set()


def test_a_planted_path_and_a_planted_heading_are_found():
    assert PATH.findall("see `multimodal/nowhere.py`, run tools/nothing.py") == ["multimodal/nowhere.py", "tools/nothing.py"]
    assert anchors("## One `thing`, and more") == {"one-thing-and-more"}


def test_readme_leads_to_every_page():
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    assert pages <= set(LINK.findall(README))


def test_the_readme_s_example_prints_a_schedule(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    exec(between(README, "```python\n", "```\n\nThe half"), {})
    lines = capsys.readouterr().out.strip().splitlines()
    assert [line.split(":")[0] for line in lines] == ["lane 0", "lane 1", "lane 2", "lane 3"]

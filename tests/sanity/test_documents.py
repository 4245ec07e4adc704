"""What README and docs say that can be looked up: names of registries, links, paths, and the example in Python."""

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from importlib.util import find_spec

import pytest

from benchmarks.baselines import COMPARED
from megatron.runtime.flags.flag_parser import FlagParser
from multimodal.balance import BALANCERS
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes import PASSES
from multimodal.values.action import ActionKind
from multimodal.values.errors import ConfigError
from tests.sanity.registry_tables import TABLES
from tests.sanity.repository import ROOT, list_python_files, list_text_files

DOCUMENTS = [path for path in list_text_files() if path.suffix == ".md"]
README = (ROOT / "README.md").read_text()
FEATURES = (ROOT / "docs" / "features.md").read_text()

NAME = re.compile(r"`([a-z0-9][a-z0-9-]*)`")
NAME_OF_KIND = re.compile(r"`([A-Z]{1,2})`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FOLDERS = "benchmarks|csrc|docs|examples|megatron/runtime|multimodal|scripts|tests|tools"
PATH = re.compile(rf"(?<![\w/.-])((?:{FOLDERS})/[\w./*-]*\w\.(?:py|md|yaml|sh|png|cpp|h)\b)")

CODE = re.compile(r"^(?:    .*\n)+|^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAM = re.compile(r"^(?:[^`]*[ /])?(pretrain_mllm|tools/(?!launch)\w+)\.py (.*)")
NO_WORD = re.compile(r"\$\([^()]*\)|(?<= )\$\w+(?= |$)|\"\$\{@[^}]*\}\"|\s#.*|<[^<>]*>|\[[^\[\]]*\]")
"""What a shell or a reader takes away: substitutions, comments, placeholders."""
LEFT_AS_TEXT = re.compile(r"\n(?:\d+\.|[-*|]|```) .*")
"""Lists and tables that code hosts know and Python's Markdown does not: what stands in a list wants four spaces."""
QUOTED_MESSAGE = re.compile(r"`([^`]*)`")


def row(title):
    return next(line for line in FEATURES.splitlines() if line.startswith(f"| {title} |"))


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
        (between(row("Planning"), "with ", "a search"), COMPARED),
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
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= set(LINK.findall(README))


def test_the_example_in_python_prints_a_schedule(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    exec(between((ROOT / "docs" / "api.md").read_text(), "```python\n", "```\n\nThe half"), {})
    lines = capsys.readouterr().out.strip().splitlines()
    assert [line.split(":")[0] for line in lines] == ["lane 0", "lane 1", "lane 2", "lane 3"]


def test_every_page_is_in_the_site_once():
    pages = re.findall(r"^ +- [^:]+: (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(pages) == sorted(["index.md", *(path.name for path in (ROOT / "docs").glob("*.md"))])


@pytest.mark.deep  # links, paths and pages are looked up above, without rendering
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed (pip install 'braid[docs]')")
def test_the_site_builds_without_a_warning_and_leads_to_the_repository(tmp_path):
    given = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "BRAID_REPOSITORY_URL": "https://example.org/braid"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert 'href="https://example.org/braid/blob/main/multimodal/hugging_face"' in (tmp_path / "hugging_face.html").read_text()
    pages = {path.name: path.read_text() for path in tmp_path.glob("*.html")}
    assert [name for name, page in pages.items() if 'href="../' in page] == []
    articles = {name: re.sub(r"(?s)^.*<article|<pre.*?</pre>|</article>.*", "", page) for name, page in pages.items()}
    assert {name: found for name, page in articles.items() if (found := LEFT_AS_TEXT.findall(page))} == {}


def commands(text):
    """Yield program and flags of the command lines in a page's blocks of code."""
    for block in CODE.finditer(text):
        for line in block.group().replace("\\\n", " ").splitlines():
            if found := PROGRAM.match(NO_WORD.sub("", line)):
                yield found[1], [re.sub(r"\$(\w+|\{\w+\})", "1", word) for word in shlex.split(found[2])]


def parse(program, words):
    """Read flags as the program does; raises ConfigError. Where words are left out (...), required ones may be missing."""
    rest, parsers = [word for word in words if word != "..."], []
    if program.startswith("tools/"):
        tools = [program, "tools/simulate"] if program == "tools/emulate" else [program]
        parsers = [importlib.import_module(tool.replace("/", ".")).build_parser() for tool in tools]
    for parser in parsers:
        for part in (*parser._actions, *parser._mutually_exclusive_groups):
            part.required = part.required and "..." not in words and parser.prog != "simulate.py"
        _, rest = parser.parse_known_args(rest)
    if rest and parsers and program not in ("tools/lengths", "tools/cache_latents", "tools/index_data"):
        raise ConfigError(f"unexpected: {rest}")
    FlagParser(None).parse_given(rest)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_command_lines_have_flags_that_exist(path):
    wrong = []
    for program, words in commands(path.read_text()):
        try:
            parse(program, words)
        except ConfigError as problem:
            wrong.append((program, str(problem)))
    assert wrong == []


def test_planted_flags_are_found():
    page = "```bash\npython tools/plan.py --modl M.yaml ...\n```\n\n    torchrun pretrain_mllm.py --learn 1 # fast\n"
    for program, words in commands(page):
        with pytest.raises(ConfigError, match="--modl|--learn"):
            parse(program, words)
    assert [program for program, _ in commands(page)] == ["tools/plan", "pretrain_mllm"]


@cache
def said_by_the_program():
    """Return every string of the sources, with ... for what is put in."""
    found = []
    for path in list_python_files("multimodal", "megatron", "tools"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\0".join(found)


def is_said(message):
    return re.search("[^\0]*".join(map(re.escape, message.split("..."))), said_by_the_program()) is not None


def test_troubleshooting_quotes_what_the_program_says():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    tables = re.findall(r"^\| message[^\n]*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    cells = [line.split("|")[1] for table in tables for line in table.splitlines()]
    messages = [message for cell in cells for message in QUOTED_MESSAGE.findall(cell) if not message.startswith("--")]
    assert len(messages) > 20 and [message for message in messages if not is_said(message)] == []
    assert not is_said("rank ... has lost its patience")

"""The table of what works, docs/features.md: every clause names the tests that would fail if it did not."""

import ast
import re
from functools import cache

import pytest
import yaml

from tests.sanity.repository import ROOT

FEATURES = (ROOT / "docs" / "features.md").read_text()
TABLE = FEATURES[: FEATURES.index("`braid` estimates layouts")]
ROW = re.compile(r"^\| ([A-Z][^|]+) \| (.*) \|$", re.MULTILINE)
TESTS_OF_MANY_CLAUSES = {
    "MASTER": "distributed/test_master.py::test_loss_and_every_gradient_equal_one_process",
    "FAMILIES": "distributed/test_hugging_face_families.py::test_logits_and_gradients_equal_transformers",
    "PRETRAIN": "distributed/test_pretrain.py",
}


def read_proofs(text):
    for short, test in TESTS_OF_MANY_CLAUSES.items():
        text = text.replace(short, test)
    proofs = {}
    for title, lines in re.findall(r"^(\w.*)\n((?: .*\n)+)", text, re.MULTILINE):
        phrases = (line.split(" = ") for line in re.sub(r"\n    +", " ", lines).splitlines())
        proofs[title] = {phrase.strip(): tuple(tests.strip().split(" + ")) for phrase, tests in phrases}
    return proofs


PROOFS = read_proofs((ROOT / "tests" / "golden" / "proofs.txt").read_text())


def rows_of(table):
    return dict(ROW.findall(table))


def find_unproven(table, proofs):
    """List clauses that no phrase of `proofs` stands in, and phrases that stand in no clause."""
    unproven = []
    for title, text in rows_of(table).items():
        phrases = proofs.get(title, {})
        outside_links = re.sub(r"\]\([^)]*\)", "]", text)
        clauses = re.sub(r"\([^()]*\)", lambda found: found[0].replace(";", ","), outside_links).split(";")
        unproven += [f"{title}: {clause.strip()}" for clause in clauses if not any(phrase in clause for phrase in phrases)]
        unproven += [f"{title} no longer says: {phrase}" for phrase in phrases if phrase not in outside_links]
    return unproven + [f"no row {title}" for title in proofs.keys() - rows_of(table).keys()]


@cache
def names_of_tests_in(path):
    """Return the names of a file's tests, those that are made from a table among them."""
    return set(re.findall(r"^(?:def )?(test_\w+)(?:\(| = )", path.read_text(), re.MULTILINE))


@cache
def family_names():
    """Return all texts of the files that list the families of Hugging Face."""
    files = (ROOT / "tests" / "distributed" / name for name in ("hugging_face_models.py", "test_hugging_face_families.py"))
    found = {node.value for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)}
    return found.union(*yaml.safe_load((ROOT / "tests" / "distributed" / "tiny_models.yaml").read_text()).values())


def test_every_clause_names_its_proof():
    assert rows_of(TABLE)
    assert find_unproven(TABLE, PROOFS) == []


@pytest.mark.parametrize("proof", sorted({proof for row in PROOFS.values() for tests in row.values() for proof in tests}))
def test_the_proof_is_there(proof):
    path, name, row = re.fullmatch(r"(.*)::(\w+)(?:\[(.*)\])?", proof).groups()
    assert name in names_of_tests_in(ROOT / "tests" / path)
    assert row is None or row in family_names()


def test_what_nothing_proves_is_found():
    table = "| Speed | fast (and; small); faster than light |\n"
    assert find_unproven(table, {}) == ["Speed: fast (and, small)", "Speed: faster than light"]
    assert find_unproven(table, {"Speed": {"fast (": (), "slow": ()}}) == [
        "Speed: faster than light",
        "Speed no longer says: slow",
    ]

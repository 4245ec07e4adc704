import errno
import json
import os
from pathlib import Path

import pytest

from multimodal.values.errors import ConfigError, ModelError
from multimodal.values.file_form import LARGEST_FILE_BYTES, line_of, read_file, read_mapping, write_mapping
from multimodal.values.typed_reader import Plain

NESTED = 20_000


def write(tmp_path, content, name="a.yaml"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refusal_of(path):
    with pytest.raises(ConfigError) as caught:
        read_mapping(path, error=ConfigError)
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value)) < 500 + len(str(path))
    return str(caught.value).removeprefix(str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ": expected a mapping at the top level, found nothing"),
        (b"# only a comment\n", ": expected a mapping at the top level, found nothing"),
        (b"- 1\n- 2\n", ": expected a mapping at the top level, found list"),
        (b"text", ": expected a mapping at the top level, found str"),
        (b"a: 1\nb: \xff\n", ", line 2: expected UTF-8 text, found byte 0xff; save the file as UTF-8"),
        (b"a: 1\0", ": cannot be parsed"),
        (b"\x7fELF\x02\x01\x01\x00", ": cannot be parsed"),
        (b"a:\n\tb: 1\n", ", line 2: cannot be parsed"),
        (b"a: [1", ", line 1: cannot be parsed"),
        (b"a: 1\nb: 2\na: 3\n", ", line 3: cannot be parsed ('a' is there twice, first on line 1; keep one)"),
        (b"a:\n  b: {c: 1,\n   c: 2}\n", ", line 3: cannot be parsed ('c' is there twice, first on line 2; keep one)"),
        (b'"\\e[31m": 1\n"\\e[31m": 2\n', r", line 2: cannot be parsed ('\x1b[31m' is there twice"),
        (b"a: {1: 2}", ", line 1: cannot be parsed (key '1' is not text; put it in quotes)"),
        (b"yes: 2", ", line 1: cannot be parsed (key 'yes' is not text; put it in quotes)"),
        (b"? [a]\n: 2", ", line 1: cannot be parsed (key 'a list or a mapping' is not text"),
        (b"a: " + b"[" * NESTED, ", line 1: cannot be parsed (nested deeper than 50 levels)"),
        (b"a: " + b"{b: " * NESTED, ", line 1: cannot be parsed (nested deeper than 50 levels)"),
        (b"a:\n" + b"".join(b" " * n + b"- \n" for n in range(60)), "nested deeper than 50 levels"),
        (b"a: &x [1, *x]", ", line 1: cannot be parsed (*x stands inside what it names)"),
        (b"a: *x", ", line 1: cannot be parsed (found undefined alias 'x')"),
        (b"a: 1" + b"0" * 5000, ", line 1: cannot be parsed ('1000"),
        (b"a: 0" + b"7" * 20000, ", line 1: cannot be parsed ('0777"),
        (b"a: 0x" + b"f" * 5000, ", line 1: cannot be parsed ('0xff"),
        (b"a: 2024-13-45", ", line 1: cannot be parsed ('2024-13-45': month must be in 1..12)"),
        (b"a: 010", ", line 1: cannot be parsed ('010' would be read as 8; write the number plainly"),
        (b"a: 1:30", ", line 1: cannot be parsed ('1:30' would be read as 90; write the number plainly, or a text in quotes)"),
        (b"a: !!bool perhaps", ", line 1: cannot be parsed ('perhaps'"),
        (b"a: !!int ''", ", line 1: cannot be parsed ("),
        (b"a: !!timestamp x", ", line 1: cannot be parsed ("),
        (b"a: !!python/object/apply:os.system [echo]", ", line 1: cannot be parsed (could not determine a constructor"),
        (b"a: 1\n---\nb: 2\n", ", line 2: cannot be parsed"),
    ],
)
def test_a_yaml_file_that_cannot_be_taken_is_named(tmp_path, content, message):
    assert message in refusal_of(write(tmp_path, content))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ", line 1: cannot be parsed (Expecting value)"),
        (b"null", ": expected a mapping at the top level, found nothing"),
        (b"[1]", ": expected a mapping at the top level, found list"),
        (b"\xfe\xff", ", line 1: expected UTF-8 text, found byte 0xfe"),
        (b'{"a": 1,\n "b": }', ", line 2: cannot be parsed (Expecting value)"),
        (b'{"a": 1,\n "a": 2}', ", line 2: cannot be parsed ('a' is there twice, first on line 1; keep one)"),
        (b'{\n\t"a": 1,\n\t"a": 2}', ", line 3: cannot be parsed ('a' is there twice, first on line 2; keep one)"),
        (b'{"a": ' + b"[" * NESTED, "nested"),
        (b'{"a": ' * NESTED, "nested"),
        (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "nested deeper than 50 levels"),
        (b'{"a": 1' + b"0" * 4000 + b"}", "larger than any"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "cannot be parsed"),
    ],
)
def test_a_json_file_that_cannot_be_taken_is_named(tmp_path, content, message):
    assert message in refusal_of(write(tmp_path, content, "a.json"))


def test_aliases_may_repeat_a_little_but_not_explode(tmp_path):
    shared = write(tmp_path, "a: &x {c: 1}\nb: {<<: *x, d: 2}\ne: {<<: *x, c: 3}\n")
    assert read_mapping(shared, error=ConfigError) == {"a": {"c": 1}, "b": {"c": 1, "d": 2}, "e": {"c": 3}}
    lines = ["a0: &a0 [1, 1]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))]
    assert "aliases repeat more than 100,000 values" in refusal_of(write(tmp_path, "\n".join(lines)))
    merged = ["a0: &a0 {k: 1}", *(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 12))]
    assert "aliases repeat more than 100,000 values" in refusal_of(write(tmp_path, "\n".join(merged)))


def test_numbers_are_numbers_and_quoted_ones_are_not(tmp_path):
    text = "a: 1e-5\nb: -2E+3\nc: '1e-5'\nd: 1.5e3\ne: 12\nf: 1e5x\ng: .5e1\n"
    assert read_mapping(write(tmp_path, text), error=ConfigError) == {
        "a": 1e-5,
        "b": -2000.0,
        "c": "1e-5",
        "d": 1500.0,
        "e": 12,
        "f": "1e5x",
        "g": 5.0,
    }


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    for name in ("a.yaml", "a.json"):
        assert read_mapping(write(tmp_path, b'\xef\xbb\xbf{"a": 1}', name), error=ConfigError) == {"a": 1}


def test_paths_that_are_no_readable_file_are_named(tmp_path):
    assert "no such file" in refusal_of(tmp_path / "absent.yaml")
    assert "is a folder or a device" in refusal_of(tmp_path)
    assert "is a folder or a device" in refusal_of("/dev/zero")
    assert "cannot be read" in refusal_of(tmp_path / ("x" * 5000))
    assert "no such file" in refusal_of(write(tmp_path, "a: 1") / "b.yaml")
    os.truncate(write(tmp_path, "", "huge.yaml"), LARGEST_FILE_BYTES + 1)
    assert f"at most {LARGEST_FILE_BYTES:,} bytes" in refusal_of(tmp_path / "huge.yaml")


def test_a_file_without_permission_is_named(tmp_path, monkeypatch):
    path = write(tmp_path, "a: 1")

    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)  # root could read it whatever its mode
    assert "cannot be read (Permission denied)" in refusal_of(path)


@pytest.mark.parametrize("name", ["a.yaml", "a.json", "tabs.json"])
def test_an_error_of_a_value_gets_its_line(tmp_path, name):
    path = tmp_path / name
    write_mapping(path, {"a": {"b": [1, "two"]}, "c": 3})
    if name == "tabs.json":
        path.write_text(json.dumps(read_mapping(path, error=ModelError), indent="\t"))

    def build(value):
        return [entry.read(int) for entry in Plain(value, "list", ModelError).mapping()["a"].mapping()["b"].entries()]

    with pytest.raises(ModelError, match=rf"{name}, line \d+: list, a, b\[1\]: expected an integer, found 'two'") as caught:
        read_file(path, build, error=ModelError)
    line = line_of(path, caught.value.place)
    assert f"line {line}:" in str(caught.value) and "two" in path.read_text().splitlines()[line - 1]


def test_a_line_that_nobody_can_tell_is_left_out(tmp_path):
    path = write(tmp_path, json.dumps({"a": 1, "b" * 2000: 2}), "a.json")  # too long a key for a YAML parser

    def build(value):
        return Plain(value["a"], "file, a", ConfigError, ("a",)).read(str)

    with pytest.raises(ConfigError, match=r"a\.json: file, a: expected text, found 1"):
        read_file(path, build, error=ConfigError)

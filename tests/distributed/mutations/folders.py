"""Mutations of a folder of Hugging Face that the run starts from, and of adapters of PEFT: their configs and weights."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from importlib.util import find_spec
from operator import getitem
from pathlib import Path
from typing import Any

import yaml

from tests.distributed.mutations.files import LEAVES, byte_mutations, change_something, place_mutations, text_mutations
from tests.distributed.mutations.mutation import Given, Inputs, Mutation, short

_WRITTEN: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "mistakes.yaml").read_text())
TEMPLATES: dict[str, str] = {**_WRITTEN["templates"], "is nested deeply": "{% if true %}" * 5000}
Header = dict[str, Any]


def folder_mutations() -> Iterator[Mutation]:
    """Change the folder of `--load-hf`, or that of `--load-adapter`; nothing where transformers is not installed."""
    if find_spec("transformers") is None:
        return
    for given, config, weights, keys in (
        (Given.FOLDER, "config.json", "model.safetensors", "model keys"),
        (Given.ADAPTER, "adapter_config.json", "adapter_model.safetensors", "adapter keys"),
    ):
        yield from _json_mutations(given, given, config, _WRITTEN[keys].split())
        find = partial(_file, given=given, name=weights)
        yield from byte_mutations(f"{given}: weights", find, WEIGHTS, given=given)
        yield from place_mutations(given, find, file=weights, given=given)
    for name, values in _WRITTEN["adapters"].items():
        yield Mutation(f"adapter: {name}", partial(_update, values=values), given=Given.ADAPTER)
    for file, keys in (_WRITTEN["optional files"] | _WRITTEN["needed files"]).items():
        area = next((area for area in ("tokenizer", "preprocessor") if file.startswith(area)), Given.FOLDER)
        yield from _json_mutations(area, Given.CHAT, file, keys.split(), is_optional=file in _WRITTEN["optional files"])
    template = partial(_file, given=Given.CHAT, name="chat_template.jinja")
    changes = {name: lambda _, text=text: text.encode() for name, text in TEMPLATES.items()}
    yield from byte_mutations("template:", template, changes, ("chat_template.jinja",), given=Given.CHAT)
    yield from place_mutations("template", template, file="chat_template.jinja", given=Given.CHAT, is_optional=True)


def _json_mutations(area: str, given: Given, file: str, keys: Sequence[str], *, is_optional: bool = False) -> Iterator[Mutation]:
    """Change some keys of a file, and one at random; cut it, replace it, take it away."""
    find = partial(_file, given=given, name=file)
    for key in keys:
        for leaf in LEAVES:
            apply = partial(_set_key, find=find, path=key.split("."), leaf=leaf)
            yield Mutation(f"{area}: {key} = {short(leaf)}", apply, given=given)
    for leaf in LEAVES:
        apply = partial(change_something, find=find, leaf=leaf)
        yield Mutation(f"{area}: something of {file} = {short(leaf)}", apply, given=given)
    for mutation in text_mutations(area, find, file=file, must_be_refused=not is_optional):
        if not mutation.name.endswith("expands"):  # JSON has no aliases
            yield mutation._replace(given=given)
    yield from place_mutations(area, find, file=file, given=given, is_optional=is_optional)


def _file(inputs: Inputs, *, given: Given, name: str) -> Path:
    return inputs.folder / given / name


def _update(inputs: Inputs, *, values: dict[str, Any]) -> None:
    path = _file(inputs, given=Given.ADAPTER, name="adapter_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _set_key(inputs: Inputs, *, find: Callable[[Inputs], Path], path: Sequence[str], leaf: Any) -> None:
    document = json.loads(find(inputs).read_text())
    reduce(getitem, path[:-1], document)[path[-1]] = leaf
    find(inputs).write_text(json.dumps(document))


def _with_header(content: bytes, *, change: Callable[[Header], object]) -> bytes:
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


def _first(header: Header) -> Header:
    tensor: Header = next(tensor for name, tensor in header.items() if name != "__metadata__" and len(tensor["shape"]) == 2)
    return tensor


def _drop(header: Header) -> None:
    """Leave out the last tensor of the file, whose numbers stay."""
    del header[max(header, key=lambda name: header[name].get("data_offsets", [0])[0])]


def _rename(header: Header) -> None:
    name = next(name for name in header if name != "__metadata__")
    header["no.such.weight"] = header.pop(name)


WEIGHTS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "longer": lambda content: content + b"\0" * 8,
    "a pickle": lambda content: b"cos\nabort\n(tR.",
    "with a huge header": lambda content: (2**62).to_bytes(8, "little") + content[8:],
    "with a broken header": lambda content: content[:8] + b"?" * 16 + content[24:],
    "with another shape": partial(_with_header, change=lambda header: _first(header)["shape"].append(1)),
    "with a negative shape": partial(_with_header, change=lambda header: _first(header)["shape"].__setitem__(0, -1)),
    "of another type": partial(_with_header, change=lambda header: _first(header).update(dtype="I64")),
    "of an unknown type": partial(_with_header, change=lambda header: _first(header).update(dtype="X9")),
    "beyond the file": partial(_with_header, change=lambda header: _first(header)["data_offsets"].__setitem__(1, 2**40)),
    "backwards": partial(_with_header, change=lambda header: _first(header)["data_offsets"].reverse()),
    "under another name": partial(_with_header, change=_rename),
    "transposed": partial(_with_header, change=lambda header: _first(header)["shape"].reverse()),
    "without a tensor": partial(_with_header, change=_drop),
    "with a shape that is none": partial(_with_header, change=lambda header: _first(header).update(shape="8")),
    "with a huge shape": partial(_with_header, change=lambda header: _first(header).update(shape=[2**40, 2**40])),
    "over another tensor": partial(_with_header, change=lambda header: _first(header).update(data_offsets=[0, 128])),
    "with a header nested deeply": lambda content: (10**6).to_bytes(8, "little") + b"[" * 10**6,
    "that are no numbers": lambda content: content[:-64] + b"\xff" * 64,
}

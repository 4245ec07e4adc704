"""Mutations of a folder of Hugging Face that the run starts from, and of adapters of PEFT: their configs and weights."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from importlib.util import find_spec
from operator import getitem
from pathlib import Path
from typing import Any

from tests.distributed.mutations.files import rewrite, text_mutations
from tests.distributed.mutations.mutation import Given, Inputs, Mutation, short
from tests.distributed.mutations.nested_documents import LEAVES, places, replaced

MODEL_KEYS = (
    *("model_type", "architectures", "image_token_index", "text_config", "vision_config", "vision_feature_layer"),
    *("projector_hidden_act", "text_config.model_type", "text_config.hidden_size", "text_config.num_hidden_layers"),
    *("text_config.num_attention_heads", "text_config.vocab_size", "text_config.rms_norm_eps", "vision_config.patch_size"),
    *("vision_config.image_size", "vision_config.num_hidden_layers", "text_config.tie_word_embeddings"),
)
ADAPTER_KEYS = ("peft_type", "r", "lora_alpha", "target_modules", "bias", "base_model_name_or_path", "use_dora")
Header = dict[str, Any]


def folder_mutations() -> Iterator[Mutation]:
    """Change the folder of `--load-hf`, or that of `--load-adapter`; nothing where transformers is not installed."""
    if find_spec("transformers") is None:
        return
    for given, config, weights, keys in (
        (Given.FOLDER, "config.json", "model.safetensors", MODEL_KEYS),
        (Given.ADAPTER, "adapter_config.json", "adapter_model.safetensors", ADAPTER_KEYS),
    ):
        of_config, of_weights = partial(_file, given=given, name=config), partial(_file, given=given, name=weights)
        for key in keys:
            for leaf in LEAVES:
                apply = partial(_set_key, find=of_config, path=key.split("."), leaf=leaf)
                yield Mutation(f"{given}: {key} = {short(leaf)}", apply, given=given)
        for leaf in LEAVES:
            apply = partial(_set_something, find=of_config, leaf=leaf)
            yield Mutation(f"{given}: something = {short(leaf)}", apply, given=given)
        for mutation in text_mutations(given, of_config):
            if not mutation.name.endswith("expands"):  # JSON has no aliases
                yield mutation._replace(names=(config,), given=given)
        for name, change in _WEIGHTS.items():
            apply = partial(rewrite, find=of_weights, change=change)
            yield Mutation(f"{given}: weights {name}", apply, must_be_refused=True, given=given)
        for name in (config, weights):
            apply = partial(_remove, find=partial(_file, given=given, name=name))
            yield Mutation(f"{given}: without {name}", apply, (name,), must_be_refused=True, given=given)


def _file(inputs: Inputs, *, given: Given, name: str) -> Path:
    return inputs.folder / given / name


def _remove(inputs: Inputs, *, find: Callable[[Inputs], Path]) -> None:
    find(inputs).unlink()


def _set_key(inputs: Inputs, *, find: Callable[[Inputs], Path], path: Sequence[str], leaf: Any) -> None:
    document = json.loads(find(inputs).read_text())
    reduce(getitem, path[:-1], document)[path[-1]] = leaf
    find(inputs).write_text(json.dumps(document))


def _set_something(inputs: Inputs, *, find: Callable[[Inputs], Path], leaf: Any) -> None:
    document = json.loads(find(inputs).read_text())
    found = [place for place, value in places(document) if value != leaf]
    find(inputs).write_text(json.dumps(replaced(document, inputs.random.choice(found), leaf)))


def _with_header(content: bytes, *, change: Callable[[Header], object]) -> bytes:
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


def _first(header: Header) -> Header:
    tensor: Header = next(tensor for name, tensor in header.items() if name != "__metadata__")
    return tensor


def _rename(header: Header) -> None:
    name = next(name for name in header if name != "__metadata__")
    header["no.such.weight"] = header.pop(name)


_WEIGHTS: dict[str, Callable[[bytes], bytes]] = {
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
}

"""The table of all kinds of mutations, and draws from it; those of flags, checkpoints, connections and single ranks."""

import random
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from megatron.runtime.flags.field_flags import FieldFlag, all_flags
from tests.distributed.mutations.data import chat_mutations, image_mutations, manifest_mutations, sound_mutations
from tests.distributed.mutations.files import (
    LEAVES,
    byte_mutations,
    change_something,
    document_mutations,
    graph_mutations,
    place_mutations,
    replaced,
    text_mutations,
)
from tests.distributed.mutations.folders import folder_mutations
from tests.distributed.mutations.mutation import DOCUMENTS, Given, Inputs, Mutation, short
from tests.distributed.small_run import MODEL, NUM_RANKS

Change = Callable[[Inputs], object]
VISION, LLM = [(0, [[0, 3]])], [(1, [[0, 4]])]


def plan(**units: list[tuple[int, list[list[int]]]]) -> Change:
    """Take a plan file in place of sizes: unit -> stages of its one replica as (rank, layer ranges)."""
    return lambda inputs: inputs.give("plan", plan_of(units))


def plan_of(units: dict[str, list[tuple[int, list[list[int]]]]]) -> dict[str, Any]:
    stages = {name: [{"ranks": [rank], "layers": layers} for rank, layers in found] for name, found in units.items()}
    return {"units": {name: {"replicas": [{"stages": found}]} for name, found in stages.items()}}


def both(*changes: Change) -> Change:
    return lambda inputs: [change(inputs) for change in changes]


def named(given: dict[str, object]) -> dict[str, object]:
    return {"--" + name.replace("_", "-"): value for name, value in given.items()}


def of_rank(rank: int, *, environment: dict[str, str] | None = None, **given: object) -> Change:
    def change(inputs: Inputs) -> None:
        inputs.flags_of_rank[rank] = named(given)
        inputs.environment_of_rank[rank] = environment or {}

    return change


def other_file(flag: str, text: Callable[[Inputs], str]) -> Change:
    def change(inputs: Inputs) -> None:
        path = inputs.folder / "data" / f"other{Path(str(inputs.flags[flag])).suffix}"
        path.write_text(text(inputs))
        inputs.flags_of_rank[1] = {flag: path}

    return change


WIDER = replaced(MODEL, ("units", "llm", "ffn_hidden_size"), 96)
FROM_PLAN, SWAPPED = plan(vision=VISION, llm=LLM), plan_of({"vision": [(1, [[0, 3]])], "llm": [(0, [[0, 4]])]})
OF_ONE_RANK: dict[str, tuple[Change, tuple[str, ...]]] = {
    "learning rate": (of_rank(1, lr=0.01), ("rank 1 was started with --lr 0.01, rank 0 with --lr 0.001", "same flags")),
    "clipping, on rank 0": (of_rank(0, clip_grad=0.5), ("rank 1", "--clip-grad 1.0", "rank 0 with --clip-grad 0.5")),
    "freezing": (of_rank(1, freeze="vision"), ("rank 1 was started with --freeze vision, rank 0 without --freeze",)),
    "backend": (of_rank(1, distributed_backend="gloo"), ("--distributed-backend gloo, rank 0 without",)),
    "model": (
        other_file("--model", lambda inputs: yaml.safe_dump(WIDER, sort_keys=False)),
        ("rank 1 has another model", "units.llm.ffn_hidden_size is 96, rank 0's 64", "--model"),
    ),
    "plan": (
        both(FROM_PLAN, other_file("--plan", lambda inputs: yaml.safe_dump(SWAPPED))),
        ("rank 1 has another plan", "units.vision.replicas", "--plan"),
    ),
    "data": (
        other_file("--data-path", lambda inputs: inputs.manifest.read_text().replace("picture 3", "pictures 3")),
        ("rank 1 sees other data", "training samples", "--data-path"),
    ),
    "model missing on rank 1": (of_rank(1, model="no/such.yaml"), ("no/such.yaml", "rank 1")),
    "model missing on rank 0": (of_rank(0, model="no/such.yaml"), ("no/such.yaml", "rank 0")),
    "corrupt plan": (both(FROM_PLAN, other_file("--plan", lambda inputs: "units: [vision: {")), ("other.yaml", "rank 1")),
    "unknown flag": (of_rank(1, learning_rate=1), ("--learning-rate", "rank 1")),
    "data missing": (of_rank(1, data_path="no/such.jsonl"), ("no/such.jsonl", "rank 1")),
    "log on rank 0": (of_rank(0, log_json="/proc/none/log.jsonl"), ("/proc/none/log.jsonl", "rank 0")),
    "no number of processes": (of_rank(1, environment={"WORLD_SIZE": "two"}), ("WORLD_SIZE must be the number", "rank 1")),
    "number of processes": (of_rank(1, environment={"WORLD_SIZE": "3"}), ("the run has 3 processes", "rank 1")),
}


def rank_mutations() -> Iterator[Mutation]:
    for name, (change, names) in OF_ONE_RANK.items():
        yield Mutation(f"rank: {name}", change, names, must_be_refused=True)


FLAG_TEXTS = ("-1", "0", "3", "1.5", "nan", "1e400", "text", "", "9" * 12, "9" * 400)
"""What a mutation gives a flag that takes a number."""
PATHS = ("no/such/place", "/dev/null", "/proc/1/none", ".", "")
"""What a mutation gives a flag that takes a path."""


def flag_mutations() -> Iterator[Mutation]:
    """Give each flag of the configuration, and of the units, every text of its type."""
    for flag in all_flags():
        for text in _texts(flag):
            apply = partial(set_flag, flag=flag.flag, value=text)
            names = () if flag.name == "colocate_units" else (flag.flag,)  # the sizes that it does not go with are named
            yield Mutation(f"flag: {flag.flag} {short(text)}", apply, names)
    for name in ("--vision-dp", "--llm-dp", "--llm-tp", "--llm-pp", "--llm-vpp", "--vision-cp", "--vision-micro-batch-size"):
        for text in FLAG_TEXTS:
            yield Mutation(f"flag: {name} {short(text)}", partial(set_flag, flag=name, value=text))


def _texts(flag: FieldFlag) -> tuple[str | None, ...]:
    if flag.parse is None:
        return (None,)
    if flag.choices:
        return (*flag.choices, "no-such-choice", "")
    if flag.parse is Path or flag.is_input_path:
        return PATHS
    return FLAG_TEXTS


def set_flag(inputs: Inputs, *, flag: str, value: object) -> None:
    inputs.flags[flag] = value


def checkpoint_mutations() -> Iterator[Mutation]:
    changes: dict[str, Callable[[bytes], bytes]] = {
        "flipped": _flip,
        "truncated": lambda content: content[: len(content) // 2],
        "emptied": lambda content: b"",
        "longer": lambda content: content + b"\0" * 8,
        "replaced by a pickle": lambda content: b"cos\nabort\n(tR.",
    }
    for file in ("braid.json", "tensors.json", "rank_00000.bin", "rank_00001.bin"):
        find = partial(_find, file=file)
        yield from place_mutations("checkpoint", find, file=file, given=Given.CHECKPOINT)
        yield from byte_mutations(f"checkpoint: {file}", find, changes, ("saved",), given=Given.CHECKPOINT)
    for leaf in LEAVES:
        apply = partial(change_something, find=partial(_find, file="braid.json"), leaf=leaf)
        yield Mutation(f"checkpoint: something = {short(leaf)}", apply, ("saved",), must_be_refused=True, given=Given.CHECKPOINT)
    yield Mutation(
        "checkpoint: of another step",
        lambda inputs: inputs.checkpoint.rename(inputs.checkpoint.parent / "step_00000003"),
        ("saved",),
        must_be_refused=True,
        given=Given.CHECKPOINT,
    )
    for name, flag, value in (
        ("seed", "--seed", 7),
        ("batch", "--global-batch-size", 3),
        ("mask", "--attention-mask", "embedded"),
        ("precision", "--dtype", "float32"),
    ):
        apply = partial(set_flag, flag=flag, value=value)
        yield Mutation(f"checkpoint: of another {name}", apply, (flag,), must_be_refused=True, given=Given.CHECKPOINT)


def _find(inputs: Inputs, *, file: str) -> Path:
    return inputs.checkpoint / file


def _flip(content: bytes) -> bytes:
    """Flip a bit, which the content draws."""
    generator = random.Random(content)
    place, bit = generator.randrange(len(content)), 1 << generator.randrange(8)
    return content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]


TOKEN = b"a secret of these tests"

ANSWERS = {
    "hangs up": b"",
    "speaks HTTP": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
    "sends zeros": b"\0" * 4096,
    "promises much": b"\xff" * 16,
    "sends a pickle": b"\x80\x04cos\nabort\n(tR.",
}
"""What a stranger sends to whoever connects, before it hangs up."""
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
TEXTS = ("", "-1", "text", "1.5", "9" * 12)


def connection_mutations() -> Iterator[Mutation]:
    """Name a producer that is none, or give all ranks or one of them another environment."""
    for name, answer in ANSWERS.items():
        apply = partial(_meet_stranger, answer=answer)
        yield Mutation(f"producer: {name}", apply, ("127.0.0.1",), must_be_refused=True)
    for name, address in {"nobody there": "127.0.0.1:1", "no port": "127.0.0.1", "no host": "no.such.host.invalid:80"}.items():
        apply = partial(name_producer, address=address)
        yield Mutation(f"producer: {name}", apply, (address.split(":")[0],), must_be_refused=True)
    for token in ("no/such/file", "/dev/null", "."):
        apply = partial(name_producer, address="127.0.0.1:1", token=token)
        yield Mutation(f"producer: token {token}", apply, (token,), must_be_refused=True)
    for variable in VARIABLES:
        for text in TEXTS:
            apply = partial(_set_variable, name=variable, text=text)
            yield Mutation(f"environment: {variable} {short(text)}", apply, (variable,), must_be_refused=True)


def _set_variable(inputs: Inputs, *, name: str, text: str) -> None:
    inputs.environment_of_rank = {rank: {name: text} for rank in range(NUM_RANKS)}


def name_producer(inputs: Inputs, *, address: str, token: str | None = None) -> None:
    path = inputs.folder / "token"
    path.write_bytes(TOKEN)
    inputs.flags |= {"--producers": address, "--producer-token": token or path, "--num-workers": 1}


def _meet_stranger(inputs: Inputs, *, answer: bytes) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(60.0)

    def serve() -> None:
        with listener, suppress(OSError):
            while True:
                met, _ = listener.accept()
                with met, suppress(OSError):
                    met.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    name_producer(inputs, address=f"127.0.0.1:{listener.getsockname()[1]}")


FILES: dict[str, tuple[Callable[[Inputs], Path], str]] = {
    **{kind: (partial(Inputs.give, kind=kind, document=each), f"{kind}.yaml") for kind, each in DOCUMENTS.items()},
    "manifest": (lambda inputs: inputs.manifest, "manifest.jsonl"),
}


def list_mutations() -> tuple[Mutation, ...]:
    makers = (graph_mutations, manifest_mutations, chat_mutations, image_mutations, sound_mutations, checkpoint_mutations)
    makers += (folder_mutations, connection_mutations, rank_mutations)
    found = (
        *flag_mutations(),
        *chain.from_iterable(document_mutations(kind, document) for kind, document in DOCUMENTS.items()),
        *chain.from_iterable(text_mutations(area, find) for area, (find, _) in FILES.items()),
        *chain.from_iterable(place_mutations(area, find, file=file) for area, (find, file) in FILES.items()),
        *chain.from_iterable(make() for make in makers),
    )
    assert len({mutation.name for mutation in found}) == len(found)
    return found


def draw_mutations(number: int, *, seed: int, areas: Collection[str] | None = None) -> tuple[Mutation, ...]:
    """Returns at most `number` different kinds of some areas (None: of all), drawn so that every area has its share."""
    generator = random.Random(seed)
    by_area: dict[str, list[Mutation]] = {}
    for mutation in list_mutations():
        if areas is None or mutation.area in areas:
            by_area.setdefault(mutation.area, []).append(mutation)
    for area in by_area.values():
        generator.shuffle(area)
    drawn: list[Mutation] = []
    while len(drawn) < number and any(by_area.values()):
        drawn += [area.pop() for area in by_area.values() if area]
    return tuple(drawn[:number])

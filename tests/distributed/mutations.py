"""Single mutations of a run that works: a flag, a file or one rank is changed in one place, everything else stays.

Whatever a mutation does, a run must either refuse it (every rank ends by itself, with one message that names the place and the
fix) or train as one process trains with the same inputs. `judge` says which of the two happened, or what is wrong.
"""

import copy
import json
import math
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from PIL import Image

from megatron.runtime.flags.configuration import GROUPS
from megatron.runtime.flags.field_flags import FieldFlag, field_flags
from tests.distributed.launch import Launched, launch
from tests.distributed.small_run import MODEL, NUM_RANKS, manifest_entries, working_flags, write_working_files

HANG_SECONDS = 60.0
"""Beyond this a run counts as hanging."""
PLAN = {
    "units": {
        "vision": {"replicas": [{"stages": [{"ranks": [0], "layers": [[0, 3]]}]}]},
        "llm": {"tensor_parallel_size": 1, "replicas": [{"stages": [{"ranks": [1], "layers": [[0, 4]]}]}]},
    }
}
_SIZES = ("--vision-", "--llm-")
_WITHOUT_EFFECT = frozenset(
    {
        *("--plan", "--colocate-units", "--sequence-parallel", "--data-parallel-sharding-strategy", "--schedule"),
        *("--schedule-passes", "--recompute-granularity", "--micro-batch-size", "--balance", "--balance-granularity"),
        *("--balance-num-microbatches", "--merge-encoders", "--unit-costs", "--rearrange-nodes"),
        *("--context-parallel-distribution", "--context-parallel-block-size", "--lengths-from", "--num-workers"),
        *("--save", "--tensorboard-dir", "--report-dir"),
    }
)
"""Flags that say how a run trains or what it writes, and not what it learns: one process does without them."""
LEAVES: tuple[Any, ...] = (
    *(None, True, "text", "12", "1e-5", "", -1, 0, 1, 3, 1.5, 10**12, 10**400, math.nan, math.inf, -math.inf, [], [1, 2], {}),
)
"""What a mutation writes in the place of a value."""
FLAG_TEXTS = ("-1", "0", "3", "1.5", "nan", "1e400", "text", "", "9" * 12, "9" * 400)
"""What a mutation gives a flag that takes a number."""
PATHS = ("no/such/place", "/dev/null", "/proc/1/none", ".", "")
"""What a mutation gives a flag that takes a path."""
_FIX = re.compile(
    r"\b(use|set|give|leave|remove|choose|raise|lower|add|keep|write|rename|replace|correct|change|launch|install|start|list|take|make|"
    r"must be|must|expected|needs|make room|save|resume|put|name|regenerate|repair|convert|re-create|delete|shorten|"
    r"has no|are|is one of|invalid choice|lists all flags)\b"
)


@dataclass
class Inputs:
    """All that a launch is given; a mutation changes one thing of it."""

    folder: Path
    random: random.Random
    flags: dict[str, object]
    flags_of_rank: dict[int, dict[str, object]] = field(default_factory=dict)
    """Flags that one rank has in another form; None: a switch."""
    environment_of_rank: dict[int, dict[str, str]] = field(default_factory=dict)

    @property
    def manifest(self) -> Path:
        """The manifest file."""
        return self.folder / "data" / "manifest.jsonl"

    @property
    def checkpoint(self) -> Path:
        """The checkpoint that the run loads."""
        return next((self.folder / "saved").glob("step_*"))

    def write_plan(self, plan: Any) -> Path:
        """Have the run take a plan file in place of the sizes."""
        path = self.folder / "plan.yaml"
        path.write_text(yaml.safe_dump(plan, sort_keys=False))
        for flag in ("--vision-dp", "--llm-dp"):
            self.flags.pop(flag, None)
        self.flags["--plan"] = path
        return path


class Mutation(NamedTuple):
    """One kind of mutation."""

    name: str
    """Its area, a colon, and what it does."""
    apply: Callable[[Inputs], object]
    names: tuple[str, ...] = ()
    """What a refusal's message must contain: the flag, or the file and the key."""
    must_be_refused: bool = False
    needs_checkpoint: bool = False

    @property
    def area(self) -> str:
        """flag, model, plan, manifest, image, checkpoint or rank."""
        return self.name.split(":")[0]


class Outcome(NamedTuple):
    """What became of one mutation."""

    mutation: Mutation
    is_refused: bool
    problems: tuple[str, ...]
    """Empty: as it should be."""
    message: str
    """The refusal, or nothing."""
    seconds: float
    output: str


def list_mutations() -> tuple[Mutation, ...]:
    """Returns every kind of mutation, in a fixed order."""
    found = (
        *_flag_mutations(),
        *_document_mutations("model", MODEL, _write_model),
        *_document_mutations("plan", PLAN, lambda inputs, plan: inputs.write_plan(plan)),
        *_text_mutations("model", lambda inputs: inputs.folder / "model.yaml"),
        *_text_mutations("plan", lambda inputs: inputs.write_plan(PLAN)),
        *_text_mutations("manifest", lambda inputs: inputs.manifest),
        *_graph_mutations(),
        *_manifest_mutations(),
        *_image_mutations(),
        *_checkpoint_mutations(),
        *_rank_mutations(),
    )
    assert len({mutation.name for mutation in found}) == len(found)
    return found


def draw_mutations(number: int, *, seed: int) -> tuple[Mutation, ...]:
    """Returns `number` different kinds, drawn so that every area has its share."""
    generator = random.Random(seed)
    by_area: dict[str, list[Mutation]] = {}
    for mutation in list_mutations():
        by_area.setdefault(mutation.area, []).append(mutation)
    for area in by_area.values():
        generator.shuffle(area)
    drawn: list[Mutation] = []
    while len(drawn) < number and any(by_area.values()):
        drawn += [area.pop() for area in by_area.values() if area]
    return tuple(drawn[:number])


def save_checkpoint_to_mutate(folder: Path) -> Path:
    """Train the small run and save it; returns the folder of its checkpoints, for `run_mutation`."""
    folder.mkdir(parents=True)
    write_working_files(folder)
    launched = launch(_listed(_base_flags(folder) | {"--save": folder / "saved"}), num_ranks=NUM_RANKS)
    assert launched.exit_codes == (0,) * NUM_RANKS, launched.output
    return folder / "saved"


def run_mutation(mutation: Mutation, *, folder: Path, checkpoint: Path, seed: int = 0) -> Outcome:
    """Launch the small run with one mutation and judge what became of it.

    folder: a new folder for its files; checkpoint: what `save_checkpoint_to_mutate` returned.
    """
    folder.mkdir(parents=True)
    write_working_files(folder)
    inputs = Inputs(folder, random.Random(f"{seed} {mutation.name}"), _base_flags(folder))
    if mutation.needs_checkpoint:
        shutil.copytree(checkpoint, folder / "saved")
        inputs.flags |= {"--load": folder / "saved", "--train-iters": 4, "--exit-interval": 4}
    mutation.apply(inputs)
    launched = _launch(inputs)
    if isinstance(launched, str):
        return Outcome(mutation, False, (launched,), "", HANG_SECONDS, "")
    return judge(mutation, inputs, launched)


def judge(mutation: Mutation, inputs: Inputs, launched: Launched) -> Outcome:
    """Hold a launch against what must be true of every launch."""
    output, codes = launched.output, launched.exit_codes
    messages = [line for line in output.splitlines() if "error:" in line]
    message = messages[0] if messages else ""
    is_refused = all(code not in (0, None) for code in codes)
    if all(code == 0 for code in codes):
        problems = ["it was accepted, but must be refused"] if mutation.must_be_refused else _compare(inputs)
    elif not is_refused:
        problems = [f"some ranks ended well and some did not: {codes}"]
    else:
        problems = _problems_of_refusal(mutation, messages)
    if "Traceback" in output or "frame #" in output:
        problems.append("the output holds a traceback")
    return Outcome(mutation, is_refused, tuple(problems), message, launched.seconds, output)


def _problems_of_refusal(mutation: Mutation, messages: Sequence[str]) -> list[str]:
    if len(messages) != 1:
        return [f"expected one message, found {len(messages)}"]
    problems = [f"the message does not name {name!r}" for name in mutation.names if name not in messages[0]]
    if not _FIX.search(messages[0].split("error:", 1)[1]):
        problems.append("the message names no fix")
    return problems


def _compare(inputs: Inputs) -> list[str]:
    """What is different from one process that trains on the same inputs."""
    log = inputs.flags.get("--log-json")
    if log != inputs.folder / "log.jsonl":
        return []
    found = _losses(inputs.folder / "log.jsonl")
    flags = {flag: value for flag, value in inputs.flags.items() if flag not in _WITHOUT_EFFECT and not flag.startswith(_SIZES)}
    alone = Inputs(inputs.folder, inputs.random, flags | {"--log-json": inputs.folder / "alone.jsonl"})
    launched = _launch(alone, num_ranks=1)
    if isinstance(launched, str) or launched.exit_codes != (0,):
        return [
            f"it was accepted on {NUM_RANKS} ranks, but not on one: {launched if isinstance(launched, str) else launched.output}"
        ]
    expected = _losses(inputs.folder / "alone.jsonl")
    tolerance = 1e-9 if inputs.flags["--dtype"] == "float64" else 2e-2
    if len(found) != len(expected) or any(abs(a - b) > tolerance * abs(b) for a, b in zip(found, expected, strict=True)):
        return [f"losses and norms {found} differ from one process's {expected}"]
    return []


def _losses(log: Path) -> list[float]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line[name] for line in lines for name in ("loss", "grad_norm") if "grad_norm" in line]


def _launch(inputs: Inputs, *, num_ranks: int = NUM_RANKS) -> Launched | str:
    shared = {
        flag: value for flag, value in inputs.flags.items() if not any(flag in own for own in inputs.flags_of_rank.values())
    }
    own = {
        rank: _listed(
            {flag: value for flag, value in inputs.flags.items() if flag not in shared} | inputs.flags_of_rank.get(rank, {})
        )
        for rank in range(num_ranks)
    }
    try:
        return launch(
            _listed(shared),
            num_ranks=num_ranks,
            timeout_seconds=HANG_SECONDS,
            flags_of_rank=own,
            environment_of_rank=inputs.environment_of_rank,
            folder=inputs.folder,
        )
    except subprocess.TimeoutExpired:
        return f"it hangs: no end after {HANG_SECONDS:g} s"


def _base_flags(folder: Path) -> dict[str, object]:
    return working_flags(folder) | {
        "--dtype": "float64",
        "--exit-interval": 2,
        "--log-json": folder / "log.jsonl",
        "--no-progress-bar": None,
        "--distributed-timeout-minutes": 0.25,
    }


def _listed(flags: dict[str, object]) -> list[object]:
    listed: list[object] = []
    for flag, value in flags.items():
        listed += [flag] if value is None else [f"{flag}={value}"]
    return listed


# Flags


def _flag_mutations() -> Iterator[Mutation]:
    for group in GROUPS.values():
        for flag in field_flags(group):
            for text in _texts(flag):
                apply = partial(_set_flag, flag=flag.flag, value=text)
                names = () if flag.name == "colocate_units" else (flag.flag,)  # the sizes that it does not go with are named
                yield Mutation(f"flag: {flag.flag} {_short(text)}", apply, names)
    for flag in ("--vision-dp", "--llm-dp", "--llm-tp", "--llm-pp", "--llm-vpp", "--vision-cp", "--vision-micro-batch-size"):
        for text in FLAG_TEXTS:
            yield Mutation(f"flag: {flag} {_short(text)}", partial(_set_flag, flag=flag, value=text))


def _texts(flag: FieldFlag) -> tuple[str | None, ...]:
    if flag.parse is None:
        return (None,)
    if flag.choices:
        return (*flag.choices, "no-such-choice", "")
    if flag.parse is Path or flag.is_input_path:
        return PATHS
    return FLAG_TEXTS


def _set_flag(inputs: Inputs, *, flag: str, value: object) -> None:
    inputs.flags[flag] = value


# Files


def _document_mutations(area: str, document: Any, write: Callable[[Inputs, Any], object]) -> Iterator[Mutation]:
    """Replace every value of a nested document by others, leave it out, and add a key to every mapping."""
    for path, value in _places(document):
        shown, name = ".".join(map(str, path)), str(next(part for part in reversed(path) if isinstance(part, str)))
        for leaf in LEAVES:
            if leaf != value or type(leaf) is not type(value):
                changed = _replaced(document, path, leaf)
                yield Mutation(f"{area}: {shown} = {_short(leaf)}", partial(_written, write=write, document=changed), (name,))
        yield Mutation(f"{area}: without {shown}", partial(_written, write=write, document=_replaced(document, path)))
        if isinstance(value, dict):
            added = _replaced(document, (*path, "no_such_key"), 1)
            named = ("no_such_key",)
            yield Mutation(f"{area}: {shown} with another key", partial(_written, write=write, document=added), named, True)


def _places(document: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    pairs = document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    for key, value in pairs:
        yield (*path, key), value
        yield from _places(value, (*path, key))


def _replaced(document: Any, path: tuple[str | int, ...], *value: Any) -> Any:
    """A copy of a document with one value replaced, or left out where none is given."""
    changed = copy.deepcopy(document)
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    if value:
        parent[path[-1]] = value[0]
    else:
        del parent[path[-1]]
    return changed


def _written(inputs: Inputs, *, write: Callable[[Inputs, Any], object], document: Any) -> None:
    write(inputs, document)


def _write_model(inputs: Inputs, model: Any) -> None:
    (inputs.folder / "model.yaml").write_text(yaml.safe_dump(model, sort_keys=False))


def _text_mutations(area: str, find: Callable[[Inputs], Path]) -> Iterator[Mutation]:
    changes: dict[str, Callable[[bytes], bytes]] = {
        "empty": lambda text: b"",
        "truncated": lambda text: text[: len(text) // 2 - 7],
        "not UTF-8": lambda text: text + b"\xff\xfe",
        "nested too deeply": lambda text: b"[" * 100_000,
        "a list": lambda text: b"[1, 2]\n",
        "binary": lambda text: bytes(range(256)),
        "executes": lambda text: b"!!python/object/apply:os.abort []\n",
        "expands": lambda text: (
            b"a: &a [1, 1]\n"
            + b"".join(
                b"%c: &%c [*%c, *%c, *%c, *%c, *%c, *%c, *%c, *%c]\n" % (98 + i, 98 + i, *([97 + i] * 8)) for i in range(20)
            )
        ),
    }
    for name, change in changes.items():
        yield Mutation(f"{area}: {name}", partial(_rewrite, find=find, change=change), (area,), must_be_refused=True)


def _rewrite(inputs: Inputs, *, find: Callable[[Inputs], Path], change: Callable[[bytes], bytes]) -> None:
    path = find(inputs)
    path.write_bytes(change(path.read_bytes()))


def _graph_mutations() -> Iterator[Mutation]:
    for name, edges in {
        "duplicate": [["vision", "llm"], ["vision", "llm"]],
        "backward": [["llm", "vision"]],
        "to itself": [["vision", "llm"], ["llm", "llm"]],
        "to nobody": [["vision", "no_such_unit"]],
        "three": [["vision", "llm", "llm"]],
        "none": [],
        "text": "vision llm",
    }.items():
        document = MODEL | {"edges": edges}
        yield Mutation(f"model: edges {name}", partial(_written, write=_write_model, document=document), ("vision",), True)
    repeated = yaml.safe_dump(MODEL, sort_keys=False)
    for name, text in {
        "key": repeated.replace("    num_layers: 2\n", "    num_layers: 2\n    num_layers: 3\n"),
        "unit": repeated + yaml.safe_dump({"x": {"llm": MODEL["units"]["llm"]}}).replace("x:\n", ""),
    }.items():
        apply = partial(_rewrite, find=lambda inputs: inputs.folder / "model.yaml", change=lambda _, text=text: text.encode())
        yield Mutation(f"model: repeated {name}", apply, ("model.yaml",), must_be_refused=True)


# Data


def _manifest_mutations() -> Iterator[Mutation]:
    entry = manifest_entries()[2]
    for path, value in _places(entry):
        shown = ".".join(map(str, path))
        for leaf in LEAVES:
            if leaf != value:
                apply = partial(_write_entry, entry=_replaced(entry, path, leaf))
                yield Mutation(f"manifest: {shown} = {_short(leaf)}", apply, ("line 3",))
        yield Mutation(f"manifest: without {shown}", partial(_write_entry, entry=_replaced(entry, path)), ("line 3",))
    for name, target in {
        "absolute": "/etc/hostname",
        "above": "../../../../etc/hostname",
        "its folder": ".",
        "a device": "/dev/zero",
    }.items():
        changed = _replaced(entry, ("segments", 0, "path"), target)
        yield Mutation(f"manifest: path {name}", partial(_write_entry, entry=changed), ("line 3",), must_be_refused=True)


def _write_entry(inputs: Inputs, *, entry: Any) -> None:
    entries = manifest_entries()
    entries[2] = entry
    inputs.manifest.write_text("".join(json.dumps(each) + "\n" for each in entries))


def _image_mutations() -> Iterator[Mutation]:
    find = _image_path
    changes: dict[str, Callable[[bytes], bytes]] = {
        "empty": lambda image: b"",
        "truncated": lambda image: image[: len(image) // 2],
        "text": lambda image: b"no image at all",
        "a script": lambda image: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 48\nshowpage\n",
        "flipped": lambda image: image[:60] + bytes([image[60] ^ 0xFF]) + image[61:],
    }
    for name, change in changes.items():
        yield Mutation(f"image: {name}", partial(_rewrite, find=find, change=change), ("2.png",), must_be_refused=True)
    for mode in ("L", "P", "1", "RGBA", "I;16", "LA"):
        yield Mutation(f"image: mode {mode}", partial(_draw_image, mode=mode, size=(64, 48)), ("2.png",))
    for size in ((1, 1), (1, 5000), (12000, 12000), (64, 49)):
        yield Mutation(f"image: size {size}", partial(_draw_image, mode="L", size=size), ("2.png",), must_be_refused=True)


def _image_path(inputs: Inputs) -> Path:
    return inputs.folder / "data" / "2.png"


def _draw_image(inputs: Inputs, *, mode: str, size: tuple[int, int]) -> None:
    Image.new(mode, size).save(_image_path(inputs))


# Checkpoints


def _checkpoint_mutations() -> Iterator[Mutation]:
    changes: dict[str, Callable[[Inputs, Path], object]] = {
        "flipped": _flip,
        "truncated": lambda inputs, path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
        "emptied": lambda inputs, path: path.write_bytes(b""),
        "removed": lambda inputs, path: path.unlink(),
        "longer": lambda inputs, path: path.write_bytes(path.read_bytes() + b"\0" * 8),
        "replaced by a pickle": lambda inputs, path: path.write_bytes(b"cos\nabort\n(tR."),
    }
    for name, change in changes.items():
        for which in range(3):
            apply = partial(_change_checkpoint, change=change, which=which)
            yield Mutation(f"checkpoint: file {which} {name}", apply, ("saved",), must_be_refused=True, needs_checkpoint=True)
    for leaf in LEAVES:
        apply = partial(_change_manifest_of_checkpoint, leaf=leaf)
        yield Mutation(f"checkpoint: something = {_short(leaf)}", apply, ("saved",), must_be_refused=True, needs_checkpoint=True)
    yield Mutation(
        "checkpoint: of another step",
        lambda inputs: inputs.checkpoint.rename(inputs.checkpoint.parent / "step_00000003"),
        ("saved",),
        must_be_refused=True,
        needs_checkpoint=True,
    )
    for name, flag, value in (
        ("seed", "--seed", 7),
        ("batch", "--global-batch-size", 3),
        ("mask", "--attention-mask", "embedded"),
        ("precision", "--dtype", "float32"),
    ):
        apply = partial(_set_flag, flag=flag, value=value)
        yield Mutation(f"checkpoint: of another {name}", apply, (flag,), must_be_refused=True, needs_checkpoint=True)


def _change_checkpoint(inputs: Inputs, *, change: Callable[[Inputs, Path], object], which: int) -> None:
    files = sorted(path for path in inputs.checkpoint.rglob("*") if path.is_file())
    change(inputs, files[which % len(files)])


def _flip(inputs: Inputs, path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[inputs.random.randrange(len(content))] ^= 1 << inputs.random.randrange(8)
    path.write_bytes(content)


def _change_manifest_of_checkpoint(inputs: Inputs, *, leaf: Any) -> None:
    path = inputs.checkpoint / "braid.json"
    document = json.loads(path.read_text())
    places = [place for place, value in _places(document) if value != leaf]
    path.write_text(json.dumps(_replaced(document, inputs.random.choice(places), leaf)))


# One rank that differs from the others


def _rank_mutations() -> Iterator[Mutation]:
    for flag, value in {
        "--lr": 2e-3,
        "--clip-grad": 0.5,
        "--attention-mask": "embedded",
        "--freeze": "vision",
        "--train-iters": 3,
        "--exit-interval": 1,
        "--dtype": "float32",
        "--make-vocab-size-divisible-by": 64,
        "--seed": 7,
        "--global-batch-size": 3,
        "--micro-batch-size": 2,
        "--balance": "orchmllm",
        "--schedule": "gpipe",
        "--schedule-passes": "defer-receives",
        "--seq-length": 300,
        "--split": "50,50",
        "--recompute-granularity": "full",
        "--eval-iters": 1,
        "--weight-decay": 0.5,
        "--save": "saved-by-one",
    }.items():
        yield Mutation(f"rank: {flag} of one", partial(_set_of_rank, flag=flag, value=value), (flag,), must_be_refused=True)
    for name, change, named in (
        ("model", _other_model, "vision"),
        ("model file missing", lambda inputs: _set_of_rank(inputs, flag="--model", value="no/such.yaml"), "no/such.yaml"),
        ("plan", _other_plan, "plan"),
        ("data", _other_data, "--data-path"),
        ("unknown flag", lambda inputs: _set_of_rank(inputs, flag="--no-such-flag", value=1), "--no-such-flag"),
    ):
        yield Mutation(f"rank: {name} of one", change, (named,), must_be_refused=True)


def _set_of_rank(inputs: Inputs, *, flag: str, value: object, rank: int = NUM_RANKS - 1) -> None:
    inputs.flags_of_rank[rank] = {flag: value}


def _other_model(inputs: Inputs) -> None:
    other = inputs.folder / "other.yaml"
    other.write_text(yaml.safe_dump(_replaced(MODEL, ("units", "vision", "ffn_hidden_size"), 48), sort_keys=False))
    _set_of_rank(inputs, flag="--model", value=other)


def _other_plan(inputs: Inputs) -> None:
    inputs.write_plan(PLAN)
    other = inputs.folder / "other_plan.yaml"
    swapped = _replaced(
        _replaced(PLAN, ("units", "vision", "replicas", 0, "stages", 0, "ranks"), [1]),
        ("units", "llm", "replicas", 0, "stages", 0, "ranks"),
        [0],
    )
    other.write_text(yaml.safe_dump(swapped, sort_keys=False))
    _set_of_rank(inputs, flag="--plan", value=other)


def _other_data(inputs: Inputs) -> None:
    other = inputs.manifest.with_name("other.jsonl")
    other.write_text("".join(json.dumps(entry) + "\n" for entry in reversed(manifest_entries())))
    _set_of_rank(inputs, flag="--data-path", value=other)


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, str) else value or "''"
    return text if len(text) <= 24 else f"{text[:8]}...({len(text)} characters)"

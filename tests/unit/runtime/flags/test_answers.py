"""What the flags' parser answers to lines of flags, as whole texts: tests/golden/flags.txt.

`== MODEL: N processes, MACHINE` begins a section. A case is a line of flags behind `$`, on top of a base that is right, and its
answer in the next line: the error, or what was given and (behind `->`) what follows from it. `{...}` in front is a configuration
file, and a line behind `!` has no base. `python -m tests.unit.runtime.flags.test_answers` writes the answers anew.
"""

import contextlib
import importlib.metadata
import importlib.util
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.runtime.flags import flag_rules, schedule_checks
from megatron.runtime.flags.arguments import build_plan, choose_trained, parse_arguments
from megatron.runtime.flags.configuration import RunConfig
from megatron.runtime.flags.field_flags import all_flags, value_of
from megatron.runtime.flags.flag_rules import RULES
from megatron.runtime.flags.ignored_flags import EXCLUSIVE_FLAGS, IGNORED_FLAGS
from megatron.runtime.flags.schedule_checks import with_device_defaults
from megatron.runtime.flags.unit_flags import shown_flag
from multimodal.cost.layers.registry import read_model
from multimodal.values.errors import BraidError
from tests.sanity.repository import ROOT
from tests.unit.plan.planners.templates.test_plan_templates import GRAPH, ONE_NODE
from tests.unit.runtime.flags.conftest import BACKBONE, BASE, ENCODER, UNITS, write_adapter, write_hugging_face

GOLDEN = ROOT / "tests" / "golden" / "flags.txt"
IMAGE, AUDIO = {"image": {"patch_size": 4, "in_channels": 1, "merge_size": 3}}, {**ENCODER, "audio": {}}
LONG = {name: {**unit, "num_layers": 8} for name, unit in {"vision": ENCODER, "audio": ENCODER, "llm": BACKBONE}.items()}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "vision, language": UNITS,
    "vision, llm": {"vision": ENCODER, "llm": BACKBONE},
    "vision, audio, llm": {"vision": ENCODER, "audio": ENCODER, "llm": BACKBONE},
    "low_res, llm": {"low_res": ENCODER, "llm": BACKBONE},
    "llm": {"llm": BACKBONE},
    "llm, painter": {"llm": BACKBONE, "painter": {**ENCODER, "role": "generator", "image": {"patch_size": 4}}},
    "vision, llm of 8 layers": {"vision": LONG["vision"], "llm": LONG["llm"]},
    "vision, audio, llm of 8 layers": LONG,
    "llm of 8 layers": {"llm": LONG["llm"]},
    "vision with merged patches, language": {**UNITS, "vision": {**ENCODER, **IMAGE}},
    "frozen vision, language": {**UNITS, "vision": {**ENCODER, "freeze_module": True}},
    "encoder llm, text": {"llm": ENCODER, "text": BACKBONE},
    "a-b, a_b, llm": {"a-b": ENCODER, "a_b": ENCODER, "llm": BACKBONE},
    "audio with positions, language": {"audio": AUDIO, "language": BACKBONE},
    "audio of 25 tokens/s, language": {
        "audio": {**AUDIO, "audio": {"tokens_per_second": 25}, "has_rotary_positions": False},
        "language": BACKBONE,
    },
    "language with scaled positions": {"language": {**BACKBONE, "rotary_dynamic_scaling": [2.0, 64]}},
    "chain of 3 + 4 layers": GRAPH.to_dict()["units"],
    "digits": yaml.safe_load((ROOT / "tests" / "unit" / "runtime" / "six_layers.yaml").read_text())["units"],
}
MACHINES = {
    "CPU": (False, None),
    "CUDA": (True, "2.8.0"),
    "CUDA with an old engine": (True, "2.2.1"),
    "bare CUDA": (True, None),
    "CPU with all packages": (False, "2.8.0"),
}
"""Machine -> is there a device; the version of Transformer Engine, None where no optional package is there. A bare machine has
no kernels either."""
_FLAGS = {flag.name: flag for flag in all_flags()}
_OF_BASE = {"model", "data_path", "lr", "train_iters", "global_batch_size"}


def answers(text: str) -> Iterator[str]:
    """Yield the lines of the golden text, with the answers that are given now, in an empty working folder."""
    write_hugging_face(Path("hf"))
    write_adapter(Path("adapter"))
    ONE_NODE.to_file("templates.yaml")
    replace(ONE_NODE, recompute_granularity="full").to_file("recomputing.yaml")
    Path("plan.yaml").write_text("units: {}\n")
    Path("trained/step_00000004").mkdir(parents=True)
    for line in text.splitlines():
        if line.startswith("== "):
            model, world_size, machine = re.findall("== (.*): (.*) processes, (.*)", line)[0]
            Path("model.yaml").write_text(yaml.safe_dump({"units": MODELS[model]}, sort_keys=False))
        if line.startswith("$"):
            yield line
            with machine_of(machine) as has_cuda:
                yield answer(line[1:].strip(), has_vision="vision" in MODELS[model], world_size=world_size, has_cuda=has_cuda)
        elif line.startswith("== ") or not line:
            yield line


@contextmanager
def machine_of(name: str) -> Iterator[bool]:
    """Let this process take itself for such a machine; gives whether it has CUDA."""
    has_cuda, engine = MACHINES[name]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(flag_rules, "_has_cuda", lambda: has_cuda)
        patched.setattr(flag_rules, "kernels", None if name == "bare CUDA" else object())
        for module in (importlib.util, schedule_checks):
            patched.setattr(module, "find_spec", lambda name: object() if engine else None)
        if engine:
            patched.setattr(importlib.metadata, "version", lambda name: engine)
        yield has_cuda


def answer(line: str, *, has_vision: bool, world_size: str, has_cuda: bool) -> str:
    entries, given = re.findall(r"^(\{.*\})? ?(.*)", line)[0]
    base = {name: value for name, value in BASE.items() if name not in given.split()}
    if entries:
        file = {"model": "model.yaml", **{name[2:]: value for name, value in BASE.items() if name != "--vision-dp"}}
        Path("config.yaml").write_text(yaml.safe_dump({**file, **yaml.safe_load(entries)}))
        base = {"--config": "config.yaml"}
    elif not has_vision or not {"--colocate-units", "--plan"}.isdisjoint(given.split()):
        base.pop("--vision-dp", None)
    flags = [word for pair in base.items() for word in pair] + ([] if entries else ["--model", "model.yaml"]) + given.split()
    flags = given[1:].split() if given.startswith("!") else flags
    try:
        config = parse_arguments(flags, environ={"WORLD_SIZE": world_size})
        if config.parallelism.plans_itself:
            return told(config)
        graph = choose_trained(read_model(config.model.model), config.model)
        plan = build_plan(config, graph, int(world_size))
        config = with_device_defaults(config, graph=graph, plan=plan, has_cuda=has_cuda)
    except BraidError as problem:
        return f"{type(problem).__name__}: {problem}"
    layers = {name: unit.describe_ranges() for name, unit in plan.units.items() if len(unit.replicas[0].stages) > 1}
    return told(config) + "".join(f"; layers of {name}: {found}" for name, found in layers.items())


def told(config: RunConfig) -> str:
    """What was given beside the base, and what else differs from the defaults."""
    values = {name: value_of(config, name) for name in _FLAGS}
    values |= {f"{unit}.{name}": size for unit, sizes in config.parallelism.units.items() for name, size in asdict(sizes).items()}
    values |= {f"{unit}.micro_batch_size": size for unit, size in config.training.encoder_micro_batch_sizes.items()}
    values |= config.optimizer.unit_rates
    given = [f"{name}={_text(values[name])}" for name in sorted(config.given - _OF_BASE)]
    other = [
        f"{name}={_text(value_of(config, name))}"
        for name, flag in _FLAGS.items()
        if name not in config.given
        and value_of(config, name) != flag.default
        and (name, value_of(config, name)) != ("lr_decay_iters", 10)
    ]
    return " ".join(["taken:", *given, *(["->", *other] if other else [])])


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def test_every_line_is_answered_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written = GOLDEN.read_text().splitlines()
    found = list(answers(GOLDEN.read_text()))
    assert [pair for pair in zip(found, written, strict=True) if pair[0] != pair[1]] == []


def test_every_rule_is_broken_by_a_line() -> None:
    text = GOLDEN.read_text()
    messages = [re.sub(r"\\\{.*?\\\}", ".*", re.escape(message)) for message in RULES]
    messages += [re.escape(f"{shown_flag(row.name)} would be ignored: {row.reason}") for row in IGNORED_FLAGS]
    messages += [re.escape(f"{shown_flag(a)} and {shown_flag(b)} exclude each other: {why}") for a, b, why in EXCLUSIVE_FLAGS]
    assert [message for message in messages if not re.search(message, text)] == []


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        GOLDEN.write_text("".join(f"{line}\n" for line in answers(GOLDEN.read_text())))

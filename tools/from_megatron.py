"""Makes a run of Braid of a training command of Megatron: config.yaml, model.yaml, perhaps plan.yaml, and a report of all flags.

python tools/from_megatron.py SCRIPT.sh [NAME=VALUE ...] [ARGUMENT ...] --output DIR    variables and arguments of the script
python tools/from_megatron.py --output DIR -- torchrun ... pretrain_vlm.py --num-layers 32 ...

Reads scripts of Megatron-LM (pretrain_gpt.py, pretrain_vlm.py, examples/multimodal, examples/mimo), and the overrides
(train.train_iters=10) of Megatron-Bridge's launch lines. Nothing of a script is started; see docs/from_megatron.md.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.runtime.flags.arguments import parse_arguments
from megatron.runtime.flags.flag_parser import FlagParser, explain_unknown
from megatron.runtime.flags.megatron_flags import FREEZES, megatron_flags
from multimodal.plan.plans_of_sizes import UnitSizes, plan_disaggregated
from multimodal.values.errors import BraidError, ConfigError
from multimodal.values.file_form import write_mapping
from multimodal.values.model_graph import ModelGraph, Unit
from tools.command_line import Parser, program
from tools.megatron_command import Command, read_command
from tools.megatron_models import TABLES, Flags, read_model

KEPT, RENAMED, MODEL, NOT_NEEDED = "taken over", "renamed", "in the model file", "not needed"
NOT_AVAILABLE, UNKNOWN, TO_DO = "not available", "unknown", "left to do"
SECTIONS = (KEPT, RENAMED, MODEL, NOT_NEEDED, NOT_AVAILABLE, UNKNOWN, TO_DO)
_ANSWERS = {"use ": TO_DO, "it belongs ": TO_DO, "leave it out: ": NOT_NEEDED, "not avail": NOT_AVAILABLE}
_MOST_CHECKS = 40
MOCK = "mock.jsonl"
"""File of text in place of Megatron's random tokens."""
_NOT_NEEDED = {name: reason for reason, names in TABLES["not_needed"].items() for name in names.split()}
_LLM_SIZES, _ENCODER_SIZES, _LENGTHS = TABLES["llm_sizes"], TABLES["encoder_sizes"], TABLES["lengths"]
_KNOWN = megatron_flags()["known_elsewhere"]
_BY_VALUE = {name: key[2:] for key, names in _KNOWN.items() for name in names.split() if re.fullmatch(r"--[\w-]+", key)}


class Conversion:
    """A command on its way to files."""

    def __init__(self, command: Command) -> None:
        self.flags = Flags(command)
        for where, sizes in TABLES["default_sizes"].items():
            for name, size in sizes.items() if where in command.program else ():
                self.flags.setdefault(name, (size,))
        self.world_size = command.world_size
        self.config: dict[str, Any] = {}
        self.plan: dict[str, Any] = {}
        self.report: dict[str, list[str]] = {section: [] for section in SECTIONS}
        self.answered: set[str] = set()
        self.model = read_model(self.flags, command.program)
        self.graph = ModelGraph.from_dict(self.model)
        self.note(MODEL, *sorted(self.flags.read))
        for name in command.unset:
            self.report[TO_DO].append(f"the script uses {name}, which nothing sets: give it behind the script's name")
        if "recipe" in command.program:
            what = "a recipe's code is not read; what overrides do not say is Megatron's default in model.yaml: correct it there"
            self.report[TO_DO].append(f"model: {what}")
        if self.flags.text("position-embedding-type") != "rope" and "use-rotary-position-embeddings" not in self.flags:
            self.report[TO_DO].append("positions: Megatron's default, learned ones, is not there; the model file has rotary ones")
        multiple = self.flags.number("make-vocab-size-divisible-by", default=128)
        vocabulary = int(multiple * self._sizes_of(_LLM_SIZES).tensor_parallel_size)
        self.config["make-vocab-size-divisible-by"] = vocabulary
        what = f"{vocabulary}: Megatron multiplies by the tensor parallel size"
        self.note(RENAMED, "make-vocab-size-divisible-by", what=what)
        self._lengths(command.program)
        self._data()
        self._checkpoints()
        self._sizes()
        self._others()

    def note(self, section: str, *names: str, what: str = "") -> None:
        """Report those of these flags that are given, with their values."""
        for name in names:
            if name in self.flags:
                self.answered.add(name)
                shown = " ".join((f"--{name}", *self.flags[name]))
                self.report[section].append(f"{shown}: {what}" if what else shown)

    def rename(self, name: str, key: str, value: Any) -> None:
        """Set a flag of Braid from one of Megatron."""
        self.config[key] = value
        self.note(RENAMED, name, what=f"{key}: {value}")

    def _lengths(self, program: str) -> None:
        flags, config = self.flags, self.config
        config["micro-batch-size"] = flags.number("micro-batch-size", default=1)
        dp = self._replicas()
        config["global-batch-size"] = flags.number("global-batch-size", default=config["micro-batch-size"] * dp)
        for name in ("train-samples", "lr-decay-samples", "lr-warmup-samples", "lr-wsd-decay-samples"):
            if name in flags:
                self.rename(name, name.replace("samples", "iters"), int(flags.number(name)) // config["global-batch-size"])
        if "packing-seq-length" in flags and flags.number("packing-seq-length") > 0:
            config["packing-seq-length"] = int(flags.number("packing-seq-length"))
            self.note(KEPT, "packing-seq-length")
        length = flags.number(*_LENGTHS)
        image = self.graph.encoders[0].image if self.graph.encoders else None
        if program.endswith("pretrain_vlm.py") and image is not None and "decoder-seq-length" not in flags:
            rows = flags.number("img-h", default=224) // image.patch_size
            length += image.num_output_tokens((rows, rows))
        if length:
            config["seq-length"] = int(length)
        self.note(KEPT, "micro-batch-size", "global-batch-size")
        self.note(RENAMED, *_LENGTHS, what=f"seq-length: {config.get('seq-length')}, images included")

    def _replicas(self) -> int:
        return max(1, (self.world_size or 1) // self._sizes_of(_LLM_SIZES).ranks_per_replica)

    def _sizes_of(self, flags_of: Mapping[str, tuple[str, ...]]) -> UnitSizes:
        """Return a unit's sizes by their flags; what is not given, or 0, is 1."""
        return UnitSizes(**{size: int(self.flags.number(*flags_of.get(size, ("-",)), default=1)) or 1 for size in _LLM_SIZES})

    def _data(self) -> None:
        flags, config = self.flags, self.config
        if flags.is_mock and not self.graph.encoders:
            config["data-path"] = MOCK
            self.note(RENAMED, "mock-data", what=f"data-path: {MOCK}, some words that are written beside this report")
        elif flags.is_mock:
            config["data-path"] = "digits"
            self.note(RENAMED, "mock-data", what="data-path: digits, whose images have sizes of their own and one channel")
        elif names := [name for name in ("data-path", "train-data-path", "dataset-root") if name in flags]:
            name = names[0]
            config["data-path"] = list(flags[name])
            self.note(KEPT if name == "data-path" else RENAMED, name, what="one of the forms of docs/data.md must be there")
            self.report[TO_DO].append("data: Energon's is read, Megatron's indexed data are not; see docs/data.md")
        kind = flags.text("tokenizer-type")
        if kind.startswith("Null") or flags.is_mock or not (kind or {"tokenizer-model", "vocab-file"} & flags.keys()):
            config["tokenizer-type"] = "ByteTokenizer"
        else:
            config["tokenizer-type"] = "HuggingFaceTokenizer"
            config["tokenizer-model"] = flags.text("tokenizer-model", "vocab-file", default="TOKENIZER")
            self.report[TO_DO].append("tokenizer-model: give a folder with tokenizer.json on this machine; nothing is downloaded")
        own = "tokenizer-type", "tokenizer-model", "vocab-file", "merge-file"
        self.note(RENAMED, *own, what=f"tokenizer-type: {config['tokenizer-type']}")
        if flags.number("eval-iters"):
            shares = [share.strip(" .0") for share in flags.text("split", default="969,30,1").split(",")]
            if "split" in flags and not any(shares[1:2]):
                self.rename("split", "split", "99,1,0")
        elif "split" in flags and config.get("data-path") == "digits":
            self.note(NOT_NEEDED, "split", what="a program holds out samples of its own")

    def _checkpoints(self) -> None:
        flags = self.flags
        for name in ("load", "pretrained-checkpoint", "language-model-checkpoint"):
            if name in flags and flags.text(name) not in ("", flags.text("save")):
                key = "load" if name == "load" else "pretrained-checkpoint"
                self.rename(name, key, f"{flags.text(name)}-braid")
                self.report[TO_DO].append(
                    f"{key}: python tools/convert.py --load-megatron {flags.text(name)} --model model.yaml --save "
                    f"{self.config[key]} --make-vocab-size-divisible-by {self.config['make-vocab-size-divisible-by']}"
                )

    def _sizes(self) -> None:
        """Set the parallelism: as in Megatron all units share all ranks, unless the encoder has sizes of its own."""
        flags, graph = self.flags, self.graph
        llm, own = self._sizes_of(_LLM_SIZES), self._sizes_of(_ENCODER_SIZES)
        if flags.number("encoder-pipeline-model-parallel-size") or flags.has("encoder-tp", "encoder-dp"):
            dp = self._replicas() if "llm-dp" not in flags else llm.data_parallel_size
            if not flags.has("encoder-dp"):
                dp = max(1, (self.world_size or 1) // (own.ranks_per_replica + llm.ranks_per_replica))
                own = replace(own, data_parallel_size=dp)
            llm = replace(llm, data_parallel_size=dp)
            sizes = {**{unit.name: own for unit in graph.encoders}, graph.backbone.name: llm}
            self.world_size = sum(size.num_ranks or 0 for size in sizes.values())
            self.plan = plan_disaggregated(graph, sizes=sizes, world_size=self.world_size).to_dict()
            self.config["plan"] = "plan.yaml"
            section, what = RENAMED, "plan: plan.yaml"
        else:
            section, what = KEPT, ""
            for size, names in _LLM_SIZES.items():
                if (value := getattr(llm, size)) > 1 and size != "data_parallel_size":
                    self.config[names[-1]] = value
            self.world_size = self.world_size or llm.ranks_per_replica
            if graph.encoders and self.world_size > 1:
                self.config["colocate-units"] = True
                for unit in graph.encoders:
                    self._encoder_size(unit, llm.tensor_parallel_size)
        self.note(section, *chain(*_LLM_SIZES.values(), *_ENCODER_SIZES.values()), what=what)
        if "sequence-parallel" in flags and max(llm.tensor_parallel_size, own.tensor_parallel_size) == 1:
            self.note(NOT_NEEDED, "sequence-parallel", what="Megatron, too, leaves it out with tensor parallel size 1")

    def _encoder_size(self, unit: Unit, size: int) -> None:
        """Cut an encoder as Megatron does, like the LLM, if its widths allow that."""
        if size > 1 and not any(width % size for width in unit.divided_widths.values()):
            self.config[f"{unit.name}-tp"] = size
        elif size > 1:
            problem = f"{size} does not divide its heads and widths"
            self.report[TO_DO].append(f"unit '{unit.name}' has tensor parallel size 1: {problem}")

    def _others(self) -> None:
        flags, spellings = self.flags, FlagParser(self.graph).actions
        virtual = "virtual-pipeline-model-parallel-size", "num-layers-per-virtual-pipeline-stage"
        if flags.has(*virtual, "num-virtual-stages-per-pipeline-rank"):
            self.config["schedule"] = "interleaved-1f1b"
        for name in flags:
            if name in self.answered:
                continue
            value = _value(flags[name], is_list=name in ("freeze", "profile-ranks"))
            if value == TABLES["defaults"].get(name):
                self.note(NOT_NEEDED, name, what="the default on CUDA" if isinstance(value, str) else "always so")
            elif name in _NOT_NEEDED:
                self.note(NOT_NEEDED, name, what=_NOT_NEEDED[name])
            elif name in _BY_VALUE and flags[name]:
                self.rename(name, _BY_VALUE[name], value)
            elif name == "fp16":
                self.rename(name, "bf16", True)
            elif name in ("recompute-vision", "recompute-method", "recompute-num-layers", "recompute-modules"):
                self.rename(name, "recompute-granularity", flags.text("recompute-granularity", default="full"))
            elif f"--{name}" in FREEZES or f"--{name}" in spellings:
                self.config[name] = value
                self.note(KEPT, name)
            else:
                answer = explain_unknown(f"--{name}", spellings=spellings, graph=self.graph)
                same = re.fullmatch(r"use --(\S+)(?: (\S+))? here", answer)
                if same and same[2] != "digits" and (same[2] or spellings[f"--{same[1]}"].nargs == 0):
                    self.rename(name, same[1], same[2] or True)
                    continue
                section = next((section for start, section in _ANSWERS.items() if answer.startswith(start)), UNKNOWN)
                what = re.sub(r"^(leave it out: always, |leave it out: |not available: )", "", answer)
                self.note(section, name, what=what)

    def check(self, folder: Path) -> None:
        """Write config.yaml such that the run's own parser takes it, but for what is reported as left to do."""
        aside: dict[str, Any] = {}
        for _ in range(_MOST_CHECKS):
            if not (message := self._objection(folder)):
                break
            named = re.search(r"(?:^|: )(?:argument )?--([\w-]+)|--([\w-]+)(?: \S+)? would be ignored", message)
            name = "" if named is None else named[1] or named[2]
            if name not in self.config:
                self.report[TO_DO].append(message)
                break
            value = self.config.pop(name)
            if any(f"--{each}" in message for each in aside):
                aside[name] = value
            elif "would be ignored" in message:
                self.report[KEPT] = [line for line in self.report[KEPT] if not re.match(rf"--{name}\b(?!-)", line)]
                self.answered.add(name)
                shown = " ".join((f"--{name}", *self.flags.get(name, ())))
                self.report[NOT_NEEDED].append(f"{shown}: {message.partition('would be ignored: ')[2]}")
            elif value is True and "expects one value" in message:
                aside[name] = None
                self.report[TO_DO].append(f"--{name} has no value in the script; set it")
            else:
                aside[name] = value
                self.report[TO_DO].append(message)
        kept = {name: value for name, value in aside.items() if value is not None}
        write_mapping(folder / "config.yaml", {"model": "model.yaml", **self.config, **kept})

    def _objection(self, folder: Path) -> str:
        """Return what the run's own parser says to this configuration, which is written; empty if it takes it."""
        write_mapping(folder / "config.yaml", {"model": "model.yaml", **self.config})
        try:
            parse_arguments(["--config", str(folder / "config.yaml")], environ={"WORLD_SIZE": str(self.world_size)})
        except BraidError as problem:
            return str(problem).replace(f"{folder}/", "")
        return ""


def _value(words: Sequence[str], *, is_list: bool) -> Any:
    if not words:
        return True
    if is_list or len(words) > 1:
        return list(words)
    try:
        return int(words[0]) if re.fullmatch(r"-?\d+", words[0]) else float(words[0])
    except ValueError:
        return words[0]


def build_parser() -> Parser:
    """Return the parser."""
    parser = Parser(prog="from_megatron.py", description=__doc__)
    parser.add_argument("words", nargs="+", metavar="SCRIPT.sh|--", help="A script, its variables and arguments; or a command.")
    parser.add_argument("--output", type=Path, metavar="DIR", help="Folder for the files (braid-SCRIPT).")
    return parser


@program("from_megatron.py")
def main(argv: Sequence[str]) -> None:
    """Convert according to the flags; raises BraidError."""
    parser = build_parser()
    flags = parser.parse_intermixed_args(argv) if "--" not in argv else parser.parse_args(argv)
    command = read_command(flags.words)
    if re.search(r"generation|inference|generate|tasks/", command.program):
        raise ConfigError(f"{command.program} answers, and does not train; see tools/generate.py and docs/generate.md")
    if found := re.search(r"pretrain_(bert|ict|retro|t5|mamba|vision)|train_rl", command.program):
        trained = "LLMs are, with encoders and generators of images and sound"
        raise ConfigError(f"{found[0]}: such models are not trained here; {trained}")
    folder = flags.output or Path(f"braid-{Path(flags.words[0]).stem.strip('-') or 'run'}")
    conversion = Conversion(command)
    folder.mkdir(parents=True, exist_ok=True)
    write_mapping(folder / "model.yaml", conversion.model)
    if conversion.plan:
        write_mapping(folder / "plan.yaml", conversion.plan)
    if conversion.config.get("data-path") == MOCK:
        words = [f"{number} and {number} is {2 * number}. " * 40 for number in range(64)]
        (folder / MOCK).write_text("".join(f'{{"text": "{each}"}}\n' for each in words), encoding="utf-8")
    conversion.check(folder)
    lines = [f"{name}:\n" + "".join(f"  {line}\n" for line in found) for name, found in conversion.report.items() if found]
    started = f"torchrun --nproc-per-node {conversion.world_size} pretrain_mllm.py --config {folder / 'config.yaml'}"
    lines.append(f"run:\n  {started}\n")
    (folder / "report.txt").write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines), end="")


if __name__ == "__main__":
    sys.exit(main())

"""Converts weights between Braid's checkpoints and folders of Hugging Face; see docs/hugging_face.md.

python tools/convert.py --load-hf DIR --save CHECKPOINTS      what --pretrained-checkpoint starts from
python tools/convert.py --load CHECKPOINTS --save-hf DIR      what transformers load (--like DIR: as that has it)
python tools/convert.py --load CHECKPOINTS --save-adapter DIR --like DIR   its adapters apart, as PEFT loads them
python tools/convert.py --load-hf DIR --save-hf DIR           the same weights, written anew
    --load-adapter DIR                                        with the adapters of a folder of PEFT added

One process holds the whole model, in the type that it has where it is read. A run converts without that, on all its ranks:
pretrain_mllm.py --load-hf, --save-hf.
"""

import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore", module=r"megatron\.core.*|torch\..*")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from megatron.runtime import platform
from megatron.runtime.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from megatron.runtime.checkpoint.index import read_index
from megatron.runtime.checkpoint.manifest import read_newest
from megatron.runtime.hugging_face.load_adapter import load_adapter
from megatron.runtime.hugging_face.load_weights import load_hugging_face
from megatron.runtime.hugging_face.save_adapter import check_adapter_target, save_adapter
from megatron.runtime.hugging_face.save_weights import check_hugging_face_target, save_hugging_face
from megatron.runtime.hugging_face.weight_files import WeightFiles
from megatron.runtime.session import Session, SessionOptions
from multimodal.cost.layers.adapters import adapt_units
from multimodal.cost.layers.registry import linear_layers, read_model
from multimodal.hugging_face.adapter_files import read_peft_adapter
from multimodal.model.transformer_config import BuildOptions, Precision
from multimodal.model.unit_stage import UnitStage
from multimodal.plan.colocated import plan_colocated
from multimodal.plan.unit_sizes import UnitSizes
from multimodal.values.errors import ConfigError
from multimodal.values.model_graph import ModelGraph
from tools.command_line import Parser, count, run_tool

_WORD_EMBEDDINGS = "model.{}.layers.0.word_embeddings.weight"


class _Source(NamedTuple):
    graph: ModelGraph
    dtype: torch.dtype
    vocab_size: int
    """Padded size of the vocabulary."""


def build_parser() -> Parser:
    """Return the parser."""
    parser = Parser(prog="convert.py", description=__doc__)
    sources = parser.add_mutually_exclusive_group(required=True)
    sources.add_argument("--load-hf", type=Path, metavar="DIR", help="Folder of Hugging Face to read.")
    sources.add_argument("--load", type=Path, metavar="CHECKPOINTS", help="Folder of a run, or one of its checkpoints, to read.")
    parser.add_argument("--load-adapter", type=Path, metavar="DIR", help="--load-hf: folder of PEFT whose adapters are added.")
    targets = parser.add_mutually_exclusive_group(required=True)
    targets.add_argument("--save-hf", type=Path, metavar="DIR", help="New folder of Hugging Face to write.")
    targets.add_argument("--save-adapter", type=Path, metavar="DIR", help="New folder for the adapters of a run, as PEFT has it.")
    targets.add_argument("--save", type=Path, metavar="CHECKPOINTS", help="Folder that gets a checkpoint of step 0.")
    parser.add_argument(
        "--like", type=Path, metavar="DIR", help="Folder whose names, types, files and tokenizer --save-hf takes; adapters' base."
    )
    parser.add_argument(
        "--make-vocab-size-divisible-by", type=count, default=128, metavar="N", help="--load-hf: as the run will have it (128)."
    )
    return parser


def run(argv: Sequence[str]) -> None:
    """Convert according to the flags; raises BraidError."""
    flags = build_parser().parse_args(argv)
    if flags.load is not None and flags.save is not None:
        raise ConfigError("--load and --save: both are checkpoints of Braid, so there is nothing to convert; use --save-hf")
    if flags.like is not None and flags.save is not None:
        raise ConfigError("--like would be ignored: it says what --save-hf and --save-adapter write; leave it out")
    if flags.save_adapter is not None and flags.load is None:
        raise ConfigError("--save-adapter: a folder of Hugging Face has no adapters; give a run's checkpoints with --load")
    if flags.load_adapter is not None and (flags.load_hf is None or flags.save_hf is None):
        raise ConfigError(
            "--load-adapter is added to the weights of --load-hf and written by --save-hf; give both, or leave it out"
        )
    source = _read_hugging_face(flags) if flags.load_hf is not None else _read_checkpoint(flags.load)
    like = flags.like or flags.load_hf
    if flags.save_hf is not None:
        check_hugging_face_target(flags.save_hf, graph=source.graph, like=like)
    if flags.save_adapter is not None:
        _check_adapters(flags.save_adapter, source.graph, flags.load, like=like)
    with _session(source) as session:
        if flags.load_hf is not None:
            load_hugging_face(flags.load_hf, session=session)
            if flags.load_adapter is not None:
                load_adapter(flags.load_adapter, session=session, base=flags.load_hf)
        else:
            load_checkpoint(flags.load, session=session, load_optimizer=False, load_rng=False)
        if flags.save_hf is not None:
            save_hugging_face(flags.save_hf, session=session, like=like)
        elif flags.save_adapter is not None:
            save_adapter(flags.save_adapter, session=session, like=like)
        else:
            save_checkpoint(flags.save, step=0, session=session, schedulers_state={}, run_state={}, keep_last=1)
    print(f"{flags.load_hf or flags.load} is now also in {flags.save_hf or flags.save_adapter or flags.save}")


def _check_adapters(target: Path, graph: ModelGraph, checkpoint: Path, *, like: Path | None) -> None:
    if all(unit.lora is None for unit in graph.units):
        raise ConfigError(f"--save-adapter: the run in {checkpoint} has no adapters; use --save-hf")
    check_adapter_target(target, graph=graph, like=like)


def _read_hugging_face(flags: Any) -> _Source:
    graph = read_model(flags.load_hf)
    if flags.load_adapter is not None:
        found = read_peft_adapter(flags.load_adapter, graph=graph, base=flags.load_hf)
        graph = adapt_units(graph, linear_layers(graph), rank=found.rank, alpha=found.alpha, targets=found.targets)
    with WeightFiles(flags.load_hf) as files:
        dtype = max((weight.dtype for weight in files.weights.values()), key=lambda dtype: dtype.itemsize)
    multiple = flags.make_vocab_size_divisible_by
    return _Source(graph, dtype, -(-(graph.backbone.vocab_size or 1) // multiple) * multiple)


def _read_checkpoint(folder: Path) -> _Source:
    path, manifest = read_newest(folder)
    graph = ModelGraph.from_dict(manifest.model)
    index = read_index(path, files=manifest.files, crc32=manifest.index_crc32)
    embeddings = index[_WORD_EMBEDDINGS.format(graph.backbone.name)]
    return _Source(graph, embeddings.dtype, embeddings.shape[0])


@contextmanager
def open_checkpoint(folder: Path, *, dtype: torch.dtype) -> Iterator[Session]:
    """Yield the whole model of a run in one data type, on this process alone."""
    with _session(_read_checkpoint(folder)._replace(dtype=dtype)) as session:
        load_checkpoint(folder, session=session, load_optimizer=False, load_rng=False)
        yield session


@contextmanager
def _session(source: _Source) -> Iterator[Session]:
    """Yield the whole model on this process alone."""
    platform.install()
    sizes = {name: UnitSizes(data_parallel_size=1) for name in source.graph.unit_names}
    plan = plan_colocated(source.graph, sizes=sizes, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=FileStore(str(Path(folder) / "store"), 1), rank=0, world_size=1)
        try:
            build = BuildOptions(Precision(source.dtype))
            yield Session(SessionOptions(source.graph, build, source.vocab_size, build_stage=_build_empty), plan=plan)
        finally:
            dist.destroy_process_group()


@torch.no_grad()
def _build_empty(*, stage_index: int, **parts: Any) -> UnitStage:
    stage = UnitStage(**parts)
    for parameter in stage.parameters():
        parameter.zero_()
    return stage


main = partial(run_tool, "convert.py", run)
"""Returns the exit code: 2, with one line on stderr, for wrong input."""


if __name__ == "__main__":
    sys.exit(main())

"""Converts weights between Braid's checkpoints, folders of Hugging Face and checkpoints of Megatron.

python tools/convert.py --load-hf DIR --save CHECKPOINTS      what --pretrained-checkpoint starts from
python tools/convert.py --load CHECKPOINTS --save-hf DIR      what transformers load (--like DIR: as that has it)
python tools/convert.py --load CHECKPOINTS --save-adapter DIR --like DIR   its adapters apart, as PEFT loads them
python tools/convert.py --load-hf DIR --save-hf DIR           the same weights, written anew
    --load-adapter DIR                                        with the adapters of a folder of PEFT added
python tools/convert.py --load-megatron DIR --model M.yaml --save CHECKPOINTS   from a torch_dist checkpoint of megatron-core
python tools/convert.py --load CHECKPOINTS --save-megatron DIR                  and back
python tools/convert.py --load CHECKPOINTS --save-distributed DIR     the same tensors, as torch.distributed.checkpoint reads them

One process holds the whole model, in the type that it has where it is read. A run converts without that, on all its ranks:
pretrain_mllm.py --load-hf, --save-hf. See docs/hugging_face.md and docs/from_megatron.md.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from multimodal.values.errors import ConfigError
from tools.command_line import Parser, count, program

if TYPE_CHECKING:
    from megatron.runtime.checkpoint.checkpoint import LoadedCheckpoint
    from megatron.runtime.generation.whole_model import StoredModel
    from megatron.runtime.session import Session


def build_parser() -> Parser:
    """Return the parser."""
    parser = Parser(prog="convert.py", description=__doc__)
    add = parser.add_mutually_exclusive_group(required=True).add_argument
    add("--load-hf", type=Path, metavar="DIR", help="Folder of Hugging Face to read.")
    add("--load", type=Path, metavar="CHECKPOINTS", help="Folder of a run, or one of its checkpoints, to read.")
    add("--load-megatron", type=Path, metavar="DIR", help="Checkpoint, or run, of Megatron to read (torch_dist).")
    parser.add_argument("--averages", action="store_true", help="--load: the averages of weights that the run keeps.")
    parser.add_argument("--model", type=Path, metavar="FILE.yaml", help="--load-megatron: the model file of its model.")
    parser.add_argument("--load-adapter", type=Path, metavar="DIR", help="--load-hf: folder of PEFT whose adapters are added.")
    add = parser.add_mutually_exclusive_group(required=True).add_argument
    add("--save-hf", type=Path, metavar="DIR", help="New folder of Hugging Face to write.")
    add("--save-adapter", type=Path, metavar="DIR", help="New folder for the adapters of a run, as PEFT has it.")
    add("--save", type=Path, metavar="CHECKPOINTS", help="Folder that gets a checkpoint.")
    add("--save-megatron", type=Path, metavar="DIR", help="New folder for a checkpoint that Megatron loads.")
    add("--save-distributed", type=Path, metavar="DIR", help="New folder that torch.distributed.checkpoint reads without Braid.")
    add = parser.add_argument
    add("--no-load-optim", action="store_true", help="Leave checkpoints' optimizer state behind (--save, --save-megatron).")
    add("--like", type=Path, metavar="DIR", help="Folder whose names, types, files, tokenizer --save-hf takes; adapters' base.")
    multiple = "--load-hf and --load-megatron: as the run has it (128)."
    add("--make-vocab-size-divisible-by", type=count, default=128, metavar="N", help=multiple)
    return parser


@program("convert.py")
def main(argv: Sequence[str]) -> None:
    """Convert according to the flags; raises BraidError."""
    flags = build_parser().parse_args(argv)
    _check(flags)
    if flags.save_distributed is None:
        _convert(flags)
    else:
        from megatron.runtime.checkpoint.distributed_folder import export_checkpoint  # behind the flags: torch takes seconds

        export_checkpoint(flags.load, flags.save_distributed)
    target = flags.save_hf or flags.save_adapter or flags.save_megatron or flags.save_distributed or flags.save
    print(f"{flags.load_hf or flags.load_megatron or flags.load} is now also in {target}")


def _check(flags: Namespace) -> None:
    """Raise ConfigError for flags that do not go together."""
    if flags.load is not None and flags.save is not None:
        raise ConfigError("--load and --save: both are checkpoints of Braid, so there is nothing to convert; use --save-hf")
    if (flags.load_megatron is None) != (flags.model is None):
        raise ConfigError("--load-megatron and --model belong together: names and shapes follow from the model file; give both")
    if flags.save_distributed is not None and (flags.load is None or flags.averages or flags.no_load_optim):
        rest = "give one with --load, without --averages and --no-load-optim"
        raise ConfigError(f"--save-distributed holds all that a run's checkpoint does; {rest}")
    if flags.like is not None and flags.save_hf is None and flags.save_adapter is None:
        raise ConfigError("--like would be ignored: it says what --save-hf and --save-adapter write; leave it out")
    if flags.save_adapter is not None and flags.load is None:
        raise ConfigError("--save-adapter: a folder of Hugging Face has no adapters; give a run's checkpoints with --load")
    if flags.load_adapter is not None and (flags.load_hf is None or flags.save_hf is None):
        raise ConfigError(
            "--load-adapter is added to the weights of --load-hf and written by --save-hf; give both, or leave it out"
        )
    if flags.averages and (flags.load is None or not _has_averages(flags.load)):
        raise ConfigError("--averages is of --load, the checkpoints of a run with --generator-ema-decay; leave it out")


def _has_averages(folder: Path) -> bool:
    from megatron.runtime.checkpoint.distributed_folder import read_index_of
    from megatron.runtime.state.held_tensors import is_average

    return any(map(is_average, read_index_of(folder)[1]))


def _convert(flags: Namespace) -> None:
    """Read a whole model, and write it anew."""
    from megatron.runtime.checkpoint.distributed_folder import has_optimizer_state
    from megatron.runtime.checkpoint.megatron_weights import has_state
    from megatron.runtime.generation.whole_model import empty_session, find_checkpoint, find_megatron
    from megatron.runtime.gradients.unit_optimizer import build_optimizer_config
    from megatron.runtime.hugging_face.save_weights import check_adapter_target, check_hugging_face_target

    if flags.load_megatron is not None:
        source = find_megatron(flags.load_megatron, flags.model, vocab_multiple=flags.make_vocab_size_divisible_by)
    else:
        source = _find_hugging_face(flags) if flags.load_hf is not None else find_checkpoint(flags.load)
    like = flags.like or flags.load_hf
    if flags.save_hf is not None:
        check_hugging_face_target(flags.save_hf, graph=source.graph, like=like)
    if flags.save_adapter is not None:
        if all(unit.lora is None for unit in source.graph.units):
            raise ConfigError(f"--save-adapter: the run in {flags.load} has no adapters; use --save-hf")
        check_adapter_target(flags.save_adapter, graph=source.graph, like=like)
    has_optimizer = False
    if not flags.no_load_optim and flags.load_megatron is not None:
        has_optimizer = has_state(flags.load_megatron)
    elif flags.save_megatron is not None and flags.load is not None and not (flags.no_load_optim or flags.averages):
        has_optimizer = has_optimizer_state(flags.load)
    betas = (0.9, 0.999)  # of a run's flags, which checkpoints do not have
    rates = {"lr": 1.0, "min_lr": 0.0, "weight_decay": 0.01, "eps": 1e-8, "clip_grad": 1.0}
    optimizer = build_optimizer_config(**rates, betas=betas, dtype=source.dtype) if has_optimizer else None
    with empty_session(source, optimizer=optimizer) as session:
        _write(flags, session, _read(flags, session, has_optimizer), step_is_known=has_optimizer)


def _find_hugging_face(flags: Namespace) -> "StoredModel":
    from megatron.runtime.generation.whole_model import find_hugging_face

    found = find_hugging_face(flags.load_hf, vocab_multiple=flags.make_vocab_size_divisible_by)
    if flags.load_adapter is None:
        return found
    from multimodal.cost.layers.adapters import adapt_units
    from multimodal.cost.layers.registry import linear_layers
    from multimodal.hugging_face.adapter_files import read_peft_adapter

    adapter = read_peft_adapter(flags.load_adapter, graph=found.graph, base=flags.load_hf)
    stop = adapter.new_tokens[1] if adapter.new_tokens is not None else 0
    if stop > (found.graph.backbone.vocab_size or 0):
        found = find_hugging_face(flags.load_hf, vocab_multiple=flags.make_vocab_size_divisible_by, vocab_size=stop)
    linear = linear_layers(found.graph)
    return found._replace(graph=adapt_units(found.graph, linear, rank=adapter.rank, alpha=adapter.alpha, targets=adapter.targets))


def _read(flags: Namespace, session: "Session", load_optimizer: bool) -> "LoadedCheckpoint | None":
    """Fill a session; returns what a checkpoint says beside weights, None of a folder of Hugging Face."""
    from megatron.runtime.checkpoint.checkpoint import load_checkpoint
    from megatron.runtime.checkpoint.megatron_weights import load_megatron
    from megatron.runtime.hugging_face.load_adapter import load_adapter
    from megatron.runtime.hugging_face.load_weights import load_hugging_face

    if flags.load_megatron is not None:
        return load_megatron(flags.load_megatron, session=session, load_optimizer=load_optimizer)
    if flags.load is not None:
        rest = {"load_rng": False, "takes_averages": flags.averages}
        return load_checkpoint(flags.load, session=session, load_optimizer=load_optimizer, **rest)
    load_hugging_face(flags.load_hf, session=session)
    if flags.load_adapter is not None:
        load_adapter(flags.load_adapter, session=session, base=flags.load_hf)
    return None


def _write(flags: Namespace, session: "Session", loaded: "LoadedCheckpoint | None", *, step_is_known: bool) -> None:
    from megatron.runtime.checkpoint.checkpoint import save_checkpoint
    from megatron.runtime.checkpoint.megatron_weights import save_megatron
    from megatron.runtime.hugging_face.load_weights import gather_adapters
    from megatron.runtime.hugging_face.save_weights import save_adapter, save_hugging_face

    like, step = flags.like or flags.load_hf, loaded.step if loaded is not None and step_is_known else 0
    state, run = (loaded.schedulers_state, loaded.run_state) if loaded is not None else ({}, {})
    if flags.save_hf is not None:
        save_hugging_face(flags.save_hf, session=session, like=like)
    elif flags.save_adapter is not None:
        save_adapter(flags.save_adapter, session=session, like=like)
    elif flags.save_megatron is not None:
        save_megatron(
            flags.save_megatron,
            session=session,
            step=step,
            adapters=gather_adapters(session),
            scheduler=state or run.get("rates"),
            global_batch_size=run.get("global_batch_size", 1),
        )
    else:
        save_checkpoint(flags.save, step=step, session=session, schedulers_state={}, run_state=run, keep_last=1)


if __name__ == "__main__":
    sys.exit(main())

"""Claim: samples of tars take Braid less processor time than megatron-energon and about that of torchdata, decoded by all alike.

--samples photographs (noise, in JPEG) with captions are written into --shards tars of WebDataset, and prepared by Energon.
Each side opens the tars, shuffles, and makes of every sample what a step needs, on --workers processes: the image cut into
patches by Braid's rule, and the caption as bytes. The sides take turns, --rounds times; compared are the processor time of a
pass, which other work on the machine disturbs less than its seconds, and the seconds from opening to the first batch (Braid has
its index, unless this is said). Energon and torchdata are looked for in --side FOLDER, into which pip installed them; a side
that is missing is named.

Then --rows samples without tokens are an index: seconds until it is open, and until a global batch is drawn, and the memory that
this took.

--index N instead indexes N samples in tars, images of 16 x 16 with captions, beside Energon's preparation of the same tars, and
opens what was written as every rank of a run does at its start; again in turns. Braid's index also has all tokens and the sizes
of images. Memory is what the processes have each to itself, summed up.

Run `python benchmarks/beside/energon.py [--samples N] [--shards N] [--workers N] [--rounds N] [--rows N] [--side FOLDER]
[--json]`, or with `--index 200000 [--shards N] [--rounds N] [--side FOLDER] [--json]`.
"""

import argparse
import gc
import io
import json
import multiprocessing
import os
import resource
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
from PIL import Image

from benchmarks.beside.turns import compare, print_rows
from multimodal.data.forms.sample_files import open_sample_files
from multimodal.data.global_batches import DataPart, GlobalBatches, split_indices
from multimodal.data.image_processing import image_to_patches
from multimodal.data.index.index_cache import FOLDER_NAME, IndexCache
from multimodal.data.index.sample_index import build_index, read_index, write_index
from multimodal.data.index.sample_indexer import IndexOptions
from multimodal.data.manifest import ManifestSource
from multimodal.data.tokenizer import ByteTokenizer
from multimodal.values.model_graph import ImageInput, ModelGraph

BATCH = 16
SHAPE = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 1, "ffn_hidden_size": 64}
IMAGE = {"patch_size": 14, "merge_size": 2, "min_pixels": 784, "max_pixels": 200704}
GRAPH = ModelGraph.from_dict(
    {"units": {"vision": {"role": "encoder", **SHAPE, "image": IMAGE}, "llm": {"role": "backbone", **SHAPE}}}
)
TOKENIZER = ByteTokenizer()
PEERS = {"energon": "megatron-energon", "torchdata": "torchdata's nodes"}


def write_tars(folder: Path, *, num_samples: int, num_shards: int) -> None:
    """Write the tars and what `energon prepare` would write beside them, but for Energon's own index."""
    generator = np.random.default_rng(0)
    for shard in range(num_shards):
        with tarfile.open(folder / f"shard_{shard}.tar", "w") as tar:
            for number in range(shard, num_samples, num_shards):
                small = generator.integers(0, 256, (int(generator.integers(8, 20)), int(generator.integers(8, 20)), 3), np.uint8)
                image = Image.fromarray(small).resize((small.shape[1] * 24, small.shape[0] * 24), Image.Resampling.BICUBIC)
                image.save(encoded := io.BytesIO(), "JPEG")
                for kind, raw in (("jpg", encoded.getvalue()), ("txt", f"sample {number} ".encode() * 8)):
                    member = tarfile.TarInfo(f"{number:06}.{kind}")
                    member.size = len(raw)
                    tar.addfile(member, io.BytesIO(raw))


def write_small_tars(folder: Path, *, num_samples: int, num_shards: int) -> None:
    """Write tars with one small image again and again, and a caption of its own for each sample."""
    Image.new("L", (16, 16)).save(encoded := io.BytesIO(), "JPEG")
    for shard in range(num_shards):
        with tarfile.open(folder / f"shard_{shard}.tar", "w") as tar:
            for number in range(shard, num_samples, num_shards):
                for kind, raw in (("jpg", encoded.getvalue()), ("txt", f"sample {number} ".encode() * 8)):
                    member = tarfile.TarInfo(f"{number:06}.{kind}")
                    member.size = len(raw)
                    tar.addfile(member, io.BytesIO(raw))


def made(image: Image.Image, text: str) -> tuple[int, int]:
    """Make the patches and tokens of a sample, and return how many there are."""
    graph_input = GRAPH.unit("vision").image
    assert isinstance(graph_input, ImageInput)
    return len(image_to_patches(image.convert("RGB"), image_input=graph_input).patches), len(TOKENIZER.encode(text))


class _Made(torch.utils.data.Dataset[tuple[int, int]]):
    """Braid's samples in the order of a training."""

    def __init__(self, source: ManifestSource) -> None:
        self._source = source
        self._batches = GlobalBatches((DataPart(len(source)),), 1, seed=1)

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, step: int) -> tuple[int, int]:
        (drawn,) = self._batches.batch(step)
        return len(self._source.item(drawn.source_index, 0).patches), len(self._source.text(drawn.source_index).token_ids)


def open_source(folder: Path) -> ManifestSource:
    """Open Braid's source, and index it if it has no index."""
    files, options = open_sample_files(folder), IndexOptions(4096)
    return ManifestSource(files, graph=GRAPH, tokenizer=TOKENIZER, options=options, cache=IndexCache("bytes"))


def braid(folder: Path, workers: int) -> Iterable[Any]:
    """Yield batches of Braid's."""
    return torch.utils.data.DataLoader(_Made(open_source(folder)), batch_size=BATCH, num_workers=workers, collate_fn=list)


def energon(folder: Path, workers: int) -> Iterable[Any]:
    """Yield batches of Energon's loader, of one pass."""
    from megatron.energon import DefaultTaskEncoder, SampleDecoder, WorkerConfig, get_loader, get_train_dataset

    class Encoder(DefaultTaskEncoder):  # type: ignore[misc]
        decoder = SampleDecoder(image_decode="pil")

        def encode_sample(self, sample: Any) -> Any:
            return made(sample.image, sample.caption)

        def batch(self, samples: list[Any]) -> Any:
            return samples

    how = WorkerConfig(rank=0, world_size=1, num_workers=workers)
    data = get_train_dataset(
        folder,
        batch_size=BATCH,
        shuffle_buffer_size=100,
        max_samples_per_sequence=100,
        worker_config=how,
        task_encoder=Encoder(),
        repeat=False,
    )
    return get_loader(data)


def _decoded(sample: Any) -> tuple[int, int]:
    return made(Image.open(io.BytesIO(sample["jpg"])), sample["txt"].decode())


def torchdata(folder: Path, workers: int) -> Iterable[Any]:
    """Yield batches of torchdata's nodes over webdataset's reader."""
    import torchdata.nodes as nodes
    import webdataset

    tars = webdataset.WebDataset([str(path) for path in sorted(folder.glob("*.tar"))], shardshuffle=False).shuffle(100)
    mapped = nodes.ParallelMapper(nodes.IterableWrapper(tars), _decoded, num_workers=workers, method="process")
    return nodes.Loader(nodes.Batcher(mapped, batch_size=BATCH, drop_last=False))


def prepare_for_energon(folder: Path) -> None:
    """Write what `energon prepare` writes."""
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors import BaseWebdatasetFactory

    names = [path.name for path in sorted(folder.glob("*.tar"))]
    BaseWebdatasetFactory.prepare_dataset(EPath(str(folder)), names, split_parts_ratio=[("train", 1.0)], workers=2)
    (folder / ".nv-meta" / "dataset.yaml").write_text(
        "sample_type: {__module__: megatron.energon, __class__: CaptioningSample}\nfield_map: {image: jpg, caption: txt}\n"
    )


def measure(batches: Callable[[], Iterable[Any]], *, num_samples: int) -> dict[str, float]:
    """Return the seconds to the first batch, the samples per second behind it, and the processor time of all."""
    start, used = time.perf_counter(), _processor_seconds()
    passing: Iterator[Any] = iter(batches())
    seen = len(next(passing))
    first = time.perf_counter()
    rest = sum(len(batch) for batch in passing)
    assert seen + rest == num_samples, (seen, rest)
    rate = rest / (time.perf_counter() - first)
    del passing
    gc.collect()  # ends workers, whose time then counts
    spent = 1000 * (_processor_seconds() - used) / num_samples
    return {"seconds to first batch": first - start, "samples per second": rate, "processor ms per sample": spent}


def _processor_seconds(*whose: int) -> float:
    """Return the processor seconds of these (`resource.RUSAGE_...`); by default of this process and its ended children."""
    used = map(resource.getrusage, whose or (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def write_rows(folder: Path, num_rows: int) -> None:
    """Write an index of so many samples without tokens: files with holes in them."""
    from multimodal.data.index.sample_index import _ARRAYS, _SUMMARY, _num_bytes

    of_samples = ("is_cut", "loss_weights", "token_starts", "item_starts", "place_starts")
    rows = {name: num_rows * (name in of_samples) + name.endswith("_starts") for name in _ARRAYS}
    write_index(lambda done: (build_index(()),), folder)
    for name, of_array in rows.items():
        os.truncate(folder / name, _num_bytes(name, of_array))
    summary = json.loads((folder / _SUMMARY).read_text())
    (folder / _SUMMARY).write_text(json.dumps({**summary, "num_rows": rows}))


def measure_rows(folder: Path, num_rows: int) -> dict[str, float]:
    """Open an index of so many samples without tokens, and draw a global batch of its training samples."""
    write_rows(folder, num_rows)
    before, start = _resident_mb(), time.perf_counter()
    index = read_index(folder)
    assert index is not None
    train = split_indices(len(index), split="969,30,1", seed=1).train
    opened = time.perf_counter()
    for drawn in GlobalBatches((DataPart(len(train)),), 512, seed=1).batch(0):
        index.conversation(train[drawn.source_index])
    return {
        "rows": num_rows,
        "seconds to open": opened - start,
        "seconds to draw": time.perf_counter() - opened,
        "mb": _resident_mb() - before,
    }


def _resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def measure_indexing(work: Callable[[], object]) -> dict[str, float]:
    """Do this in another process; returns its seconds, and the processor seconds and the most memory of it and its children."""
    process = multiprocessing.get_context("fork").Process(target=work)
    start, used, most = time.perf_counter(), _processor_seconds(resource.RUSAGE_CHILDREN), 0.0
    process.start()
    while process.is_alive():
        most = max(most, sum(map(_private_mb, _with_children(str(process.pid)))))
        process.join(0.05)
    if process.exitcode:
        raise SystemExit("it failed; its message is above")
    spent = _processor_seconds(resource.RUSAGE_CHILDREN) - used  # not what looking at their memory takes
    return {"seconds": time.perf_counter() - start, "processor seconds": spent, "MB": most}


def _with_children(pid: str) -> list[str]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has ended
        return []
    return [pid, *(each for child in children for each in _with_children(child))]


def _private_mb(pid: str) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1e3


Measured = dict[str, dict[str, list[float]]]
"""Side -> what was measured -> its value in every round."""


def is_installed(side: str) -> bool:
    """Return whether a side is; prints that it is left out if not."""
    try:
        __import__({"energon": "megatron.energon", "torchdata": "torchdata.nodes"}[side])
    except ImportError as problem:
        print(f"{side} is left out: {problem}", file=sys.stderr)
        return False
    return True


def _record(found: Measured, side: str, values: Mapping[str, float]) -> None:
    for what, value in values.items():
        found.setdefault(side, {}).setdefault(what, []).append(value)


def compare_indexing(num_samples: int, num_shards: int, *, num_rounds: int) -> Measured:
    """Return what indexing takes, opening the index, and Energon's preparation if it is installed."""
    found: Measured = {}
    with_energon = is_installed("energon")
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base)
        write_small_tars(folder, num_samples=num_samples, num_shards=num_shards)
        for _ in range(num_rounds):
            for side in ("braid", "braid, each start"):
                _record(found, side, measure_indexing(partial(open_source, folder)))
            shutil.rmtree(folder / FOLDER_NAME)
            if with_energon:
                _record(found, "energon", measure_indexing(partial(prepare_for_energon, folder)))
                shutil.rmtree(folder / ".nv-meta")
    return found


def compare_loading(folder: Path, *, num_samples: int, num_workers: int, num_rounds: int) -> Measured:
    """Return what loading the tars takes, of every side that is installed."""
    sides: dict[str, Callable[[Path, int], Iterable[Any]]] = {"braid, no index": braid, "braid": braid}
    sides |= {name: side for name, side in (("energon", energon), ("torchdata", torchdata)) if is_installed(name)}
    if "energon" in sides:
        prepare_for_energon(folder)
    found: Measured = {}
    for _ in range(num_rounds):
        shutil.rmtree(folder / FOLDER_NAME, ignore_errors=True)
        for name, side in sides.items():
            _record(found, name, measure(partial(side, folder, num_workers), num_samples=num_samples))
    return found


def show(found: Measured, compared: Mapping[tuple[str, str], str], *, suffix: str = "") -> None:
    """Print medians of all sides, and the lines of what is compared: (side of Braid, what was measured) -> work."""
    for name, each in found.items():
        print(f"{name}: {', '.join(f'{median(values):.3g} {what}' for what, values in each.items())}")
    for peer in (peer for peer in PEERS if peer in found):
        for (side, what), work in compared.items():
            print_rows({work: compare(found[side][what], found[peer][what])}, peer=f"{PEERS[peer]}{suffix}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("samples", 2000), ("shards", 4), ("workers", 2), ("rounds", 3), ("rows", 10_000_000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--index", type=int, default=0, metavar="N")
    parser.add_argument("--side", type=Path)
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    if flags.side:
        sys.path.append(str(flags.side))
        os.environ["PYTHONPATH"] = f"{os.environ.get('PYTHONPATH', '')}:{flags.side}"
    if flags.index:
        found = compare_indexing(flags.index, flags.shards, num_rounds=flags.rounds)
        if flags.json:
            print(json.dumps({"sides": found, "load": os.getloadavg()[0]}))
            return
        work = f"indexing {flags.index:,} small samples of tars"
        show(found, {("braid", each): f"{work}: {each}" for each in ("processor seconds", "MB")}, suffix="'s preparation")
        return
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base) / "set"
        folder.mkdir()
        write_tars(folder, num_samples=flags.samples, num_shards=flags.shards)
        found = compare_loading(folder, num_samples=flags.samples, num_workers=flags.workers, num_rounds=flags.rounds)
        rows = measure_rows(Path(base) / "index", flags.rows)
    if flags.json:
        print(json.dumps({"sides": found, "index": rows, "load": os.getloadavg()[0]}))
        return
    of_sample = ("braid", "processor ms per sample"), f"a decoded sample of tars, {flags.workers} workers: processor time"
    show(found, dict([of_sample, (("braid", "seconds to first batch"), "the same: seconds to the first batch")]))
    took = f"{rows['seconds to open']:.3f} s to open it, {rows['seconds to draw']:.2f} s to the first batch of 512"
    print(f"an index of {rows['rows']:,} samples: {took}, {rows['mb']:.0f} MB")


if __name__ == "__main__":
    main()

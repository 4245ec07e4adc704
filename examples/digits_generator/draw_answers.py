"""Draws the answers of a model trained by examples/digits_generator to validation questions, beside right answers.

python examples/digits_generator/draw_answers.py --load CHECKPOINTS [--output FILE.png] [--seed N]

Rows: one right answer (the same digits in other handwriting would be right, too), the mean of all training glyphs of those digits
(the best answer by squared error), and the model's answer. Runs on this process alone, under any plan that the checkpoint was
saved with.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from examples.digits.handwritten_digits import DigitsToDrawSource, glyph_pool, load_handwritten_digits
from megatron.runtime import platform
from megatron.runtime.checkpoint.checkpoint import load_checkpoint
from megatron.runtime.feed.step_inputs import load_inputs
from megatron.runtime.session import Session, SessionOptions
from megatron.runtime.step.step import Step
from multimodal.data.tokenizer import ByteTokenizer
from multimodal.model.transformer_config import BuildOptions
from multimodal.values.assignment import Assignment, Atom, MicrobatchPlace
from multimodal.values.model_graph import ImageInput, ModelGraph
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan

ROOT = Path(__file__).resolve().parents[2]
NUM_SAMPLES = 8
VOCABULARY_MULTIPLE = 128
"""The default of --make-vocab-size-divisible-by."""
Picture = npt.NDArray[np.floating]


def main() -> None:
    """Parse the command line, load, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--load", type=Path, required=True, metavar="DIR", help="folder that holds the checkpoints")
    parser.add_argument("--output", type=Path, default=Path("digits_drawn.png"), help="(digits_drawn.png)")
    parser.add_argument("--seed", type=int, default=1234)
    arguments = parser.parse_args()
    graph = ModelGraph.from_file(ROOT / "examples" / "digits_generator" / "model.yaml")
    (painter,) = graph.generators
    assert painter.image is not None
    source = DigitsToDrawSource(
        NUM_SAMPLES,
        seed=arguments.seed,
        split="valid",
        unit=painter.name,
        image=painter.image,
        tokenizer=ByteTokenizer(),
        seq_length=128,
    )
    platform.install()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=FileStore(str(Path(folder) / "store"), 1), rank=0, world_size=1)
        drawn = draw_answers(load_model(graph, arguments.load), graph, source)
        dist.destroy_process_group()
    wanted = [
        join_patches(source.item(index, 0).patches.astype(np.float32), source.item_grid(index, 0), painter.image)
        for index in range(len(source))
    ]
    means = [mean_answer(source.question(index)) for index in range(len(source))]
    questions = ["".join(map(str, source.question(index))) for index in range(len(source))]
    draw_rows(questions, {"an answer": wanted, "their mean": means, "the model": drawn}, output=arguments.output)


def whole_plan(graph: ModelGraph) -> Plan:
    """Return a plan with every unit whole on this process."""
    return Plan({unit.name: UnitPlan((Replica((Stage((0,), ((0, len(unit.layers)),)),)),)) for unit in graph.units})


def load_model(graph: ModelGraph, folder: Path) -> Session:
    """Return the model with the newest checkpoint's parameters; raises CheckpointError."""
    vocab_size = -(-ByteTokenizer().vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    session = Session(SessionOptions(graph, BuildOptions(), vocab_size), plan=whole_plan(graph))
    load_checkpoint(folder, session=session, load_optimizer=False, load_rng=False)
    return session


@torch.no_grad()
def draw_answers(session: Session, graph: ModelGraph, source: DigitsToDrawSource) -> list[Picture]:
    """Return the generator's image for each question, given the LLM's hidden states."""
    (painter,), backbone = graph.generators, graph.backbone.name
    samples = ((tuple(Atom(index) for index in range(len(source))),),)
    assignment = Assignment({**{unit.name: ((),) for unit in graph.encoders}, backbone: samples, painter.name: samples})
    step = Step(session.schedules(forward_only=True).schedule(assignment), assignment, lengths={}, inputs={})
    inputs, _ = load_inputs(source, step, rank=0, source_index={index: index for index in range(len(source))})
    llm, generator = (session.stages[name, 0].eval() for name in (backbone, painter.name))
    conditions = llm(None, inputs[MicrobatchPlace(backbone, 0, 0)][0]).conditions
    (batch,) = inputs[MicrobatchPlace(painter.name, 0, 0)]
    patches = generator(None, batch, conditions).predicted.split(batch.lengths)
    assert painter.image is not None
    return [join_patches(image.numpy(), source.item_grid(index, 0), painter.image) for index, image in enumerate(patches)]


def join_patches(patches: Picture, grid: tuple[int, int], image: ImageInput) -> Picture:
    """Return the first channel as [height, width], from 0 (paper) to 1; merge_size is 1."""
    size = image.patch_size
    cut = patches.reshape(*grid, image.in_channels, size, size)[:, :, 0]
    return (cut.transpose(0, 2, 1, 3).reshape(grid[0] * size, grid[1] * size) + 1) / 2


def mean_answer(digits: tuple[int, ...]) -> Picture:
    """Return the mean of the training glyphs of each digit, side by side."""
    glyphs, pool = load_handwritten_digits(), glyph_pool("train")
    return np.hstack([glyphs.ink[pool[glyphs.digits[pool] == digit]].mean(axis=0) for digit in digits])


def draw_rows(questions: list[str], rows: dict[str, list[Picture]], *, output: Path) -> None:
    """Draw one column per question."""
    figure, grid = plt.subplots(len(rows), len(questions), figsize=(9, 2.9), dpi=110, squeeze=False)
    for row, (name, pictures) in enumerate(rows.items()):
        for axes, picture, question in zip(grid[row], pictures, questions, strict=True):
            axes.imshow(picture, cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            if row == 0:
                axes.set_title(f"draw {question}", fontsize=9)
        grid[row][0].set_ylabel(name, fontsize=9)
    figure.tight_layout()
    figure.savefig(output)


if __name__ == "__main__":
    main()

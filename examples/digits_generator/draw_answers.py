"""Asks a model trained by examples/digits_generator for numbers and sums, and has a classifier read what it draws.

python examples/digits_generator/draw_answers.py --load CHECKPOINTS [--num N] [--sums] [--guidance-scale G] [--output FILE.png]

The classifier is scikit-learn's support vector machine, trained on the handwritten digits that the model was trained on, too; of
those that nobody was trained on it reads all but two of 300. The figure shows real handwriting, or the pictures to
add, above what the model drew.
"""

import argparse
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
from PIL import Image
from sklearn.svm import SVC

from examples.digits.handwritten_digits import (
    MAX_DIGITS_TO_DRAW,
    QUESTION,
    glyph_pool,
    load_handwritten_digits,
    render_ink,
)
from examples.digits_generator.sums import QUESTION as SUM_QUESTION
from examples.digits_generator.sums import DigitsToAddSource
from megatron.runtime.generation.drawing import make_item
from megatron.runtime.generation.whole_model import OpenedModel, open_model
from multimodal.data.tokenizer import ByteTokenizer
from multimodal.values.model_graph import ModelGraph

SIDE = 8
"""Pixels of a digit."""
Picture = npt.NDArray[np.floating]


class Request(NamedTuple):
    """A request to draw, and its right answer."""

    prompt: str
    answer: str
    shown: list[Picture]
    """Pictures before the prompt."""


def main() -> None:
    """Parse the command line, draw, read, and show the first ones."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--load", type=Path, required=True, metavar="DIR", help="folder that holds the checkpoints")
    parser.add_argument("--num", type=int, default=60, metavar="N", help="numbers of one to three digits to ask for (60)")
    parser.add_argument("--sums", action="store_true", help="ask for as many sums, too, of a model that sums.yaml trained")
    parser.add_argument("--num-steps", type=int, default=30, metavar="N", help="steps from noise to a drawing (30)")
    parser.add_argument("--guidance-scale", type=float, default=2.0, metavar="G", help="weight of the question (2)")
    parser.add_argument("--seed", type=int, default=1234, help="of numbers and noise (1234)")
    parser.add_argument("--output", type=Path, default=Path("digits_drawn.png"), help="(digits_drawn.png)")
    arguments = parser.parse_args()
    random = np.random.default_rng(arguments.seed)
    numbers = ["".join(map(str, random.integers(10, size=1 + index % MAX_DIGITS_TO_DRAW))) for index in range(arguments.num)]
    asked = {"numbers": [Request(QUESTION + number, number, []) for number in numbers]}
    options = {"num_steps": arguments.num_steps, "guidance_scale": arguments.guidance_scale}
    with open_model(arguments.load) as model:
        if arguments.sums:
            asked["sums"] = held_out_sums(model[0].graph, arguments.num)
        drawn = {
            name: [draw(model, request, seed=arguments.seed + index, **options) for index, request in enumerate(requests)]
            for name, requests in asked.items()
        }
    for name, requests in asked.items():
        read, answers = read_digits(drawn[name]), [request.answer for request in requests]
        num_right = sum(text == answer for text, answer in zip(read, answers, strict=True))
        digits_right = np.mean([one == other for one, other in zip("".join(read), "".join(answers), strict=True)])
        print(f"{num_right} of {len(answers)} {name} are read as asked for ({digits_right:.1%} of their digits; by chance 10%)")
    shown = [
        (request, picture)
        for name in asked
        for request, picture in zip(asked[name][: 9 // len(asked)], drawn[name], strict=False)
    ]
    given = [
        np.hstack([picture[:, :SIDE] for picture in request.shown]) if request.shown else real_number(request.answer, random)
        for request, _ in shown
    ]
    rows = {"given" if arguments.sums else "real": given, "the model": [picture for _, picture in shown]}
    draw_rows([request.prompt for request, _ in shown], rows, output=arguments.output)


def draw(model: OpenedModel, request: Request, **options: Any) -> Picture:
    """Return what the model draws, from 0 (paper) to 1."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{place}.png" for place in range(len(request.shown))]
        for path, picture in zip(paths, request.shown, strict=True):
            Image.fromarray((255 * picture).round().astype(np.uint8)).save(path)
        made = make_item(model, request.prompt, images=paths, size=(SIDE * len(request.answer), SIDE), **options)
    return np.asarray(made, dtype=np.float64) / 255


def held_out_sums(graph: ModelGraph, num: int) -> list[Request]:
    """Return requests for sums of held-out digits."""
    encoder, painter = graph.unit("vision"), graph.unit("painter")
    given: dict[str, Any] = {"seed": 1234, "seq_length": 128, "tokenizer": ByteTokenizer(), "split": "valid"}
    given |= {"encoder": encoder, "count_outputs": encoder.num_output_tokens, "unit": painter.name, "image": painter.image}
    source, render = DigitsToAddSource(num, **given), partial(render_ink, glyphs=load_handwritten_digits())
    samples = [source.sample(index) for index in range(num)]
    return [Request(SUM_QUESTION, sample.answer, [*map(render, sample.pictures[:2])]) for sample in samples]


def read_digits(pictures: list[Picture]) -> list[str]:
    """Return what the classifier reads in pictures of [8, 8 x digits]."""
    glyphs, pool = load_handwritten_digits(), glyph_pool("train")
    classifier = SVC(gamma="scale").fit(glyphs.ink[pool].reshape(len(pool), -1), glyphs.digits[pool])
    cut = [[part.ravel() for part in np.split(picture, picture.shape[1] // SIDE, 1)] for picture in pictures]
    return ["".join(map(str, classifier.predict(parts))) for parts in cut]


def real_number(number: str, random: np.random.Generator) -> Picture:
    """Return held-out handwriting of a number."""
    glyphs, pool = load_handwritten_digits(), glyph_pool("valid")
    return np.hstack([glyphs.ink[random.choice(pool[glyphs.digits[pool] == int(digit)])] for digit in number])


def draw_rows(titles: list[str], rows: dict[str, list[Picture]], *, output: Path) -> None:
    """Draw one column per title."""
    figure, grid = plt.subplots(len(rows), len(titles), figsize=(9, 2.0), dpi=110, squeeze=False)
    for row, (name, pictures) in enumerate(rows.items()):
        for axes, picture, title in zip(grid[row], pictures, titles, strict=True):
            axes.imshow(picture, cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            if row == 0:
                axes.set_title(title, fontsize=9)
        grid[row][0].set_ylabel(name, fontsize=9)
    figure.tight_layout()
    figure.savefig(output)


if __name__ == "__main__":
    main()

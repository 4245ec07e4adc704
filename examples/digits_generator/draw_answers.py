"""Asks a model trained by examples/digits_generator for numbers and has a classifier read what it draws.

python examples/digits_generator/draw_answers.py --load CHECKPOINTS [--num N] [--guidance-scale G] [--output FILE.png]

The classifier is scikit-learn's support vector machine, trained on the handwritten digits that the model was trained on, too; of
those that nobody was trained on it reads all but two of 300. The picture has a row of real handwriting above what the model drew.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
from sklearn.svm import SVC

from examples.digits.handwritten_digits import MAX_DIGITS_TO_DRAW, QUESTION, glyph_pool, load_handwritten_digits
from megatron.runtime.generation.drawing import make_item
from megatron.runtime.generation.whole_model import open_model

SIDE = 8
"""Pixels of a digit."""
Picture = npt.NDArray[np.floating]


def main() -> None:
    """Parse the command line, draw, read, and show the first ones."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--load", type=Path, required=True, metavar="DIR", help="folder that holds the checkpoints")
    parser.add_argument("--num", type=int, default=60, metavar="N", help="numbers of one to three digits to ask for (60)")
    parser.add_argument("--num-steps", type=int, default=30, metavar="N", help="steps from noise to a drawing (30)")
    parser.add_argument("--guidance-scale", type=float, default=2.0, metavar="G", help="weight of the question (2)")
    parser.add_argument("--seed", type=int, default=1234, help="of numbers and noise (1234)")
    parser.add_argument("--output", type=Path, default=Path("digits_drawn.png"), help="(digits_drawn.png)")
    arguments = parser.parse_args()
    random = np.random.default_rng(arguments.seed)
    numbers = ["".join(map(str, random.integers(10, size=1 + index % MAX_DIGITS_TO_DRAW))) for index in range(arguments.num)]
    options = {"num_steps": arguments.num_steps, "guidance_scale": arguments.guidance_scale}
    with open_model(arguments.load) as model:
        drawn = [
            np.asarray(
                make_item(model, QUESTION + number, size=(SIDE * len(number), SIDE), seed=arguments.seed + index, **options),
                dtype=np.float64,
            )
            / 255
            for index, number in enumerate(numbers)
        ]
    read = read_digits(drawn)
    num_right = sum(text == number for text, number in zip(read, numbers, strict=True))
    digits_right = np.mean([one == other for one, other in zip("".join(read), "".join(numbers), strict=True)])
    print(f"{num_right} of {len(numbers)} numbers are read as asked for ({digits_right:.1%} of their digits; by chance 10%)")
    shown = slice(0, 9)
    draw_rows(
        [f"draw {number}" for number in numbers[shown]],
        {"real": [real_number(number, random) for number in numbers[shown]], "the model": drawn[shown]},
        output=arguments.output,
    )


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

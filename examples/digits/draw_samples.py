"""Draws six validation samples of the digits data, with question and answer, into docs/figures/digits_samples.png.

python examples/digits/draw_samples.py [--output FILE.png] [--seed N]
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt

from examples.digits.handwritten_digits import QUESTIONS, DigitsSample, DigitsSource, load_handwritten_digits, render_ink
from multimodal.data.tokenizer import ByteTokenizer
from multimodal.values.model_graph import ModelGraph

ROOT = Path(__file__).resolve().parents[2]
NUM_SAMPLES = 6
GAP_PIXELS = 4


def main() -> None:
    """Parse the command line and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "figures" / "digits_samples.png")
    parser.add_argument("--seed", type=int, default=1234)
    arguments = parser.parse_args()
    (vision,) = ModelGraph.from_file(ROOT / "examples" / "digits" / "model.yaml").encoders
    assert vision.image is not None
    source = DigitsSource(
        100, seed=arguments.seed, split="valid", unit=vision.name, image=vision.image, tokenizer=ByteTokenizer(), seq_length=1024
    )
    draw_samples(choose_samples([source.sample(index) for index in range(len(source))]), output=arguments.output)


def choose_samples(samples: list[DigitsSample]) -> list[DigitsSample]:
    """Return one sample with one picture and one with two for each kind of question: those with the median number of digits."""
    chosen = []
    for kind in QUESTIONS:
        for num_pictures in (1, 2):
            alike = [sample for sample in samples if sample.kind == kind and len(sample.pictures) == num_pictures]
            chosen.append(sorted(alike, key=num_digits)[len(alike) // 2])
    return chosen


def num_digits(sample: DigitsSample) -> int:
    """Return the number of digits in all pictures of a sample."""
    return sum(len(picture.glyphs) for picture in sample.pictures)


def draw_samples(samples: list[DigitsSample], *, output: Path) -> None:
    """Draw the samples in two rows, all at the same scale, the pictures white on grey."""
    canvases = [picture_row(sample) for sample in samples]
    height, width = (max(canvas.shape[axis] for canvas in canvases) for axis in (0, 1))
    figure, grid = plt.subplots(2, NUM_SAMPLES // 2, figsize=(9, 2.6), dpi=110, facecolor="0.88")
    for axes, sample, canvas in zip(grid.T.flat, samples, canvases, strict=True):
        axes.imshow(canvas, cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
        axes.set_xlim(-1, width)
        axes.set_ylim(height, -1)
        axes.set_title(f"{QUESTIONS[sample.kind]}:  {sample.answer}", fontsize=10, loc="left")
        axes.axis("off")
    figure.tight_layout()
    figure.savefig(output)


def picture_row(sample: DigitsSample) -> npt.NDArray[np.float32]:
    """Return the pictures of a sample side by side: [height, width], 0 (paper) to 1, NaN around the pictures."""
    inks = [render_ink(picture, glyphs=load_handwritten_digits()) for picture in sample.pictures]
    height = max(ink.shape[0] for ink in inks)
    width = sum(ink.shape[1] for ink in inks) + GAP_PIXELS * (len(inks) - 1)
    canvas, left = np.full((height, width), np.nan, dtype=np.float32), 0
    for ink in inks:
        canvas[: ink.shape[0], left : left + ink.shape[1]] = ink
        left += ink.shape[1] + GAP_PIXELS
    return canvas


if __name__ == "__main__":
    main()

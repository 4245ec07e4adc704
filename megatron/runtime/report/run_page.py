"""The page of a run, `index.html` in --report-dir: run_page.html with matplotlib's pictures inside, which needs no network."""

import base64
from collections.abc import Mapping, Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from jinja2 import Template
    from matplotlib.axes import Axes

TIMELINE_PAGE = "timeline.html"
_COLOURS = ("#1f4e8c", "#a85a17", "#256c43", "#66418a")


class _StepNumbers(NamedTuple):
    number: int
    loss: float
    tokens_per_second: float
    mfu: float
    busiest: Mapping[str, tuple[float, float]]
    """Unit -> the busiest microbatch over the mean before balancing and after."""


class RunPage:
    """Collects what a run reports, in the form of its JSON log, and writes the page."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.description = ""
        """Units, ranks, schedule: in a few lines."""
        self._settings = settings
        self._steps: list[_StepNumbers] = []
        self._evaluations: list[Mapping[str, Any]] = []
        self._samples: Mapping[str, Any] = {}

    def add(self, entry: Mapping[str, Any]) -> None:
        """Add an entry of the log: a step, an evaluation, or answers, of which the last are shown."""
        if "samples" in entry:
            self._samples = entry
        elif "evaluation" in entry:
            self._evaluations.append(entry)
        else:
            key = "busiest_microbatch_over_mean"
            units = entry.get("imbalance", {})
            busiest = {unit: (both["before_balancing"][key], both["after_balancing"][key]) for unit, both in units.items()}
            speed, mfu = (entry.get(name, float("nan")) for name in ("tokens_per_second", "mfu"))
            self._steps.append(_StepNumbers(entry["step"], entry["loss"], speed, mfu, busiest))

    def write(self, folder: Path) -> None:
        """Write loss.png and index.html, with the timeline.png that is there; nothing without a step."""
        if not self._steps:
            return
        (folder / "loss.png").write_bytes(loss := self._draw_loss())
        last, timeline = self._steps[-1], folder / "timeline.png"
        answers = []
        for each in self._samples.get("samples", ()):
            made = folder / (each.get("image") or each.get("sound") or "none")
            answers.append({**each, "made": _inside(made.read_bytes()) if made.is_file() else ""})
        page = _template().render(
            title=f"Braid: {last.number} steps, loss {last.loss:.4f}",
            loss=_inside(loss),
            throughput=_inside(self._draw_throughput()),
            balance=_inside(self._draw_balance()) if last.busiest else "",
            timeline=_inside(timeline.read_bytes()) if timeline.is_file() else "",
            timeline_page=TIMELINE_PAGE,
            results=("loss", "token_accuracy", "answer_accuracy"),
            evaluations=self._evaluations,
            step_of_answers=self._samples.get("step"),
            answers=answers,
            description=self.description,
            settings=self._settings,
        )
        (folder / "index.html").write_text(page, encoding="utf-8")

    def _draw_loss(self) -> bytes:
        figure, axes = _figure("Training loss", "loss per target token")
        self._plot(axes, [each.loss for each in self._steps], _COLOURS[0], label="")
        return _png(figure)

    def _draw_throughput(self) -> bytes:
        figure, axes = _figure("Throughput", "tokens/s")
        self._plot(axes, [each.tokens_per_second for each in self._steps], _COLOURS[0], label="")
        axes.yaxis.label.set_color(_COLOURS[0])
        right = axes.twinx()
        self._plot(right, [each.mfu for each in self._steps], _COLOURS[1], label="")
        right.set_ylabel("MFU", color=_COLOURS[1])
        right.spines["top"].set_visible(False)
        return _png(figure)

    def _draw_balance(self) -> bytes:
        figure, axes = _figure("Balance: work of the busiest microbatch", "times the mean")
        for index, unit in enumerate(self._steps[-1].busiest):
            both = [each.busiest.get(unit, (float("nan"),) * 2) for each in self._steps]
            colour = _COLOURS[index % len(_COLOURS)]
            self._plot(axes, [before for before, _ in both], colour, label=f"{unit}, before balancing", linestyle=":")
            self._plot(axes, [after for _, after in both], colour, label=f"{unit}, after")
        axes.legend(frameon=False)
        return _png(figure)

    def _plot(self, axes: "Axes", values: Sequence[float], colour: str, *, label: str, linestyle: str = "-") -> None:
        """Plot values by step, faintly, and their running mean."""
        numbers, width = [each.number for each in self._steps], max(1, len(values) // 40)
        sums = np.cumsum([0.0, *values])
        starts = np.maximum(np.arange(len(values)) + 1 - width, 0)
        means = (sums[1:] - sums[starts]) / (np.arange(len(values)) + 1 - starts)
        axes.plot(numbers, values, linewidth=0.5, color=colour, alpha=0.35)
        axes.plot(numbers, means, linewidth=1.8, color=colour, linestyle=linestyle, label=label)
        axes.set_ylim(bottom=0)


def _figure(title: str, ylabel: str) -> tuple[Any, "Axes"]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlabel="step", ylabel=ylabel, title=title)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _png(figure: Any) -> bytes:
    written = BytesIO()
    figure.savefig(written, dpi=110)
    return written.getvalue()


def _inside(file: bytes) -> str:
    """Return the address of a PNG or a WAV file that is inside the page."""
    kind = "audio/wav" if file.startswith(b"RIFF") else "image/png"
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


@cache
def _template() -> "Template":
    from jinja2 import Template  # only here, as few runs write a page

    return Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"), autoescape=True, trim_blocks=True)

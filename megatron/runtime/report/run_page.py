"""The page of a run, `index.html` in --report-dir: one file with matplotlib's pictures inside, which needs no network."""

import base64
from collections.abc import Mapping, Sequence
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TIMELINE_PAGE = "timeline.html"
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:72em;margin:2em auto;padding:0 1em;color:#222}"
    "img{max-width:100%}pre{white-space:pre-wrap;background:#f6f6f6;padding:1em}"
    "table{border-collapse:collapse}td img{min-height:4em;image-rendering:pixelated}"
    "td,th{padding:.2em 1em .2em 0;text-align:left;vertical-align:top;border-bottom:1px solid #ddd}"
)
_LINK = f'<p><a href="{TIMELINE_PAGE}">The predicted and the measured one, to zoom in</a> (a file of its own)</p>'
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
        figure, axes = _figure("Training loss", "loss per target token")
        self._plot(axes, [each.loss for each in self._steps], _COLOURS[0], label="")
        loss = _png(figure)
        (folder / "loss.png").write_bytes(loss)
        timeline = folder / "timeline.png"
        evaluated = [
            [str(each["step"]), each["evaluation"], *(f"{each[name]:.4f}" if name in each else "" for name in _RESULTS)]
            for each in self._evaluations
        ]
        answers: list[list[str | bytes]] = []
        for each in self._samples.get("samples", ()):
            made = folder / (each.get("image") or each.get("sound") or "none")
            answer = made.read_bytes() if made.is_file() else each["answer"]
            answers.append([each["asked"], answer, each["expected"]])
        settings = [[name, str(value)] for name, value in self._settings.items()]
        parts = {
            "Loss": _picture(loss),
            "Throughput": _picture(self._draw_throughput()),
            "Balance": _picture(self._draw_balance()) if self._steps[-1].busiest else "",
            "Timeline of the last measured step": f"{_picture(timeline.read_bytes())}{_LINK}" if timeline.is_file() else "",
            "Evaluations": _table(["step", "data", *_RESULTS], evaluated),
            f"Answers after step {self._samples.get('step')}": _table(["question", "answer", "expected"], answers),
            "Plan": f"<pre>{escape(self.description)}</pre>" if self.description else "",
            "Settings": f"<details><summary>all</summary>{_table(['setting', 'value'], settings)}</details>" if settings else "",
        }
        body = "".join(f"<h2>{escape(title)}</h2>{content}" for title, content in parts.items() if content)
        title = f"Braid: {self._steps[-1].number} steps, loss {self._steps[-1].loss:.4f}"
        head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        page = f'<!doctype html><html lang="en"><head>{head}</head><body><h1>{title}</h1>{body}</body></html>\n'
        (folder / "index.html").write_text(page, encoding="utf-8")

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


_RESULTS = ("loss", "token_accuracy", "answer_accuracy")


def _figure(title: str, ylabel: str) -> tuple[Any, "Axes"]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set(xlabel="step", ylabel=ylabel, title=title)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _png(figure: Any) -> bytes:
    written = BytesIO()
    figure.savefig(written, dpi=110)
    return written.getvalue()


def _picture(png: bytes) -> str:
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def _made(file: bytes) -> str:
    """Return a picture, or a clip to hear."""
    content = base64.b64encode(file).decode()
    return f'<audio controls src="data:audio/wav;base64,{content}"></audio>' if file.startswith(b"RIFF") else _picture(file)


def _table(names: Sequence[str], rows: Sequence[Sequence[str | bytes]]) -> str:
    """Return a table of texts and PNG or WAV files; empty without rows."""
    all_rows: list[tuple[str, Sequence[str | bytes]]] = [("th", names), *(("td", row) for row in rows)]
    shown = ((tag, [escape(cell) if isinstance(cell, str) else _made(cell) for cell in row]) for tag, row in all_rows)
    lines = ["".join(f"<{tag}>{cell}</{tag}>" for cell in cells) for tag, cells in shown]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>" if rows else ""

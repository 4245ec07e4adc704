"""Answers of the model in training (--sample-prompts), by a process on rank 0's CPU, so that nothing in the run changes."""

import base64
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from megatron.runtime.generation.answering import open_answering
from megatron.runtime.generation.drawing import Sound, made_in, make_of_sample, size_of
from megatron.runtime.generation.whole_model import open_model
from multimodal.values.errors import BraidError, DataError


class SampleAnswer(NamedTuple):
    """A question, the model's answer, and the one in the file."""

    asked: str
    answer: str
    expected: str
    file: bytes = b""
    """The answer of a generator: a PNG or WAV file; `answer` then says its size."""

    @property
    def kind(self) -> str:
        """The kind of that file: image or sound."""
        return "sound" if self.file.startswith(b"RIFF") else "image"


def answer_prompts(
    checkpoint: Path, prompts: Path, *, max_new_tokens: int, guidance_scale: float, timeout: timedelta
) -> list[SampleAnswer]:
    """Return a checkpoint's likeliest answers to the questions of a file; raises DataError if they are not there in time."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
    environ["OMP_NUM_THREADS"] = str(os.cpu_count() or 1)  # the other ranks wait
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "answers.json"
        options = (str(max_new_tokens), str(guidance_scale))
        command = [sys.executable, "-m", __name__, str(checkpoint), str(prompts), *options, str(output)]
        try:
            ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout.total_seconds())
        except subprocess.TimeoutExpired as problem:
            raise DataError(f"they took more than {timeout.total_seconds():.0f} s; ask fewer questions") from problem
        if not output.exists():
            *_, last = ended.stderr.strip().splitlines() or [f"the process ended with exit code {ended.returncode}"]
            raise DataError(last)
        found = json.loads(output.read_text())
        return [SampleAnswer(asked, answer, expected, base64.b64decode(file)) for asked, answer, expected, file in found]


def main(argv: Sequence[str]) -> None:
    """Write the answers to a file; the exit of a failure says why. argv: what `answer_prompts` gives the process."""
    checkpoint, prompts, max_new_tokens, guidance_scale, output = argv
    answers = []
    try:
        with open_model(checkpoint, is_hugging_face=False) as (session, model):
            answering = open_answering(session, model, Path(prompts))
            for index in range(len(answering.source)):
                asked = answering.asked(index).strip()
                units = made_in(answering, index)
                for unit in units:
                    made, file = make_of_sample(answering, index, unit, guidance_scale=float(guidance_scale)), io.BytesIO()
                    made.save(file, **({} if isinstance(made, Sound) else {"format": "PNG"}))
                    answers.append((asked, size_of(made), "", base64.b64encode(file.getvalue()).decode()))
                if not units:
                    answer = answering.answer(index, max_new_tokens=int(max_new_tokens))
                    answers.append((asked, answer, answering.expected(index), ""))
    except BraidError as problem:
        sys.exit(str(problem))
    Path(output).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1:])

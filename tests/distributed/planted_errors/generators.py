"""Errors that only a generator can meet."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from megatron.runtime.execution.running_step import RunningStep
from multimodal.model.layers.backbone_ends import LanguageHead
from multimodal.model.layers.generator_ends import GeneratorProjector
from tests.distributed.planted_errors.loss import scaled_loss


@contextmanager
def _conditions_of_other_images() -> Iterator[None]:
    """Every image is made from what the LLM said of another one of the microbatch."""
    original = GeneratorProjector.forward

    def projected(self: GeneratorProjector, conditions: torch.Tensor, rows: torch.Tensor, *args: Any) -> torch.Tensor:
        return original(self, conditions, len(conditions) - 1 - rows, *args)

    with patch.object(GeneratorProjector, "forward", projected):
        yield


@contextmanager
def _condition_a_token_late() -> Iterator[None]:
    """The LLM hands on the hidden state of the token behind the right one."""
    original = LanguageHead.forward

    def scored(self: LanguageHead, hidden: torch.Tensor, *, generator_rows: torch.Tensor | None, **kwargs: Any) -> Any:
        late = None if generator_rows is None else generator_rows + 1
        return original(self, hidden, generator_rows=late, **kwargs)

    with patch.object(LanguageHead, "forward", scored):
        yield


@contextmanager
def _no_gradient_from_generators() -> Iterator[None]:
    original = RunningStep.collect_output_gradient

    def collected(run: Any, action: Any, shape: torch.Size) -> torch.Tensor:
        gradient = original(run, action, shape)
        return torch.zeros_like(gradient) if action.unit == "llm" and run.stage(action.place).is_last else gradient

    with patch.object(RunningStep, "collect_output_gradient", collected):
        yield


def _generator_divided_by_target_tokens(run: Any, action: Any, loss: torch.Tensor) -> float:
    if action.unit == "llm":
        return 1.0
    num_values: int = run.step.num_generated_values[action.unit]
    return num_values / float(run.step.num_target_tokens)


ERRORS_OF_GENERATORS: Mapping[str, Callable[[], Any]] = {
    "an image is made for another one's words": _conditions_of_other_images,
    "an image is made from the token behind": _condition_a_token_late,
    "the LLM gets no gradient from its generator": _no_gradient_from_generators,
    "the images' loss is divided by target tokens": lambda: scaled_loss(_generator_divided_by_target_tokens),
}

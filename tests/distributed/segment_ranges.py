"""A stage run whole and in ranges of segments, with all that comes out of it: for tests that compare the two."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron.runtime.execution.activation_store import SavedTensors, storage_identity
from megatron.runtime.execution.segment_pass import SegmentPass
from multimodal.model.collectives import Arriving, RankLink
from multimodal.model.initialization import initialize_parameters
from multimodal.model.latents import NoisePath
from multimodal.model.layers.layer_kind import HeadOutput
from multimodal.model.stage_input import PackedInput
from multimodal.model.transformer_config import BuildOptions
from multimodal.model.unit_stage import UnitStage
from multimodal.values.model_graph import ModelGraph

SHAPE: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24}
TEXT = PackedInput(
    (4, 3),
    torch.tensor([0, 1, 2, 3, 0, 1, 2]),
    token_ids=torch.arange(7),
    item_rows=torch.tensor([1, 4]),
    target_rows=torch.tensor([1, 4]),
    targets=torch.tensor([3, 2]),
)
PATCHES = PackedInput((8,), torch.arange(16).reshape(8, 2), patches=torch.randn(8, 4, generator=torch.manual_seed(0)))
MADE = replace(
    PATCHES,
    condition_rows=torch.zeros(8, dtype=torch.long),
    path=NoisePath(torch.tensor([0.4]), torch.ones(1), torch.zeros(8, dtype=torch.long), torch.ones(8, 4)),
)
ITEMS = torch.randn(2, 16, generator=torch.manual_seed(1), dtype=torch.float64)


@dataclass(frozen=True)
class RangeCase:
    """A stage of layers `first` to `last` - 1 of a unit."""

    unit: str = "vision"
    first: int = 0
    last: int = 4
    transformer: Mapping[str, Any] | None = None
    sequence_parallel: bool = False
    recompute: str | None = None
    num_frozen: int = 0
    """Layers that are frozen, from the first."""
    has_backward: bool = True
    transformer_impl: str = "local"
    deepstack: tuple[int, ...] = ()
    """Layers of the encoder that go to the LLM."""


@cache
def _groups(world: dist.ProcessGroup) -> ProcessGroupCollection:
    alone = world if world.size() == 1 else dist.new_subgroups(1)[0]
    names = ("tp", "cp", "pp", "ep", "expt_tp", "tp_ep", "tp_cp")
    return ProcessGroupCollection(**{**dict.fromkeys(names, alone), "tp": world, "tp_cp": world})


def build_stage(case: RangeCase) -> UnitStage:
    image = {"patch_size": 2, "in_channels": 1, "deepstack_layers": list(case.deepstack)}
    shape = {**SHAPE, **(case.transformer or {})}
    units = {"vision": {"role": "encoder", "image": image, **shape}, "llm": {"role": "backbone", **shape}}
    units["painter"] = {"role": "generator", "image": {**image, "deepstack_layers": []}, "flow": {}, **shape}
    stage = UnitStage(
        graph=ModelGraph.from_dict({"units": units}),
        unit_name=case.unit,
        layers=range(case.first, case.last),
        groups=_groups(dist.group.WORLD),
        options=BuildOptions(
            torch.float64,
            recompute=case.recompute,
            sequence_parallel=case.sequence_parallel,
            transformer_impl=case.transformer_impl,
        ),
        vocab_size=32,
    )
    initialize_parameters(stage, seed=5)
    with torch.no_grad():
        for index, parameter in enumerate(stage.parameters()):
            if parameter.dim() == 1:  # as zeros and ones they would hide what adds or scales twice
                rank = dist.get_rank() if getattr(parameter, "tensor_model_parallel", False) else 0
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.manual_seed(100 * rank + index)))
    for index in range(case.first, case.first + case.num_frozen):
        stage.layers[str(index)].requires_grad_(False)
    return stage.train(case.has_backward)


def _inputs(stage: UnitStage, case: RangeCase) -> tuple[Tensor | None, PackedInput, Tensor | None]:
    given = ITEMS.repeat(1, 1 + len(case.deepstack))
    batch, items = {"vision": (PATCHES, None), "llm": (TEXT, given), "painter": (MADE, ITEMS[:1].clone())}[case.unit]
    if items is not None:
        items.requires_grad_(case.has_backward)
    hidden = None
    if not stage.is_first:
        shape = (stage.num_rows(batch.num_tokens), 1, stage.context.graph.width_behind(case.unit, case.first - 1))
        seed = dist.get_rank() if case.sequence_parallel else 0
        hidden = torch.randn(shape, generator=torch.manual_seed(seed), dtype=torch.float64)
        hidden.requires_grad_(case.has_backward and case.num_frozen == 0)
    return hidden, batch, items


def _close(output: Tensor | HeadOutput) -> tuple[Tensor | None, Tensor | None]:
    return (output.loss_sum / 3, output.conditions) if isinstance(output, HeadOutput) else (None, output)


def _gradient_of_output(stage: UnitStage, output: Tensor, case: RangeCase) -> Tensor:
    seed = 7 + (dist.get_rank() if case.sequence_parallel and not stage.is_last else 0)
    return torch.randn(output.shape, generator=torch.manual_seed(seed), dtype=torch.float64)


Found = dict[str, Tensor | None]


def run_whole(case: RangeCase) -> Found:
    """The stage in one piece, as a step runs it that is not cut."""
    stage = build_stage(case)
    hidden, batch, items = _inputs(stage, case)
    with torch.set_grad_enabled(case.has_backward):
        loss, output = _close(stage(hidden, batch, items))
        if loss is not None and loss.requires_grad:
            loss.backward()
        if output is not None and output.requires_grad:
            output.backward(_gradient_of_output(stage, output, case))
    return _found(stage, loss, output, hidden, items)


def collectives_waited_for(case: RangeCase) -> tuple[list[str], list[str]]:
    """The collectives of a whole stage in the order in which a forward and a backward come to wait for them."""
    stage = build_stage(case)
    hidden, batch, items = _inputs(stage, case)
    started: list[str] = []
    waited: tuple[list[str], list[str]] = ([], [])
    with pytest.MonkeyPatch.context() as patch:
        for name in ("start_gathering", "start_summing"):
            patch.setattr(RankLink, name, _noting(getattr(RankLink, name), started))
        with stage.waits.filled_by(lambda number: waited[0].append(f"{number} {started.pop(0)}")):
            loss, output = _close(stage(hidden, batch, items))
        roots = [each for each in (loss, output) if each is not None and each.requires_grad]
        with stage.waits.filled_by(lambda number: waited[1].append(f"{number} {started.pop(0)}")):
            torch.autograd.backward(roots, [torch.ones_like(each) for each in roots])
    assert not started
    return waited


def count_waits(case: RangeCase) -> tuple[int, int]:
    """The waits of a whole stage's forward and backward, whoever's layers report them."""
    stage = build_stage(case)
    waited: tuple[list[int], list[int]] = ([], [])
    with stage.waits.filled_by(waited[0].append):
        loss, output = _close(stage(*_inputs(stage, case)))
    roots = [each for each in (loss, output) if each is not None and each.requires_grad]
    with stage.waits.filled_by(waited[1].append):
        torch.autograd.backward(roots, [torch.ones_like(each) for each in roots])
    return len(waited[0]), len(waited[1])


def _noting(start: Callable[..., Arriving], started: list[str]) -> Callable[..., Arriving]:
    def noting(link: RankLink, tensor: Tensor) -> Arriving:
        arriving = start(link, tensor)
        started.extend([start.__name__.removeprefix("start_")] if arriving.works else [])
        return arriving

    return noting


def run_in_ranges(case: RangeCase, forward: list[int], backward: list[int]) -> Found:
    """The stage in pieces; forward, backward: the bounds between them, ascending."""
    stage = build_stage(case)
    hidden, batch, items = _inputs(stage, case)
    losses: list[Tensor | None] = []

    def close(output: Tensor | HeadOutput) -> tuple[Tensor | None, Tensor | None]:
        loss, given = _close(output)
        losses.append(loss)
        return loss, given

    running = SegmentPass(
        stage,
        stage.prepare(batch, items),
        bounds=[*forward, *backward],
        hidden=hidden,
        close=close,
        has_backward=case.has_backward,
        parameter_storages=frozenset(),
    )
    for end in (*forward, stage.segments().num_segments):
        running.forward(end)
    output = running.take_output()
    if case.has_backward:
        running.start_backward(None if output is None else _gradient_of_output(stage, output, case))
        for first in (*reversed(backward), 0):
            running.backward(first)
        assert running.size_bytes <= (0 if hidden is None else hidden.nbytes)
    return _found(stage, losses[0], output, hidden, items)


def sizes_of_pieces(case: RangeCase, bounds: list[int]) -> tuple[list[int], int]:
    """Bytes that a pass keeps after each piece, forward and back, and those that autograd keeps of the whole stage."""
    stage = build_stage(case)
    hidden, batch, items = _inputs(stage, case)
    parameters = frozenset(storage_identity(parameter) for parameter in stage.parameters())
    given = stage.prepare(batch, items)
    options: dict[str, Any] = {"has_backward": True, "close": _close, "hidden": hidden, "parameter_storages": parameters}
    running = SegmentPass(stage, given, bounds=bounds, **options)
    sizes = []
    for end in (*bounds, stage.segments().num_segments):
        running.forward(end)
        sizes.append(running.size_bytes)
    output = running.take_output()
    assert output is not None
    running.start_backward(torch.ones_like(output))
    del output
    for first in (*reversed(bounds), 0):
        running.backward(first)
        sizes.append(running.size_bytes)
    saved = SavedTensors(parameters)
    with saved:
        stage(hidden, batch, items)
    return sizes, saved.size_bytes


def _found(stage: UnitStage, loss: Tensor | None, output: Tensor | None, hidden: Tensor | None, items: Tensor | None) -> Found:
    outer = {"loss": loss, "output": output, "hidden": None if hidden is None else hidden.grad}
    outer = {**outer, "items": None if items is None else items.grad}
    return {
        **{name: None if tensor is None else tensor.detach() for name, tensor in outer.items()},
        **{name: parameter.grad for name, parameter in stage.named_parameters()},
    }


def draw_bounds(num_segments: int, seed: int) -> tuple[list[int], list[int]]:
    drawn = random.Random(seed)
    forward, backward = (sorted(drawn.sample(range(1, num_segments), drawn.randint(0, num_segments - 1))) for _ in range(2))
    return forward, backward


def compare(case: RangeCase, bounds: list[tuple[list[int], list[int]]]) -> None:
    expected = run_whole(case)
    assert not case.has_backward or any(
        value is not None and bool(value.any()) for name, value in expected.items() if name != "output"
    )
    for forward, backward in bounds:
        found = run_in_ranges(case, forward, backward)
        for name, value in expected.items():
            other = found[name]
            assert (value is None) == (other is None), f"{name}, {forward}, {backward}"
            if value is not None and other is not None:
                torch.testing.assert_close(other, value, rtol=1e-12, atol=1e-13, msg=f"{name}, {forward}, {backward}")

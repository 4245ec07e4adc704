"""A generator's layers: every patch starts from its image's condition and its own place, and is compared with its own pixels."""

from dataclasses import replace

import pytest
import torch

from megatron.runtime.profiler import build_layer, synthetic_input
from multimodal.model.latents import NoisePath, draw_path
from multimodal.model.layers.layer_kind import HeadOutput
from multimodal.model.stage_input import PackedInput
from multimodal.model.unit_stage import UnitStage
from multimodal.values.assignment import Atom
from multimodal.values.model_graph import ModelGraph
from multimodal.values.units.unit import Flow
from tests.unit.model.rank_groups import build_stage

pytestmark = pytest.mark.usefixtures("world_of_one")

SHAPE = {"num_layers": 2, "num_attention_heads": 2, "ffn_hidden_size": 24, "init_method_std": 0.3}
GRAPH = ModelGraph.from_dict(
    {
        "units": {
            "llm": {"role": "backbone", **SHAPE, "hidden_size": 12},
            "painter": {"role": "generator", "image": {"patch_size": 2, "in_channels": 3}, **SHAPE, "hidden_size": 16},
        }
    }
)
POSITIONS = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1], [0, 0], [0, 1]])
TWO_IMAGES = PackedInput(
    (4, 2), POSITIONS, patches=torch.randn(6, 12, generator=torch.manual_seed(0)), condition_rows=torch.tensor([1] * 4 + [0] * 2)
)
CONDITIONS = torch.randn(2, 12, generator=torch.manual_seed(1), dtype=torch.float64)


def run(batch: PackedInput, conditions: torch.Tensor) -> HeadOutput:
    output = build_stage(GRAPH, "painter")(None, batch, conditions)
    assert isinstance(output, HeadOutput)
    return output


def test_the_loss_is_the_squared_error_of_what_is_predicted() -> None:
    stage = build_stage(GRAPH, "painter")
    hidden = torch.randn(6, 1, 16, generator=torch.manual_seed(2), dtype=torch.float64)
    head, given = stage.layers["3"], stage.prepare(TWO_IMAGES, None)
    trained, evaluated = head(hidden, given), head.eval()(hidden, given)
    assert trained.predicted is None and evaluated.predicted.shape == (6, 12)
    for output in (trained, evaluated):
        torch.testing.assert_close(output.loss_sum, ((evaluated.predicted - TWO_IMAGES.patches) ** 2).sum())
        assert output.is_correct is None and output.conditions is None


def test_an_image_is_made_beside_what_encoders_give() -> None:
    """With tokens before its patches, of which only the patches are compared, and each of which changes what is made."""
    edges = [["vision", "llm"], ["llm", "painter"], ["vision", "painter"]]
    vision = {"role": "encoder", **SHAPE, "hidden_size": 8}
    units = {"vision": vision, **GRAPH.to_dict()["units"]}
    stage = build_stage(ModelGraph.from_dict({"units": units, "edges": edges}), "painter")
    beside = torch.tensor([[-1, 0], [-1, 1]])
    batch = PackedInput(
        (6,),
        torch.cat((beside, POSITIONS[:4])),
        patches=TWO_IMAGES.patches[:4],
        condition_rows=torch.tensor([1, 2, 0, 0, 0, 0]),
        item_sources=torch.tensor([0, 1, 1]),
        target_rows=torch.arange(2, 6),
    )
    given = torch.randn(3, 20, generator=torch.manual_seed(3), dtype=torch.float64, requires_grad=True)
    made = stage.eval()(None, batch, given)
    assert made.predicted.shape == (4, 12)
    torch.testing.assert_close(made.loss_sum, ((made.predicted - TWO_IMAGES.patches[:4]) ** 2).sum())
    made.loss_sum.backward()
    assert given.grad[:, :12].abs().sum(1).gt(0).all() and given.grad[:, 12:].eq(0).all(), "the rest is for the LLM's layers"
    projector = stage.layers["0"]
    assert projector.encoders["vision_tokens"].weight.grad.abs().sum() > 0 and projector.weight.grad.abs().sum() > 0


UNITS = GRAPH.to_dict()["units"]
ITEMS = (Atom(5, 0), Atom(9, 1))


def flow_stage(**flow: object) -> UnitStage:
    """Of a generator that learns a flow; what starts as zeros is drawn, as it would hide the rest."""
    graph = ModelGraph.from_dict({"units": {**UNITS, "painter": {**UNITS["painter"], "flow": flow}}})
    stage = build_stage(graph, "painter").eval()
    for index in ("1", "2"):
        torch.nn.init.normal_(stage.layers[index].modulation.weight, std=0.3, generator=torch.manual_seed(6))
    return stage


def two_paths(*, dropout: float = 0.0) -> NoisePath:
    return draw_path(ITEMS, Flow(1, dropout), num_tokens=(4, 2), num_patches=(4, 2), num_values=12, seed=3)


def test_a_flow_is_learnt_between_data_and_noise() -> None:
    """From noisy patches and the time of each image; noise and time are an item's own, in whatever microbatch it is."""
    stage, path = flow_stage(), two_paths()
    alone = draw_path(ITEMS[1:], Flow(), num_tokens=(2,), num_patches=(2,), num_values=12, seed=3)
    assert path.noise[4:].equal(alone.noise) and path.times[1:].equal(alone.times) and path.times[0] != path.times[1]
    made = stage(None, replace(TWO_IMAGES, path=path), CONDITIONS)
    torch.testing.assert_close(made.loss_sum, (made.predicted - (path.noise - TWO_IMAGES.patches)).square().sum())
    at_noise = path._replace(times=torch.ones(2))
    seen, unseen = (
        stage(None, replace(TWO_IMAGES, patches=patches, path=at_noise), CONDITIONS).predicted
        for patches in (TWO_IMAGES.patches, torch.zeros(6, 12))
    )
    torch.testing.assert_close(seen, unseen, msg="at time 1 nothing of the data is seen")
    assert not torch.allclose(made.predicted, unseen)


@pytest.mark.parametrize("kind", ["generator_projector", "modulated_transformer", "generator_head"])
@pytest.mark.parametrize("flow", [{}, {"condition_tokens": 3, "has_joint_attention": True}], ids=["", "joint"])
def test_every_layer_of_a_flow_can_be_profiled(kind: str, flow: dict[str, object]) -> None:
    whole = flow_stage(**flow)
    context = whole.context
    stage = build_layer(context.graph, "painter", kind, groups=context.groups, options=context.options, vocab_size=32)
    given = synthetic_input(stage, num_tokens=8, num_sequences=2)
    output = stage(*given)
    (output.loss_sum if isinstance(output, HeadOutput) else output.sum()).backward()
    assert given.differentiable.grad.isfinite().all()


def test_items_without_conditions_are_made_alike_whatever_the_llm_says() -> None:
    stage, path = flow_stage(), two_paths(dropout=1.0)
    assert path.is_told.eq(0).all() and two_paths().is_told.eq(1).all()
    made, other = (stage(None, replace(TWO_IMAGES, path=path), states).predicted for states in (CONDITIONS, -CONDITIONS))
    torch.testing.assert_close(made, other)


def test_the_llm_hands_on_the_states_of_the_rows_asked_for() -> None:
    """And their gradient reaches the LLM beside that of its own loss."""
    stage = build_stage(GRAPH, "llm")
    batch = PackedInput(
        (5,),
        torch.arange(5),
        token_ids=torch.arange(5),
        target_rows=torch.tensor([0]),
        targets=torch.tensor([3]),
        generator_rows=torch.tensor([4, 2]),
    )
    output = stage(None, batch)
    assert output.conditions.shape == (2, 12)
    output.conditions.sum().backward()
    gradient = stage.layers["0"].word_embeddings.weight.grad
    assert gradient[:5].abs().sum(1).gt(0).all(), "causal attention lets the last row see all tokens"

"""The layers that size flags give to pipeline stages: by their seconds for the run's own data, or equally many."""

import pytest

from megatron.runtime.flags.arguments import build_plan
from megatron.runtime.training.describe_run import _shown_stages
from megatron.runtime.training.prediction import predict_layer_seconds
from multimodal.plan.unit_grid import EVEN
from tests.unit.runtime.training.conftest import open_example

LARGE_VOCABULARY = "--make-vocab-size-divisible-by 65536"
"""Its head costs more than all transformer layers."""


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("--llm-pp 3", ", 2 + 2 + 2 layers"),
        (f"--llm-pp 3 {LARGE_VOCABULARY}", ", 2 + 3 + 1 layers"),
        (f"--llm-pp 3 {LARGE_VOCABULARY} --layer-partition even", ", 2 + 2 + 2 layers"),
        (f"--llm-pp 2 --schedule interleaved-1f1b --llm-vpp 2 {LARGE_VOCABULARY}", ", 2 + 2 + 1 + 1 layers"),
        (
            f"--llm-pp 3 --schedule interleaved-1f1b --llm-num-layers-per-virtual-pipeline-stage 1 {LARGE_VOCABULARY}",
            ", 1 + 1 + 1 + 1 + 1 + 1 layers",
        ),
        ("--llm-pp 1", ""),
    ],
)
def test_stages_have_layers_by_their_seconds(line: str, shown: str) -> None:
    config, inputs = open_example(line)
    units = build_plan(config, inputs.graph, 8, layer_seconds=predict_layer_seconds(config, inputs)).units
    assert _shown_stages(inputs.graph.backbone, units["llm"]) == shown
    assert _shown_stages(inputs.graph.unit("vision"), units["vision"]) == ""


def test_a_frozen_unit_takes_what_is_left_of_it() -> None:
    """A frozen encoder's layers have no backward; its projector, in the same stage as the last of them, has one."""
    sizes = "--vision-pp 2 --vision-dp 1 --llm-pp 3"
    runs = [open_example(f"{sizes} {flags}") for flags in ("", "--freeze vision", "--recompute-granularity full")]
    trained, frozen, repeated = (predict_layer_seconds(*each)["vision"] for each in runs)
    assert trained[1] > 2.5 * frozen[1] > 0 and trained[-1] >= frozen[-1] > 0
    assert repeated[1] == pytest.approx(trained[1] + frozen[1])


def test_nothing_is_counted_where_nothing_is_cut() -> None:
    assert predict_layer_seconds(*open_example("--llm-pp 1")) is EVEN

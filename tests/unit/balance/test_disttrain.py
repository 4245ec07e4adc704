"""The order of microbatches that the balancer disttrain gives a pipeline."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.disttrain import _light_outside
from multimodal.plan.disaggregated import plan_disaggregated
from multimodal.plan.unit_sizes import UnitSizes
from multimodal.values.assignment import Assignment
from tests.unit.plan.planners.planning_cases import THREE, TWO, random_lengths


def balanced(graph, lengths) -> Assignment:
    sizes = {unit: UnitSizes(data_parallel_size=2, pipeline_parallel_size=2) for unit in graph.unit_names}
    plan = plan_disaggregated(graph, sizes=sizes, world_size=4 * len(graph.units))
    return BALANCERS["disttrain"](lengths, graph=graph, plan=plan, options=BalanceOptions(micro_batch_size=2, vocab_size=512))


def test_a_generator_without_work_is_no_stage_of_the_pipeline() -> None:
    for seed in range(6):
        lengths = random_lengths(TWO, count=24, seed=seed)
        assert balanced(THREE, lengths).placed["llm"] == balanced(TWO, lengths).placed["llm"]


class Favouring:
    """Predicts that the n-th assignment takes shortest."""

    def __init__(self, favourite):
        self.favourite, self.seen = favourite, []

    def predict_each(self, assignments, lengths):
        self.seen = list(assignments)
        return [SimpleNamespace(seconds=float(number != self.favourite), least_seconds=0.0) for number in range(len(assignments))]


@pytest.mark.parametrize("num_ranges", [1, 2])
def test_the_order_is_chosen_by_the_predicted_step(num_ranges) -> None:
    """All candidates hold the same microbatches; one more where the LLM has virtual stages; the given order is the last."""
    lengths = random_lengths(TWO, count=40, seed=3)
    sizes = {unit: UnitSizes(data_parallel_size=2, pipeline_parallel_size=2) for unit in TWO.unit_names}
    sizes["llm"] = replace(sizes["llm"], virtual_pipeline_size=num_ranges)
    plan = plan_disaggregated(TWO, sizes=sizes, world_size=8)
    seen = {}
    for favourite in range(4):
        predictor = Favouring(favourite)
        options = BalanceOptions(micro_batch_size=2, vocab_size=512, predictor=predictor)
        found = BALANCERS["disttrain"](lengths, graph=TWO, plan=plan, options=options)
        assert found == predictor.seen[favourite]
        seen = predictor.seen
    assert len(seen) == 3 + num_ranges
    held = [[sorted(replica) for replica in assignment.units["llm"]] for assignment in seen]
    assert all(each == held[0] for each in held)
    firsts = [[microbatch[0].sample_id for microbatch in replica] for replica in seen[-1].units["llm"]]
    assert all(each == sorted(each) for each in firsts)


def test_heavy_microbatches_stand_in_the_middle() -> None:
    sizes = np.array([5.0, 1.0, 4.0, 2.0, 3.0, 9.0])
    assert sizes[np.asarray(_light_outside(sizes, slice(0, 5)))].tolist() == [1.0, 3.0, 5.0, 4.0, 2.0]
    assert np.asarray(_light_outside(sizes, slice(4, 6))).tolist() == [0, 1]


def test_samples_without_any_work_keep_their_order(graph, build_plan, build_sample):
    plan = build_plan(vision=1, audio=1, llm=1)
    lengths = [build_sample(index, 0) for index in range(4)]
    assignment = BALANCERS["disttrain"](lengths, graph=graph, plan=plan, options=BalanceOptions(micro_batch_size=1))
    assert assignment.placed["llm"].sample_ids.tolist() == [0, 1, 2, 3]

"""The order of microbatches that the balancer disttrain gives a pipeline."""

from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.disttrain import balance_disttrain
from multimodal.plan.disaggregated import plan_disaggregated
from multimodal.plan.unit_sizes import UnitSizes
from multimodal.values.assignment import Assignment
from tests.unit.plan.planners.planning_cases import THREE, TWO, random_lengths


def balanced(graph, lengths) -> Assignment:
    sizes = {unit: UnitSizes(data_parallel_size=2, pipeline_parallel_size=2) for unit in graph.unit_names}
    plan = plan_disaggregated(graph, sizes=sizes, world_size=4 * len(graph.units))
    return balance_disttrain(lengths, graph=graph, plan=plan, options=BalanceOptions(micro_batch_size=2, vocab_size=512))


def test_a_generator_without_work_is_no_stage_of_the_pipeline() -> None:
    for seed in range(6):
        lengths = random_lengths(TWO, count=24, seed=seed)
        assert balanced(THREE, lengths).placed["llm"] == balanced(TWO, lengths).placed["llm"]

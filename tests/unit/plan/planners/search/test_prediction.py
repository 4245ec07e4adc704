"""Predictions of runs: of a share of the replicas, of the shortest of several, of grids, and of sizes that are tuned."""

from dataclasses import replace
from functools import partial
from itertools import chain
from types import SimpleNamespace

import pytest

from benchmarks.baselines import COMPARED
from benchmarks.baselines.encoders_colocated import plan_encoders_colocated, shortest_run
from multimodal.plan.planners import PLANNERS
from multimodal.plan.planners.estimate.candidate import Candidate
from multimodal.plan.planners.estimate.grid import GridShape, chain_pieces, cut_grid
from multimodal.plan.planners.estimate.step_estimate import choose_candidates
from multimodal.plan.planners.estimate.unit_layout import build_unit, even_layout
from multimodal.plan.planners.idle_units import place_idle_units, without_idle_units
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import FixedSizes, StageSize
from multimodal.plan.planners.search import trials
from multimodal.plan.planners.search.grid_search import best_grids, fits, grid_estimate
from multimodal.plan.planners.search.prediction import judge_run, predict_run
from multimodal.plan.planners.search.run_variants import with_first_balance
from multimodal.plan.planners.search.simulated_part import WHOLE, Fidelity, keep_replicas, kept_plan
from multimodal.plan.planners.search.trials import climb, simulate_run
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import ImageInput
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import SampleLengths
from multimodal.values.units.unit import Opaque
from tests.unit.plan.planners.planning_cases import LLM, TEXT_ONLY, THREE, TWO, TWO_ENCODERS, VISION, request, with_memory
from tests.unit.plan.planners.test_context_parallel_plans import without_items


def colocated(*, encoder_tensor: int, encoder_data: int, tensor: int, data: int, pipeline: int) -> Candidate:
    vision, llm = StageSize(encoder_tensor), StageSize(tensor)
    layouts = {"vision": even_layout(VISION, vision, encoder_data, 1), "llm": even_layout(LLM, llm, data, pipeline)}
    return Candidate(layouts, groups=(("vision", "llm"),))


PART = Fidelity("part", 1.0)


@pytest.mark.parametrize(
    ("graph", "plan", "max_actions", "num_shares", "tolerance"),
    [
        (TWO, colocated(encoder_tensor=1, encoder_data=16, tensor=2, data=4, pipeline=2), 100, 4, 0.06),
        (THREE, "megatron", 40, 4, 0.02),
        (TEXT_ONLY, Candidate({"llm": even_layout(LLM, StageSize(1, 2), 8, 2)}), 20, 8, 0.02),
    ],
    ids=["colocated", "one grid", "context parallel"],
)
def test_a_share_of_the_replicas_predicts_the_whole(graph, plan, max_actions, num_shares, tolerance):
    lengths = (SampleLengths(0, (), 8192, 1000),) if graph is TEXT_ONLY else request(graph).lengths[:1]
    asked = request(graph, num_gpus=16, global_batch_size=64, lengths=lengths)
    fixed = {"llm": FixedSizes(data_parallel_size=4)}
    run = PLANNERS[plan](replace(asked, fixed_sizes=fixed)) if isinstance(plan, str) else plan.to_run(asked, seconds=0.0)
    whole, share = predict_run(run, asked), predict_run(run, asked.changed(max_actions=max_actions), fidelity=PART)
    assert (whole.replica_share, share.replica_share) == (1, num_shares)
    assert share.iteration_seconds == pytest.approx(whole.iteration_seconds, rel=tolerance)
    assert share.mfu == pytest.approx(whole.mfu, rel=tolerance)
    assert share.peak_memory_bytes == pytest.approx(whole.peak_memory_bytes, rel=0.01 if graph is TWO else 1e-9)


def test_a_long_step_is_continued_from_a_shorter_one():
    asked = request(TWO, global_batch_size=256, lengths=request(TWO).lengths[:1])
    run = COMPARED["disttrain"](replace(asked, fixed_sizes={"llm": FixedSizes(data_parallel_size=1)}))
    whole, part = predict_run(run, asked), predict_run(run, asked.changed(max_actions=200), fidelity=PART)
    assert part.iteration_seconds == pytest.approx(whole.iteration_seconds, rel=0.01)
    assert sum(part.bubble.values()) == pytest.approx(sum(whole.bubble.values()), abs=0.02)


def test_predictions_average_consecutive_batches():
    asked = request(TWO, global_batch_size=16)
    run = colocated(encoder_tensor=1, encoder_data=8, tensor=1, data=4, pipeline=2).to_run(asked, seconds=0.0)
    one, three = (judge_run(run, asked.changed(num_batches=count)).iteration_seconds for count in (1, 3))
    assert one != three and 0.5 < one / three < 2


def test_ranks_that_share_cores_take_as_long_as_these_compute():
    asked = request(TWO, global_batch_size=48)
    run = colocated(encoder_tensor=1, encoder_data=8, tensor=2, data=2, pipeline=2).to_run(asked, seconds=0.0)
    alone, enough, shared = (
        predict_run(run, replace(asked, cluster=replace(asked.cluster, gpus_per_node=8, cores_per_node=cores)))
        for cores in (None, 8, 2)
    )
    assert enough == alone and shared.ideal_seconds == alone.ideal_seconds
    assert shared.iteration_seconds - shared.update_seconds == pytest.approx(8 / 2 * alone.ideal_seconds)
    assert sum(shared.above_floor.values()) + shared.floor_seconds / shared.iteration_seconds == pytest.approx(1.0)
    assert shared.mfu == pytest.approx(alone.mfu * alone.iteration_seconds / shared.iteration_seconds)


@pytest.mark.parametrize("fidelity", [WHOLE, PART])
def test_what_is_above_the_floor_adds_up_by_kind(fidelity):
    asked = request(TWO, global_batch_size=48, max_actions=4)
    run = colocated(encoder_tensor=1, encoder_data=8, tensor=2, data=2, pipeline=2).to_run(asked, seconds=0.0)
    for each in (run, replace(run, recompute="full")):
        found = predict_run(each, asked, fidelity=fidelity)
        assert 0 < found.floor_seconds < found.ideal_seconds <= found.busiest_seconds <= found.iteration_seconds
        shares = sum(found.above_floor.values())
        assert shares == pytest.approx(1 - found.floor_seconds / found.iteration_seconds, abs=1e-9)
        assert found.above_floor["tp"] > 0


def test_the_floor_holds_no_recomputation():
    asked = request(TWO)
    run = colocated(encoder_tensor=1, encoder_data=8, tensor=2, data=2, pipeline=2).to_run(asked, seconds=0.0)
    plain, again = predict_run(run, asked), predict_run(replace(run, recompute="full"), asked)
    assert again.floor_seconds == pytest.approx(plain.floor_seconds)
    assert again.ideal_seconds > 1.1 * plain.ideal_seconds
    assert again.above_floor["recomputation"] > 0.1 > 1e-9 > plain.above_floor["recomputation"]


def ranks(plan: Plan, unit: str) -> set[int]:
    return set(plan.units[unit].ranks)


def test_replicas_that_overlap_in_part_have_no_share():
    plan = colocated(encoder_tensor=4, encoder_data=4, tensor=1, data=8, pipeline=2).build_plan(TWO)
    assert keep_replicas(plan, 4) is None
    assert keep_replicas(plan, 2) is not None


def test_units_without_work_keep_no_replica_from_being_left_out():
    asked = without_items(TWO, "vision", num_gpus=8, global_batch_size=64, micro_batch_size=1)
    asked = replace(asked, lengths=asked.lengths[:1])
    candidate = Candidate({"llm": even_layout(LLM, StageSize(1), 4, 2)})
    run = place_idle_units(candidate.to_run(without_idle_units(asked), seconds=0.0), asked)
    assert run.plan.units["vision"].data_parallel_size == 1
    kept = kept_plan(run.plan, asked, 4)
    assert kept is not None and [kept.units[unit].data_parallel_size for unit in ("vision", "llm")] == [1, 1]
    assert ranks(kept, "vision") <= ranks(kept, "llm")
    whole, share = (
        predict_run(run, asked.changed(max_actions=16), fidelity=each) for each in (WHOLE, Fidelity("part", 1.0, kept_replicas=1))
    )
    assert (whole.replica_share, share.replica_share) == (1, 4)
    assert share.iteration_seconds == pytest.approx(whole.iteration_seconds, rel=0.06)


def test_a_unit_without_work_that_finds_no_room_keeps_all_replicas():
    asked = without_items(TWO, "vision")
    units = {
        "vision": build_unit(even_layout(VISION, StageSize(1), 1, 6), first_rank=0),
        "llm": build_unit(even_layout(LLM, StageSize(1), 4, 2), first_rank=0),
    }
    assert kept_plan(Plan(units), asked, 4) is None
    assert kept_plan(Plan(units), asked, 1) == Plan(units)


def sized(num_gpus: int, seconds: float, is_small: bool = True) -> SimpleNamespace:
    return SimpleNamespace(num_gpus=num_gpus, seconds=seconds, fits=lambda asked: is_small)


def test_near_candidates_are_those_within_a_factor_of_the_best_that_fits():
    asked = request(num_gpus=8)
    slow, best, near, equal, huge, unfit = (
        sized(*each) for each in ((4, 1.3), (4, 1.0), (2, 1.09), (2, 1.0), (16, 0.1), (8, 0.5, False))
    )
    given = {"seconds": lambda _, each: each.seconds, "least_seconds": lambda _, each: 0.0}
    candidates = [slow, best, huge, near, unfit, equal]
    assert choose_candidates(asked, candidates, **given, within=1.1) == [(equal, 1.0), (best, 1.0), (near, 1.09)]
    assert choose_candidates(asked, candidates, **given)[0] == (equal, 1.0)
    bounded = given | {"least_seconds": lambda _, each: each.seconds}
    assert choose_candidates(asked, candidates, **bounded, within=1.1)[-1] == (near, 1.09)
    with pytest.raises(PlanError):
        choose_candidates(asked, [huge, unfit], **given)


def simulated_seconds(run: PlannedRun, asked) -> float:
    found = simulate_run(with_first_balance(run, asked), asked)[0]
    return found.prediction.iteration_seconds if found else float("inf")


def test_the_best_of_each_number_of_replicas_is_simulated(monkeypatch):
    """With a factor so large that the formula decides nothing."""
    asked = request(TWO_ENCODERS, num_gpus=8)
    monkeypatch.setattr("benchmarks.baselines.encoders_colocated.NEAR", 3.0)
    made: list[PlannedRun] = []
    make = Candidate.to_run
    monkeypatch.setattr(Candidate, "to_run", lambda *given, **named: made.append(make(*given, **named)) or made[-1])
    chosen = plan_encoders_colocated(asked)
    replicas = [run.plan.units["llm"].data_parallel_size for run in made]
    assert len(replicas) > 1 and len(set(replicas)) == len(replicas)
    seconds = {run.key: simulated_seconds(run, asked) for run in made}
    assert seconds[chosen.key] == min(seconds.values())
    assert chosen.nominal_seconds > 0


def test_one_run_is_not_simulated_and_the_first_is_taken_where_none_fits(monkeypatch):
    asked = request(TWO_ENCODERS, num_gpus=8)
    run = plan_encoders_colocated(asked)
    other = replace(run, micro_batch_size=run.micro_batch_size * 2)
    without_memory = partial(asked.changed, memory_scale=1e-6)
    assert shortest_run([other, run], without_memory()).key == other.key
    monkeypatch.setattr(trials, "simulate_run", lambda *_: pytest.fail("it was simulated"))
    assert shortest_run([run], asked) is run


def found_for(asked):
    return list(best_grids(asked))


def test_moved_cuts_cover_all_layers_and_are_never_estimated_longer():
    asked = request(TWO, global_batch_size=32)
    for seconds, grid in found_for(asked)[1]:
        pieces = chain_pieces(asked, grid.shape.size)
        assert tuple(piece for pieces in grid.ranges for piece in pieces) == pieces
        cut = cut_grid(asked, grid.shape, virtual_stages=grid.virtual_stages)
        assert seconds == grid_estimate(asked, grid) <= grid_estimate(asked, cut)


@pytest.mark.parametrize("virtual_stages", [2, 4])
def test_the_estimate_is_that_of_a_simulation(virtual_stages):
    asked = request(TEXT_ONLY, num_gpus=4, global_batch_size=16)
    num_pieces = len(chain_pieces(asked, StageSize(1)))
    grid = cut_grid(asked, GridShape(StageSize(1), 2, 2, num_pieces), virtual_stages=virtual_stages)
    seconds = grid_estimate(asked, grid)
    found = predict_run(grid.to_run(asked, seconds=seconds), asked)
    assert seconds == pytest.approx(found.iteration_seconds - found.update_seconds, rel=0.1)


def test_a_module_of_one_piece_has_a_replica_on_every_rank_of_a_stage_of_the_chain():
    module = replace(VISION, image=ImageInput(image_size=28, patch_size=14), module=Opaque("nowhere"))
    graph = replace(TWO, units=(module, LLM))
    asked = replace(request(TWO, num_gpus=16, global_batch_size=32, fixed_sizes={"llm": FixedSizes(2)}), graph=graph)
    for seconds, grid in chain.from_iterable(found_for(asked)):
        run = grid.to_run(asked, seconds=seconds)
        encoder, llm = (run.plan.units[name] for name in graph.unit_names)
        assert (encoder.tensor_parallel_size, encoder.data_parallel_size) == (1, 2 * llm.data_parallel_size)
        for index, replica in enumerate(encoder.replicas):
            assert set(replica.ranks) < set(llm.replicas[index % llm.data_parallel_size].ranks)
        assert seconds < predict_run(run, asked).iteration_seconds, "1F1B waits between a stage's replicas, estimates do not"


def test_a_chain_that_keeps_more_than_there_is_does_not_fit():
    asked = request(TWO, global_batch_size=32)
    _, grid = found_for(asked)[1][0]
    assert fits(asked, grid)
    assert not fits(with_memory(asked, 1e-3), grid)


@pytest.mark.parametrize(
    ("seconds", "below", "expected"),
    [
        ((5, 4, 3, 2, 1), 9, [4, 8, 16, 2]),
        ((1, 2, 3, 4, 5), 9, [4, 8, 2, 1]),
        ((2, 1, 3, 4, 5), 9, [4, 8, 2, 1]),
        ((9, 9, 9, 8, 7), 1, [4, 8, 2]),  # far behind a known run only great strides are followed
        ((9, 9, 9, 7, 5), 1, [4, 8, 16, 2]),
    ],
)
def test_sizes_are_looked_at_while_steps_get_shorter(seconds, below, expected):
    sizes, looked_at = (1, 2, 4, 8, 16), []
    climb(sizes, lambda size: looked_at.append(size) or seconds[sizes.index(size)], first=2, below=below)
    assert looked_at == expected

"""Chains over one grid: every number of ranges is looked at, cuts are improved, and memory is that of the order."""

import pytest

from multimodal.plan.planners.estimate.grid import GridShape, chain_pieces, cut_grid
from multimodal.plan.planners.planning_request import StageSize
from multimodal.plan.planners.search.grid_search import best_grids, fits, grid_estimate
from multimodal.plan.planners.search.prediction import predict_run
from tests.unit.plan.planners.planning_cases import TEXT_ONLY, TWO, request, with_memory


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


def test_a_chain_that_keeps_more_than_there_is_does_not_fit():
    asked = request(TWO, global_batch_size=32)
    _, grid = found_for(asked)[1][0]
    assert fits(asked, grid)
    assert not fits(with_memory(asked, 1e-3), grid)

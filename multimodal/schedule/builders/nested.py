"""Nested: encoders and generators run inside the LLM's pipeline, with a bounded number of their microbatches in flight (BigMac).

BigMac: Breaking the Pareto Frontier of Compute and Memory in Multimodal LLM Training, arXiv 2605.25451.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from multimodal.cost.step_costs import StepCosts
from multimodal.schedule.builders.interleaved_1f1b import build_interleaved_1f1b, is_interleaved
from multimodal.schedule.builders.one_f_one_b import build_one_f_one_b
from multimodal.schedule.compile_schedule import component_of_lane
from multimodal.schedule.execute_lanes import execute_unit
from multimodal.schedule.list_schedule import place_reductions
from multimodal.values.arrays.rows import Floats, Integers, row_starts
from multimodal.values.model_graph import Role
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape
from multimodal.values.work.pieces import REDUCTION, UnitPieces
from multimodal.values.work.step_work import step_work

_SHORTEST_SECONDS = 1e-9
"""Seconds that a computation of the LLM counts at least, so that no two of one lane begin at the same moment."""
_NEEDED_FORWARD, _BACKWARD, _GENERATOR_FORWARD, _GENERATOR_BACKWARD, _FORWARD = range(5)
"""The order inside a pause: work that frees activations runs before forwards, except forwards that another lane waits for."""
_AT_THE_END = np.inf


def build_nested(shape: StepShape, costs: StepCosts) -> Schedule:
    """Build a schedule in which all lanes leave the LLM's pipeline at the same moments to encode and to generate.

    The LLM runs the 1F1B that it would run if encoders and generators took no time (interleaved if its stages hold several layer
    ranges). Pauses are cut into that pipeline, by the durations of `costs`: at a given moment every lane finishes its current
    computation, then runs its part of the pause. All later work is delayed equally in all lanes, so no lane waits longer for
    another one than before: if lanes have equal work in a pause, the pause costs only that work.

    The microbatches of one number in all replicas of an encoder form a group. Their forwards run in the pause before the first of
    them enters the LLM; their backwards in the first pause after the last of them has left it, before forwards of other groups.
    So a replica keeps at most one microbatch more than the LLM has of its own in flight, however many a step has. Where
    consecutive stages of an encoder are on different lanes, one pause lies between them, in each direction, and forwards come
    first, since the LLM's first lane may wait for them. Encoders that feed another encoder run before it in its pauses, and
    backwards after it; on other lanes, one pause earlier or later. A group of a generator's microbatches runs forwards and
    backwards in one pause, as soon as the LLM's last stage has finished the last of them.

    `dip` has such phases for all of an encoder's microbatches at once: it takes as long, and keeps all of them in memory.
    """
    work = step_work(shape)
    computed = np.flatnonzero(work.kinds != REDUCTION)
    ordered = computed[np.lexsort(_Pauses(shape, costs).keys[:, computed][::-1])]
    lanes, pieces = work.by_lane(ordered)
    lane_starts = row_starts(np.bincount(lanes, minlength=len(shape.plan.lanes)))
    return place_reductions(Schedule.in_line(shape, lane_starts, pieces))


class _Moments(NamedTuple):
    """Pauses of one unit's microbatches; `inf`: after all other work."""

    forward: Floats
    """[num_stages, num_microbatches]"""
    backward: Floats


class _Pauses:
    """The place of every computation: in a pause, or between two pauses."""

    def __init__(self, shape: StepShape, costs: StepCosts) -> None:
        self.shape, self.work = shape, step_work(shape)
        self.units, self.llm = self.work.pieces.units, self.work.pieces.units[shape.graph.backbone.name]
        # When each computation of the LLM would start and end if nothing else took time; 0 for others.
        llm, computed = shape.graph.backbone.name, np.flatnonzero(self.work.kinds != REDUCTION)
        in_line = (build_interleaved_1f1b if is_interleaved(shape.plan.units[llm]) else build_one_f_one_b)(shape)
        seconds = np.full(self.work.num_computed, _SHORTEST_SECONDS)
        seconds[computed] = np.maximum(_SHORTEST_SECONDS, costs.of_pieces(self.work, computed).seconds)
        self.start, self.end = execute_unit(in_line, llm, seconds=seconds)
        self.component_of_lane = component_of_lane(shape)

    @property
    def keys(self) -> Integers:
        """[4, num_computed] the keys by which all lanes sort computations; a computation comes after all that it needs.

        The keys are the phase (odd in pauses), the kind of work, the number of the microbatch, and its progress through the
        stages. The LLM's computations between two pauses keep their order.
        """
        found: dict[str, _Moments] = {}
        for each in reversed(self.shape.graph.units):  # an encoder after those that it feeds
            if each.role is not Role.BACKBONE:
                unit = self.units[each.name]
                of_encoder = each.role is Role.ENCODER
                groups = self._groups(unit)
                found[each.name] = self._of_encoder(unit, groups, found) if of_encoder else self._of_generator(unit, groups)
        moments = np.unique(np.concatenate([np.zeros(0), *(each.ravel() for of_unit in found.values() for each in of_unit)]))
        keys = np.zeros((4, self.work.num_computed), np.int64)
        keys[0] = 2 * np.searchsorted(moments, self.start, side="right")
        keys[2] = np.argsort(np.argsort(self.start, kind="stable"), kind="stable")
        for name, (forward, backward) in found.items():
            unit, numbers = self.units[name], self._numbers_in_pause(name)
            stages = np.broadcast_to(np.arange(len(unit.forward))[:, None], unit.forward.shape)
            for number, pieces, at, way, chosen in (
                (numbers[0], unit.forward, forward, stages, unit.is_there),
                (numbers[1], unit.backward, backward, -stages, unit.width > 0),
            ):
                index = np.broadcast_to(unit.counted.index_in_replica, pieces.shape)
                columns = (2 * np.searchsorted(moments, at) + 1, np.full_like(pieces, number), index, way)
                keys[:, pieces[chosen]] = np.stack([column[chosen] for column in columns])
        return keys

    def _numbers_in_pause(self, name: str) -> tuple[int, int]:
        """Return the places of a unit's forwards and backwards in the order of a pause; encoders differ by those they feed."""
        if self.shape.graph.unit(name).role is Role.GENERATOR:
            first = _GENERATOR_FORWARD, _GENERATOR_BACKWARD
        else:
            first = _NEEDED_FORWARD if self._is_awaited(name) else _FORWARD, _BACKWARD
        most, depth = len(self.units), self._depth(name)
        return first[0] * most - depth, first[1] * most + depth

    def _depth(self, name: str) -> int:
        """Return the number of encoders between an encoder and the LLM."""
        return max((1 + self._depth(target) for target in self._fed(name)), default=0)

    def _fed(self, name: str) -> list[str]:
        """Return the encoders that an encoder feeds."""
        return [target for target in self.shape.graph.downstream(name) if self.shape.graph.unit(target).role is Role.ENCODER]

    def _is_awaited(self, name: str) -> bool:
        """Return True if other lanes wait, within the pause, for an encoder's forwards."""
        return bool(self._pauses_between(name).any()) or any(map(self._is_awaited, self._fed(name)))

    def _groups(self, unit: UnitPieces) -> Integers:
        """[num_microbatches] the group of each microbatch: one microbatch of each replica in connected lanes.

        Groups of the same lanes are numbered in the order of their microbatches.
        """
        plan = self.shape.plan
        lanes = [plan.lane_of_rank[replica.stages[0].ranks[0]] for replica in plan.units[unit.unit].replicas]
        components = self.component_of_lane[lanes][unit.counted.replica_of_microbatch]
        _, numbers = np.unique(np.stack((components, unit.counted.index_in_replica)), axis=1, return_inverse=True)
        return numbers.ravel()

    def _of_encoder(self, unit: UnitPieces, groups: Integers, found: Mapping[str, _Moments]) -> _Moments:
        """Return the pauses of an encoder; found: those of the encoders that it feeds."""
        needed, returned = np.full(groups.max(initial=-1) + 1, np.inf), np.zeros(groups.max(initial=-1) + 1)
        for target in self.shape.graph.downstream(unit.unit):
            given, taken = self.shape.routes.of_edge(unit.unit, target)
            starts = found[target].forward[0] if target in found else self.start[self.llm.forward[0]]
            np.minimum.at(needed, groups[given], starts[taken])
            if unit.width.any():
                ends = found[target].backward[0] if target in found else self.end[self.llm.input_gradient[0]]
                np.maximum.at(returned, groups[given], ends[taken])
        apart = self._pauses_between(unit.unit)[:, None]
        shape = unit.forward.shape
        moments = _Moments(np.zeros(shape), np.zeros(shape))
        # Groups of a component have consecutive numbers.
        components = np.append(np.unique(groups[unit.counted.index_in_replica == 0]), groups.max(initial=-1) + 1)
        for first, end in pairwise(components.tolist()):
            columns = (groups >= first) & (groups < end)
            number = groups[columns] - first
            before = np.minimum.accumulate(needed[first:end][::-1])[::-1]
            after = np.maximum.accumulate(returned[first:end])
            pauses = np.append(before, np.unique(after[after > before[-1]]))
            moments.forward[:, columns] = before[np.maximum(0, number - apart)]
            pauses_and_end = np.append(pauses, _AT_THE_END)
            place = np.searchsorted(pauses, after)[number] + apart
            moments.backward[:, columns] = pauses_and_end[np.minimum(place, len(pauses))]
        return moments

    def _pauses_between(self, unit: str) -> Integers:
        """[num_stages] the number of pauses between a stage and the LLM (or the fed encoder): one for each change of lanes."""
        groups = self._lanes_of_stages(unit)
        changes = (np.diff(groups) != 0).astype(np.int64)
        behind = any(self._lanes_of_stages(target)[0] != groups[-1] for target in self._fed(unit))
        return np.append(np.cumsum(changes[::-1])[::-1], 0) + behind

    def _lanes_of_stages(self, unit: str) -> Integers:
        """[num_stages] a number for the lanes of each stage of the first replica."""
        return self.shape.plan.stage_tables[unit].rank_groups[:: self.shape.plan.units[unit].data_parallel_size]

    def _of_generator(self, unit: UnitPieces, groups: Integers) -> _Moments:
        given, taken = self.shape.routes.of_edge(self.llm.unit, unit.unit)
        ready, needed = np.zeros(groups.max(initial=-1) + 1), np.full(len(groups), np.inf)
        np.maximum.at(ready, groups[taken], self.end[self.llm.outputs][given])
        last = self.llm.last_stages[given], given
        goes_back = self.llm.width[last] > 0
        np.minimum.at(needed, taken[goes_back], self.start[self.llm.backward[last]][goes_back])
        moments = np.broadcast_to(np.minimum(ready[groups], needed), unit.forward.shape)
        return _Moments(moments, moments)

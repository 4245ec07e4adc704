"""A layer profile fitted to computations that a run has timed, in the terms of the cost model's own curves.

Where layers always compute together, nobody can tell which of them took the time. So the curves of all kinds of a unit are
fitted at once, and pulled weakly towards those of the machine's description, times what the unit took over what it should have.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import NamedTuple

import numpy as np

from multimodal.cost.layers.registry import LAYER_KINDS
from multimodal.cost.model_costs import ModelCosts
from multimodal.cost.seconds.layer_costs import LayerCosts
from multimodal.cost.seconds.layer_curves import LayerCurves, Quadratic, counted_tokens
from multimodal.cost.seconds.layer_profile import LayerProfile, ProfileKey, StepProfile
from multimodal.cost.unit_load import UnitLoad
from multimodal.values.action import Action, ActionKind, Resource
from multimodal.values.arrays.rows import Floats
from multimodal.values.plan import Plan
from multimodal.values.timeline import TimelineEvent

_PULL = 1e-5
"""Weight of the described curves beside the measurements."""
_OUTLIER = 5.0
"""Computations that took this many times as long as the unit's median, against what was described, are left out: interrupted."""
_FORWARD, _INPUT_GRADIENT, _WEIGHT_GRADIENT = range(3)
_NUM_TERMS = len(Quadratic._fields)
_ATTENDS = np.array([0.0, 0.0, 1.0, 1.0])
"""The terms of a forward that selective recomputation repeats: those of core attention."""


class Timed(NamedTuple):
    """One computation of a rank; its seconds are its own, without those of computations inside its waits."""

    action: Action
    seconds: float


def timed_computations(events: Sequence[TimelineEvent]) -> tuple[list[Timed], float]:
    """Return the computations of one rank's step, and the seconds between its actions: of their median, as some may be waits."""
    found: list[Timed] = []
    ordered = sorted(events, key=lambda each: (each.start_seconds, -each.end_seconds))
    between, end, computed = [], ordered[0].start_seconds if ordered else 0.0, 0.0
    for action, _, start, last in ordered:
        if start >= end:
            between.append(start - end)
        end = max(end, last)
        if found and last <= computed:
            found[-1] = Timed(found[-1].action, found[-1].seconds - (last - start))
        elif action.kind.resource is Resource.COMPUTE:
            found.append(Timed(action, last - start))
            computed = last
    return found, median(between) * len(between) if between else 0.0


@dataclass(frozen=True)
class MeasuredLayers:
    """Fits profiles for a plan; ranks add up the sums that each takes of its own computations."""

    described: LayerCosts
    """Curves by the machine's description."""
    plan: Plan

    def sums(self, steps: Sequence[tuple[ModelCosts, Sequence[TimelineEvent]]]) -> Floats:
        """Return sums over one rank's computations in several steps, zeros if there are none; costs: of each, as described.

        They are, unit by unit, the products of terms with terms and with seconds, weighted by what is described; the seconds
        measured and described; and last the seconds between actions and the number of forwards and backwards.
        """
        rows: dict[str, list[tuple[Floats, float]]] = {unit: [] for unit in self._sizes}
        between, count = 0.0, 0
        for costs, events in steps:
            computations, idle = timed_computations(events)
            between += idle
            for action, seconds in computations:
                count += action.kind is not ActionKind.WEIGHT_GRADIENT
                if action.covers is None:
                    waiting = costs.compute(action).tensor_parallel_seconds
                    rows[action.unit].append((self._terms(costs, action), max(0.0, seconds - waiting)))
        found = [self._sums_of(unit, of_unit) for unit, of_unit in rows.items()]
        return np.concatenate([*found, (between, count)])

    def fit(self, sums: Floats) -> LayerProfile:
        """Return the profile for the sums of all ranks. Units that computed nothing take what is described."""
        curves: dict[ProfileKey, LayerCurves] = {}
        ends = np.cumsum(list(self._sizes.values()))
        for unit, own in zip(self._sizes, np.split(sums[:-2], ends[:-1]), strict=True):
            fitted = self._fit_unit(unit, own).reshape(3, -1, _NUM_TERMS)
            for number, kind in enumerate(self._kinds(unit)):
                forward, input_gradient, weight_gradient = fitted[:, number]
                of_layer = (forward, input_gradient, weight_gradient, _ATTENDS * forward)
                curves[unit, kind, *self._sharing(unit)] = LayerCurves(*(Quadratic(*each.tolist()) for each in of_layer))
        between, count = sums[-2:].tolist()
        return LayerProfile("as measured in training", "", curves, StepProfile(computation_seconds=between / max(1.0, count)))

    def _fit_unit(self, unit: str, sums: Floats) -> Floats:
        described, size = self._described(unit), len(self._described(unit))
        products, seconds = sums[: size * size].reshape(size, size), sums[size * size : -2]
        measured, expected = sums[-2:].tolist()
        if not expected:
            return described
        from scipy.optimize import nnls  # which every rank would wait for at its start otherwise

        nearby = described * measured / expected
        pull = np.where(products.diagonal() > 0, _PULL * products.diagonal(), 1.0)
        scale = 1 / np.sqrt(products.diagonal() + pull)
        lower = np.linalg.cholesky(scale[:, None] * (products + np.diag(pull)) * scale)
        found, _ = nnls(lower.T, np.linalg.solve(lower, scale * (seconds + pull * nearby)))
        return np.asarray(found * scale)

    def _sums_of(self, unit: str, rows: Sequence[tuple[Floats, float]]) -> Floats:
        described, found = self._described(unit), np.zeros(self._sizes[unit])
        expected = [float(terms @ described) for terms, _ in rows]
        ratios = [seconds / each for (_, seconds), each in zip(rows, expected, strict=True) if each > 0]
        most = _OUTLIER * median(ratios) if ratios else 0.0
        for (terms, seconds), each in zip(rows, expected, strict=True):
            if 0 < seconds <= most * each:
                products = np.outer(terms, terms).ravel() / each
                found += np.concatenate((products, terms * seconds / each, (seconds, each)))
        return found

    def _terms(self, costs: ModelCosts, action: Action) -> Floats:
        """Return how often a computation has each term of each pass of each kind of layer, [3 x kinds x terms]."""
        unit, kinds = action.unit, self._kinds(action.unit)
        stage, found = action[1:4], np.zeros((3, len(kinds), _NUM_TERMS))
        rows, recompute = costs.computations.rows(unit), costs.options.recompute
        row = int(costs.assignment.placed[unit].microbatch_starts[action.replica]) + action.microbatch
        load = UnitLoad(*(np.asarray(each)[row] for each in rows)) if isinstance(rows, UnitLoad) else rows[row].all
        ranks = costs.stages.tensor_size(stage) * self.plan.units[unit].context_parallel_size
        share = np.prod(self._sharing(unit)) / ranks
        for (kind, need), count in costs.stages.counts(stage).items():
            layer, number = costs.stages.describe(unit, kind), kinds.index(kind)
            counts = layer.counts if layer.counts != "given" else "inside"  # as with any profile
            num_tokens, num_squared, num_sequences = counted_tokens(load, counts=counts)
            terms = count * (load.num_tokens > 0) * np.array([1.0, share * num_tokens, share * num_squared, num_sequences])
            if action.kind is ActionKind.FORWARD:
                found[_FORWARD, number] += terms
            if action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT) and LAYER_KINDS[kind].passes_gradient(need):
                found[_INPUT_GRADIENT, number] += terms
                if recompute and layer.recomputes:
                    found[_FORWARD, number] += terms if recompute == "full" else _ATTENDS * terms
            if action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT) and need.trains_weights:
                found[_WEIGHT_GRADIENT, number] += terms
        return found.ravel()

    def _described(self, unit: str) -> Floats:
        tensor, context = self._sharing(unit)
        sizes = {"tensor_parallel_size": tensor, "context_parallel_size": context}
        curves = [self.described.curves(unit, kind, **sizes) for kind in self._kinds(unit)]
        return np.array([[each[number] for each in curves] for number in range(3)]).ravel()

    def _kinds(self, unit: str) -> list[str]:
        return sorted(set(self.described.graph.unit(unit).layers))

    def _sharing(self, unit: str) -> tuple[int, int]:
        sizes = self.plan.units[unit]
        return sizes.tensor_size(sizes.replicas[0].virtual_stages[0]), sizes.context_parallel_size

    @cached_property
    def _sizes(self) -> dict[str, int]:
        counts = {unit: 3 * _NUM_TERMS * len(self._kinds(unit)) for unit in self.plan.units}
        return {unit: count * count + count + 2 for unit, count in counts.items()}

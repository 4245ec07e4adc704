"""The part of the validator that checks work inside computations."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import numpy as np

from multimodal.cost.pieces.tensor_parallel_waits import computation_waits
from multimodal.cost.run_options import RunOptions
from multimodal.cost.stage_layers import StageLayers
from multimodal.schedule.inside_slots import MOST_COLLECTIVES, NO_CARRIER, InsideSlots, PieceCollectives, own_waits
from multimodal.values.action import action_to_text
from multimodal.values.arrays.rows import Bools, row_numbers, take_rows
from multimodal.values.schedule import Schedule, slot_error
from multimodal.values.work.step_work import COMPUTE, KINDS

_FEWEST_COLLECTIVES = replace(MOST_COLLECTIVES, recompute=None, sequence_parallel=False)


def validate_inside(schedule: Schedule, *, options: RunOptions | None = None) -> None:
    """Check that the work inside computations fits there.

    Work inside must be a computation of another unit, before a whole computation (the carrier) of a unit with several tensor
    parallel ranks that has a wait of this number. It must not wait for a collective itself. In all its lanes it must be inside
    the same wait of the same carrier, in the order of the waits. Its needs from other ranks must not run inside the same carrier,
    and work that it continues must not be in the same wait if that work ends with a collective.

    options: of the run; None if unknown: then only work that no run allows is refused.
    Raises ScheduleError that names the action. O(slots log slots).
    """
    checks = _Checks(schedule, options)
    checks.check_carriers()
    checks.check_waits()
    checks.check_collectives()
    checks.check_lanes()
    checks.check_needs()


class _Checks:
    def __init__(self, schedule: Schedule, options: RunOptions | None) -> None:
        self.schedule, self.work, self.shape = schedule, schedule.work, schedule.shape
        self.inside = InsideSlots.of(schedule)
        self.layers = StageLayers(self.shape.graph, self.shape.plan, vocab_size=0)
        self.options, self.own_options = options or MOST_COLLECTIVES, options or _FEWEST_COLLECTIVES

    def check_carriers(self) -> None:
        """Check that computations run in those of another unit whose place is not cut: ranges of segments report no waits."""
        inside, work = self.inside, self.work
        no_computation = "not a computation: only computations run inside others; run it by itself"
        self._refuse(work.resources[inside.pieces] != COMPUTE, lambda _: no_computation)
        no_carrier = "no carrier: a computation must follow it in its lane"
        self._refuse(inside.carrier_slots == NO_CARRIER, lambda _: no_carrier)
        own, carriers = (work.pieces.unit_of_stage[work.computed_stages[each]] for each in (inside.pieces, inside.carriers))
        self._refuse(own == carriers, lambda text: f"it runs inside {text}, which is of the same unit; run it by itself")
        pieces, which = np.unique(inside.carriers, return_inverse=True)
        is_cut = np.array([self.work.action(piece).place in self.shape.cuts.segments for piece in pieces.tolist()], bool)
        self._refuse(
            is_cut[which.ravel()],
            lambda text: (
                f"it runs inside {text}, but forward or backward there run in ranges of segments, which tell of no waits; let it "
                "run inside a computation that is cut neither way, or by itself"
            ),
        )

    def check_waits(self) -> None:
        """Check that carriers have a wait of this number."""
        stages, kinds = self.work.computed_stages[self.inside.carriers], self.work.kinds[self.inside.carriers]
        different, which = np.unique(stages * len(KINDS) + kinds, return_inverse=True)
        counts = np.array([self._count_waits(*divmod(each, len(KINDS))) for each in different.tolist()])[which.ravel()]

        def problem(text: str) -> str:
            index = int(np.argmax(self.inside.waits >= counts))
            size = self.layers.tensor_size(self.work.action(int(self.inside.carriers[index]))[1:4])
            found = f"numbered from 0, over {size} tensor parallel ranks" if size > 1 else "its tensor parallel size is 1"
            return (
                f"it runs inside wait {self.inside.waits[index]} of {text}, which has {counts[index]} waits ({found}); "
                "choose another one, or run it by itself"
            )

        self._refuse(self.inside.waits >= counts, problem)

    def _count_waits(self, stage: int, kind: int) -> int:
        key = self.work.stages[stage]
        unit = self.shape.graph.unit(key[0])
        if self.layers.tensor_size(key) == 1 or self.options.hides_waits_of(unit):
            return 0
        return len(computation_waits(KINDS[kind], self.layers.in_order(key), options=self.options, unit=unit))

    def check_collectives(self) -> None:
        """Check that the work waits for no collective, which would use the links that its carrier waits for."""

        def problem(_: str) -> str:
            action = self.work.action(int(self.inside.pieces[np.argmin(self.collectives.fits_inside)]))
            plan, layers = self.shape.plan.units[action.unit], self.layers.in_order(action[1:4])
            if plan.context_parallel_size > 1:
                return f"it exchanges keys and values over {plan.context_parallel_size} context parallel ranks; run it by itself"
            wait = next(wait for wait in own_waits(action, self.layers, options=self.own_options) if not wait.is_at_end)
            return (
                f"it waits for a collective of {self.layers.tensor_size(action[1:4])} tensor parallel ranks in its segment "
                f"{wait.segment} ({layers[wait.layer][0]}); run it by itself, or in ranges that end with their collectives"
            )

        self._refuse(~self.collectives.fits_inside, problem)

    @cached_property
    def collectives(self) -> PieceCollectives:
        """The collectives of the work inside."""
        return PieceCollectives.of(self.work, self.inside.pieces, options=self.own_options)

    def check_lanes(self) -> None:
        """Check that all ranks that run work together have it in the same wait of the same computation, and waits are in order.

        So it never stands before work that it needs.
        """
        inside, starts = self.inside, self.work.lane_rows[0]
        _, which = np.unique(np.stack((inside.pieces, inside.carriers, inside.waits)), axis=1, return_inverse=True)
        found = np.bincount(which.ravel())[which.ravel()]
        wanted = np.diff(starts)[self.work.computed_stages[inside.pieces]]

        def problem(text: str) -> str:
            index = int(np.argmax(found < wanted))
            where = f"inside wait {inside.waits[index]} of {text}"
            return f"it runs {where} in {found[index]} of its {wanted[index]} lanes; let all of them have it there"

        self._refuse(found < wanted, problem)
        is_behind = np.append(False, (np.diff(inside.carrier_slots) == 0) & (np.diff(inside.waits) < 0))
        self._refuse(
            is_behind, lambda text: f"it stands behind what runs inside a later wait of {text}; order both by their waits"
        )

    def check_needs(self) -> None:
        """Check that neither the carrier nor other ranks' work inside it needs a result of the work."""
        inside, work = self.inside, self.work
        owners = np.unique(np.append(inside.pieces, inside.carriers))
        starts, needs = take_rows(work.need_starts, work.needs, owners)
        owners = owners[row_numbers(starts)]
        is_joined = (inside.hosts[owners] == inside.hosts[needs]) & (inside.hosts[needs] != needs)
        producers, consumers = work.message_ends
        is_sent = np.isin(owners * work.num_computed + needs, consumers * work.num_computed + producers)
        is_carrier = inside.hosts[owners] == owners
        self._refuse(
            np.isin(inside.pieces, needs[is_joined & is_carrier]),
            lambda text: f"it runs inside {text}, which needs it; let it run inside an earlier computation, or by itself",
        )
        self._refuse(
            np.isin(inside.pieces, owners[is_joined & is_sent]),
            lambda text: (
                f"it needs work of other ranks that runs inside {text} as well, and is there only when that ends; let it "
                "run inside a later computation"
            ),
        )

        wait_of_piece, ends = np.full(work.num_computed, -1), np.zeros(work.num_computed, bool)
        wait_of_piece[inside.pieces], ends[inside.pieces] = inside.waits, self.collectives.ends_with_one
        is_early = is_joined & ~is_carrier & ends[needs] & (wait_of_piece[owners] == wait_of_piece[needs])
        self._refuse(
            np.isin(inside.pieces, owners[is_early]),
            lambda text: (
                f"it continues what runs in the same wait of {text} and ends with a collective, which starts when that wait is "
                "over; let it run inside a later wait, or by itself"
            ),
        )

    def _refuse(self, is_wrong: Bools, problem: Callable[[str], str]) -> None:
        """Raise an error about the first wrong slot; problem: the message, given the text of its carrier."""
        if not is_wrong.any():
            return
        index = int(np.argmax(is_wrong))
        lane, carrier = int(self.inside.lanes[index]), self.inside.carriers[index]
        position = int(self.inside.slots[index] - self.schedule.lane_starts[lane])
        text = action_to_text(self.work.action(int(carrier)))
        raise slot_error(self.work.action(int(self.inside.pieces[index])), problem(text), self.schedule.lanes, {lane: position})

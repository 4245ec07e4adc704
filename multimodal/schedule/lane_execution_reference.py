"""The strictest execution of a schedule, in Python and action by action: what `execute_lanes` is held against."""

from collections import deque
from collections.abc import Callable

from multimodal.schedule.dependencies import dependencies
from multimodal.schedule.execution import Execution
from multimodal.schedule.unit_cost import unit_cost
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import ACTION_TABLE, Action, Resource, Schedule
from multimodal.values.schedule_form import form_of
from multimodal.values.timeline import TimelineEvent


def execute_lanes_reference(
    schedule: Schedule,
    *,
    graph: ModelGraph,
    plan: Plan,
    assignment: Assignment,
    lowered: bool,
    duration: Callable[[Action], float] | None = None,
) -> Execution:
    """Do in Python what `execute_lanes` does; takes any schedule."""
    run = _Run(schedule, graph, plan, assignment, lowered, duration or _unit_costs(graph, plan))
    run.advance_all()
    events = sorted(run.events, key=lambda event: (event.start_seconds, event.lane, event.end_seconds))
    return Execution.of_events(events, positions=run.positions, done=run.done)


def _unit_costs(graph: ModelGraph, plan: Plan) -> Callable[[Action], float]:
    """Unit costs, each worked out once: they are the same for all microbatches of a stage."""
    known: dict[tuple[object, ...], float] = {}

    def duration(action: Action) -> float:
        key = action[:4]
        if key not in known:
            known[key] = unit_cost(action, graph, plan)
        return known[key]

    return duration


class _Run:
    """The state of one execution. Times do not depend on the order in which lanes are visited."""

    def __init__(
        self,
        schedule: Schedule,
        graph: ModelGraph,
        plan: Plan,
        assignment: Assignment,
        lowered: bool,
        duration: Callable[[Action], float],
    ) -> None:
        self.lanes = [lane.actions for lane in schedule.lanes]
        self.graph, self.plan, self.assignment, self.lowered = graph, plan, assignment, lowered
        self.duration = duration
        self.form = form_of(schedule)
        self.positions = [0] * len(self.lanes)
        self.free_at = [0.0] * len(self.lanes)
        self.needs: dict[Action, tuple[Action, ...]] = {}
        self.lanes_of_stage: dict[tuple[str, int, int], tuple[int, ...]] = {}
        self.done: dict[Action, float] = {}
        self.passed_at: dict[Action, dict[int, float]] = {}
        self.waiters: dict[Action, set[int]] = {}
        self.events: list[TimelineEvent] = []
        self.queue = deque(range(len(self.lanes)))

    def advance_all(self) -> None:
        while self.queue:
            lane = self.queue.popleft()
            while self.positions[lane] < len(self.lanes[lane]) and self._advance(lane):
                pass

    def _advance(self, lane: int) -> bool:
        action = self.lanes[lane][self.positions[lane]]
        resource = ACTION_TABLE[action.kind].resource
        if resource is Resource.SEND:
            return self._send(action, lane)
        if resource is Resource.RECEIVE:
            return self._post(action, lane)
        return self._compute(action)

    def _needs(self, action: Action) -> tuple[Action, ...]:
        if action not in self.needs:
            self.needs[action] = dependencies(
                action, self.graph, self.plan, self.assignment, lowered=self.lowered, form=self.form
            )
        return self.needs[action]

    def _send(self, action: Action, lane: int) -> bool:
        if not self._is_met(action, (lane,)):
            return False
        self._pass(action, lane)
        return True

    def _post(self, action: Action, lane: int) -> bool:
        (send,) = self._needs(action)
        self._pass(action, lane)
        if send not in self.done:
            self.waiters.setdefault(send, set()).add(lane)
        return True

    def _pass(self, action: Action, lane: int) -> None:
        """Go past a message; it is complete when all lanes of its stage have passed it."""
        self.positions[lane] += 1
        passed_at = self.passed_at.setdefault(action, {})
        passed_at[lane] = self.free_at[lane]
        if len(passed_at) == len(self._lanes_of(action)) and ACTION_TABLE[action.kind].resource is Resource.SEND:
            self._complete(action, max(passed_at.values()))

    def _receive_done_at(self, receive: Action) -> float | None:
        """When a receive completes: posted in all lanes of its stage, and sent."""
        (send,) = self._needs(receive)
        if len(self.passed_at.get(receive, ())) < len(self._lanes_of(receive)):
            return None
        return self.done.get(send)

    def _compute(self, action: Action) -> bool:
        together = self._together(action)
        lanes = tuple(dict.fromkeys(lane for each in together for lane in self._lanes_of(each)))
        at_head = {self._head(lane) for lane in lanes}
        if not at_head <= set(together) or not all(self._is_met(each, lanes) for each in together):
            return False
        needs_done_at = [self._done_at(need) for each in together for need in self._needs(each)]
        start = max([*needs_done_at, *(self.free_at[lane] for lane in lanes)])
        for each in together:
            self._occupy(each, start)
        self.queue.extend(lanes)
        return True

    def _together(self, action: Action) -> tuple[Action, ...]:
        if ACTION_TABLE[action.kind].resource is not Resource.COLLECTIVE:
            return (action,)
        return tuple(action._replace(replica=replica) for replica in range(self.plan.units[action.unit].data_parallel_size))

    def _occupy(self, action: Action, start: float) -> None:
        end = start + self.duration(action)
        for lane in self._lanes_of(action):
            if end > start:
                self.events.append(TimelineEvent(action, lane, start, end))
            self.positions[lane] += 1
            self.free_at[lane] = end
        self._complete(action, end)

    def _is_met(self, action: Action, lanes: tuple[int, ...]) -> bool:
        """Whether all dependencies are complete; if not, wake `lanes` when the missing one is."""
        for need in self._needs(action):
            is_receive = ACTION_TABLE[need.kind].resource is Resource.RECEIVE
            if (self._receive_done_at(need) if is_receive else self.done.get(need)) is None:
                awaited = self._needs(need)[0] if is_receive else need
                self.waiters.setdefault(awaited, set()).update(lanes)
                return False
        return True

    def _done_at(self, action: Action) -> float:
        is_receive = ACTION_TABLE[action.kind].resource is Resource.RECEIVE
        done_at = self._receive_done_at(action) if is_receive else self.done[action]
        assert done_at is not None, f"{action} is not complete"
        return done_at

    def _complete(self, action: Action, time: float) -> None:
        self.done[action] = time
        self.queue.extend(sorted(self.waiters.pop(action, ())))

    def _head(self, lane: int) -> Action | None:
        actions = self.lanes[lane]
        return actions[self.positions[lane]] if self.positions[lane] < len(actions) else None

    def _lanes_of(self, action: Action) -> tuple[int, ...]:
        stage = action.unit, action.replica, action.stage
        if stage not in self.lanes_of_stage:
            self.lanes_of_stage[stage] = self.plan.lanes_of_stage(*stage)
        return self.lanes_of_stage[stage]

"""What hosts issue to GPUs for a lowered schedule, for the replay of NCCL (`benchmarks/nccl_replay.py`)."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from benchmarks.nccl_replay import COMPUTE_STREAM, Kernel, run_kernels
from multimodal.values.action import Action, ActionKind, Place, Resource
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape
from tests.unit.schedule.schedule_cases import reduced_together
from tests.unit.values.work.dependencies import dependencies


@dataclass
class Rank:
    """Everything that one rank's host issues, in order."""

    kernels: list[Kernel] = field(default_factory=list)
    computed: list[Kernel] = field(default_factory=list)
    issued: dict[Action, Kernel] = field(default_factory=dict)

    def issue(self, action: Action, stream: Hashable, waits_for: Sequence[Kernel]) -> Kernel:
        """Append a kernel; communication waits for what the host has issued to compute until then."""
        before = [] if stream == COMPUTE_STREAM else self.computed[-1:]
        kernel = Kernel(str(action), stream, [*waits_for, *before])
        self.kernels.append(kernel)
        self.issued[action] = kernel
        if stream == COMPUTE_STREAM:
            self.computed.append(kernel)
        return kernel


def replay(
    schedule: Schedule, *, num_queues: int, track_of: Callable[[Action], Hashable], posted_ahead: int = 0
) -> dict[int, str]:
    """Run a lowered schedule; return rank -> what stands at the head of a queue of it for ever. Empty: it finished.

    track_of: the communicator that carries a send or a receive; posted_ahead: number of slots by which receives are posted before
    they stand in the lane.
    """
    ranks = issue_all(schedule, track_of=track_of, posted_ahead=posted_ahead)
    return run_kernels({rank: issued.kernels for rank, issued in ranks.items()}, num_queues=num_queues).stuck


def issue_all(
    schedule: Schedule,
    *,
    track_of: Callable[[Action], Hashable],
    posted_ahead: int = 0,
    seconds_of: Callable[[Action], float] = lambda action: 0.0,
) -> dict[int, Rank]:
    """Return what every rank's host issues for its lane; seconds_of: how long computations take."""
    step = schedule.shape
    ranks: dict[int, Rank] = defaultdict(Rank)
    for lane in schedule.lanes:
        for action in _posted_ahead(lane.actions, posted_ahead):
            for rank in lane.ranks:
                _issue(ranks[rank], action, step, track_of)
    for rank, issued in ranks.items():
        for action, kernel in issued.issued.items():
            kernel.seconds = seconds_of(action) if action.kind.resource is Resource.COMPUTE else 0.0
            kernel.peers += [ranks[peer].issued[other] for peer, other in _peers(rank, action, step) if peer != rank]
    return dict(ranks)


def _posted_ahead(actions: Sequence[Action], slots: int) -> list[Action]:
    """Return actions with their receives so many slots earlier."""
    moved = [
        (index - slots if action.kind in (ActionKind.RECEIVE_FORWARD, ActionKind.RECEIVE_BACKWARD) else index, index, action)
        for index, action in enumerate(actions)
    ]
    return [action for _, _, action in sorted(moved, key=lambda each: each[:2])]


def _issue(rank: Rank, action: Action, step: StepShape, track_of: Callable[[Action], Hashable]) -> None:
    resource = action.kind.resource
    if resource is Resource.COMPUTE:
        needs = [rank.issued[need] for need in dependencies(action, step, lowered=True) if need in rank.issued]
        rank.issue(action, COMPUTE_STREAM, needs)
    elif resource is Resource.COLLECTIVE:
        rank.issue(action, ("replicas", action.unit, action.stage), [])
    elif (sent := rank.issued.get(_other_end(action))) is not None:
        rank.issued[action] = sent  # one call for both
    else:
        rank.issue(action, ("messages", track_of(action)), [])


def _peers(rank: int, action: Action, step: StepShape) -> list[tuple[int, Action]]:
    """Return the kernels of other ranks that one ends with, as rank and action."""
    resource = action.kind.resource
    if resource is Resource.COMPUTE:  # tensor and context parallel collectives
        return [(peer, action) for peer in _ranks_of(action.place, step)]
    if resource is Resource.COLLECTIVE:
        others = reduced_together(action, step)
        if step.plan.units[action.unit].is_unlike:  # one collective for each part of a matrix, between some of these ranks
            return [(peer, other) for other in others for peer in _ranks_of(other.place, step)]
        stages = [step.plan.virtual_stage(action.unit, each.replica, action.stage).ranks for each in others]
        position = stages[action.replica].index(rank)
        return [(peers[position], other) for peers, other in zip(stages, others, strict=True)]
    assert action.peer is not None
    other = _other_end(action)
    own, theirs = _ranks_of(action.place, step), _ranks_of(action.peer, step)
    if action.unit == action.peer.unit:
        return [(theirs[own.index(rank)], other)]
    return [(peer, other) for peer in theirs]


def _other_end(action: Action) -> Action:
    assert action.peer is not None
    return Action(_OTHER_END[action.kind], *action.peer, peer=action.place, covers=action.covers)


def _ranks_of(place: Place, step: StepShape) -> tuple[int, ...]:
    return step.plan.virtual_stage(*place[:3]).ranks


_OTHER_END = {
    ActionKind.SEND_FORWARD: ActionKind.RECEIVE_FORWARD,
    ActionKind.RECEIVE_FORWARD: ActionKind.SEND_FORWARD,
    ActionKind.SEND_BACKWARD: ActionKind.RECEIVE_BACKWARD,
    ActionKind.RECEIVE_BACKWARD: ActionKind.SEND_BACKWARD,
}

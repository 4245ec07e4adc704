"""The keeper's decisions, told to it and read from it as supervisors and ranks do."""

from collections.abc import Callable
from dataclasses import asdict
from itertools import product

import pytest
from torch.distributed import HashStore

from megatron.runtime.recovery import ledger
from megatron.runtime.recovery.keeper import Keeper
from megatron.runtime.recovery.ledger import Ledger, Report, Verdict


class Run:
    """Nodes of two ranks and their keeper, whose clock the test moves."""

    def __init__(self, num_nodes: int) -> None:
        self.seconds = 0.0
        self.store = HashStore()
        self.ledger = Ledger(self.store, b"known to all of the run")
        self.keeper = Keeper(self.ledger, num_nodes=num_nodes, clock=lambda: self.seconds)
        self.incarnations = dict.fromkeys(range(num_nodes), 0)
        self.count = 0

    def tell(self, kind: str, **values: object) -> None:
        self.ledger.tell(kind, **values)
        self.keeper.step()

    def start(self, node: int) -> None:
        self.tell("started", node=node, incarnation=self.incarnations.setdefault(node, 0), num_ranks=2)

    def arrive(self, *nodes: int, generation: int, ranks: tuple[int, ...] = (0, 1), **report: object) -> None:
        for node, rank in product(nodes, ranks):
            values = {"node": node, "incarnation": self.incarnations[node], "local_rank": rank, "generation": generation}
            self.tell("arrived", **values, report=asdict(Report(**report)))

    def start_again(self, node: int) -> None:
        self.incarnations[node] = 1
        self.start(node)

    def die(self, node: int) -> None:
        self.tell("died", node=node, incarnation=self.incarnations[node])

    def verdict(self, generation: int) -> Verdict:
        verdict = self.ledger.verdict(generation, seconds=0.01)
        assert verdict is not None
        return verdict

    def nodes(self, generation: int) -> tuple[int, ...] | None:
        verdict = self.ledger.verdict(generation, seconds=0.01)
        return None if verdict is None else verdict.nodes

    def signals(self, generation: int) -> list[str]:
        found = (self.ledger.next_signal(generation, index, seconds=0.01) for index in range(3))
        return [signal for signal in found if signal is not None]

    def beat(self, node: int, rank: int) -> None:
        self.count += 1
        self.ledger.set_flag(f"beat/{node}/{self.incarnations[node]}/{rank}", str(self.count))


@pytest.fixture
def run() -> Run:
    started = Run(3)
    for node in range(3):
        started.start(node)
    started.arrive(2, 0, generation=1)
    assert started.nodes(1) is None, "node 1 is not there"
    started.arrive(1, generation=1)
    return started


def test_the_first_generation_has_all_nodes_in_order(run: Run) -> None:
    verdict = run.verdict(1)
    assert (verdict.nodes, verdict.holding, verdict.done_steps) == ((0, 1, 2), (), None)


def test_it_says_once_which_nodes_do_not_come(caplog: pytest.LogCaptureFixture) -> None:
    started = Run(3)
    started.start(1)
    started.arrive(1, generation=1)
    for second in (59.0, 61.0, 200.0):
        started.seconds = second
        started.keeper.step()
    assert [record.getMessage() for record in caplog.records] == [
        "the run waits for nodes 0, 2 to start; are their supervisors running?"
    ]


def test_a_death_cuts_and_the_others_go_on_with_the_step_that_some_have_finished(run: Run) -> None:
    run.die(0)
    assert run.signals(1) == ["cut"]
    outcome = {"number": 5, "loss": 2.0, "generator_loss": 0.0, "grad_norm": 1.5}
    run.arrive(1, generation=2, done_steps=4, formed=1, pipelines=({"nodes": [0], "num_microbatches": 2},))
    assert run.nodes(2) is None
    run.arrive(2, generation=2, ranks=(0,), done_steps=4, formed=1)
    run.arrive(2, generation=2, ranks=(1,), done_steps=5, formed=1, outcome=outcome)
    verdict = run.verdict(2)
    assert (verdict.nodes, verdict.holding, verdict.done_steps, verdict.outcome) == ((1, 2), (1, 2), 5, outcome)
    assert verdict.pipelines == ({"nodes": [0], "num_microbatches": 2},)


def test_a_second_death_is_not_waited_for_before_and_starts_anew_after_the_verdict(run: Run) -> None:
    run.die(0)
    run.arrive(1, generation=2, done_steps=3)
    run.die(2)
    assert run.nodes(2) == (1,)
    run.die(1)
    assert run.signals(2) == ["cut"]
    assert run.nodes(3) is None


def test_a_node_that_returns_is_let_in_after_the_step_and_has_nothing(run: Run) -> None:
    run.die(0)
    run.arrive(1, 2, generation=2, done_steps=3)
    run.start_again(0)
    run.arrive(0, generation=1, ranks=(0,))
    assert run.signals(2) == [], "one of its ranks is not ready"
    run.arrive(0, generation=1, ranks=(1,))
    assert run.signals(2) == ["join"]
    run.arrive(2, 1, generation=3, done_steps=7)
    verdict = run.verdict(3)
    assert (verdict.nodes, verdict.incarnations, verdict.holding, verdict.done_steps) == ((1, 2, 0), (0, 0, 1), (1, 2), 7)


def test_a_node_that_starts_again_before_it_is_missed_was_lost(run: Run) -> None:
    run.start_again(0)
    assert run.signals(1) == ["cut"]
    run.arrive(1, 2, generation=2, done_steps=3)
    assert run.nodes(2) == (1, 2)


def test_supervisors_of_lost_nodes_are_not_waited_for_when_the_run_is_over() -> None:
    run = Run(2)
    run.tell("finished", exit_code=0)
    ticks = iter(range(10**6))
    run.keeper._clock = lambda: float(next(ticks))
    run.keeper.run(num_supervisors=2)
    assert run.keeper.exit_code == 0 and next(ticks) >= 30


def test_a_death_while_nodes_join_cuts_those_that_are_still_in_the_step(run: Run) -> None:
    run.die(0)
    run.arrive(1, 2, generation=2, done_steps=3)
    run.start_again(0)
    run.arrive(0, generation=1)
    run.die(1)
    assert run.signals(2) == ["join", "cut"]
    run.arrive(2, generation=3, done_steps=3)
    assert run.nodes(3) == (2, 0)


def test_a_silent_rank_is_lost_and_a_beating_one_is_not(run: Run) -> None:
    for second in range(40):
        run.seconds = float(second)
        for node in range(3):
            for rank in range(2):
                if (node, rank) != (1, 1) or second < 5:
                    run.beat(node, rank)
        run.keeper.step()
    assert run.ledger.flag("kill/1/0") is not None
    assert run.ledger.flag("kill/0/0") is None and run.ledger.flag("kill/2/0") is None
    assert run.signals(1) == ["cut"]


def test_a_survivor_that_never_arrives_is_left_out(run: Run) -> None:
    run.die(0)
    run.arrive(1, generation=2, done_steps=3)
    run.seconds = 29.0
    run.keeper.step()
    assert run.nodes(2) is None
    run.seconds = 31.0
    run.keeper.step()
    assert run.nodes(2) == (1,)


def test_a_step_may_take_longer_than_the_timeout_while_a_node_waits_to_join(run: Run) -> None:
    run.die(0)
    run.arrive(1, 2, generation=2, done_steps=3)
    run.start_again(0)
    run.arrive(0, generation=1)
    run.seconds = 300.0
    run.keeper.step()
    assert run.signals(2) == ["join"] and run.ledger.flag("kill/1/0") is None
    run.arrive(1, generation=3, done_steps=4)
    run.seconds = 331.0
    run.keeper.step()
    assert run.ledger.flag("kill/2/0") is not None, "it has not left the step that another one has left"
    assert run.nodes(3) == (1, 0)


def test_a_rank_that_leaves_by_itself_makes_all_others_leave(run: Run) -> None:
    run.arrive(1, generation=2, ranks=(0,), done_steps=3)
    assert run.signals(1) == ["cut"]
    run.arrive(1, generation=2, ranks=(1,), done_steps=3)
    run.arrive(0, 2, generation=2, done_steps=3)
    assert run.nodes(2) == (0, 1, 2)


def test_too_few_nodes_wait_for_one_to_return(run: Run) -> None:
    run.die(0)
    run.die(1)
    run.arrive(2, generation=2, done_steps=3)
    run.arrive(2, generation=3, done_steps=3, waits=True)
    assert run.signals(2) == [], "nobody need be told to leave"
    assert run.nodes(3) is None
    run.start_again(0)
    run.arrive(0, generation=1)
    assert run.nodes(3) == (2, 0)


def test_a_node_without_a_place_does_not_end_generations(run: Run) -> None:
    run.die(0)
    run.arrive(1, 2, generation=2, done_steps=3)
    run.arrive(2, generation=3, is_spare=True)
    run.seconds = 100.0
    run.keeper.step()
    assert run.signals(2) == [] and run.ledger.flag("kill/1/0") is None
    run.die(1)
    assert run.nodes(3) == (2,)


def test_what_all_fail_for_ends_those_that_wait(run: Run) -> None:
    run.ledger.set_flag("failed", "2")
    run.keeper.step()
    assert run.signals(1) == ["over:2"]
    assert run.verdict(2).exit_code == 2


def forge(run: Run) -> None:
    """Tell the keeper that the run is over, as a stranger who knows how, but not the token."""
    Ledger(run.store, b"a stranger's guess").tell("finished", exit_code=0)


def write_event(run: Run, content: bytes) -> None:
    run.store.set(f"recovery/event/{run.store.add('recovery/events', 1) - 1}", content)


DISTURBANCES: dict[str, Callable[[Run], object]] = {
    "a stranger's end of the run": forge,
    "nothing sensible": lambda run: write_event(run, b"\xff{no JSON"),
    "node 1 starts, once more": lambda run: write_event(run, run.store.get("recovery/event/1")),
    "something written where the next event belongs": lambda run: run.store.set(
        f"recovery/event/{run.store.add('recovery/events', 0)}", "finished"
    ),
    "a number that is taken by a rank that dies then": lambda run: run.store.add("recovery/events", 1),
    "a stranger's failure": lambda run: run.store.set("recovery/flag/failed", "0"),
    "a death that lacks its incarnation": lambda run: run.ledger.tell("died", node=0),
    "something unknown": lambda run: run.ledger.tell("frobnicated"),
}


@pytest.mark.parametrize("disturb", DISTURBANCES.values(), ids=DISTURBANCES)
def test_only_events_of_the_run_count(run: Run, disturb: Callable[[Run], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_LATE_SECONDS", 0.0)
    run.die(0)
    disturb(run)
    run.keeper.step()
    assert run.keeper.exit_code is None
    run.arrive(1, 2, generation=2, done_steps=4)
    run.keeper.step()
    assert run.nodes(2) == (1, 2)
    run.tell("finished", exit_code=0)
    assert run.keeper.exit_code == 0


def test_strangers_are_reported_once(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        forge(run)
        run.keeper.step()
    assert caplog.text.count("without the token of this run") == 1


def test_an_event_whose_number_was_passed_over_counts_when_it_comes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_LATE_SECONDS", 0.0)
    index = run.ledger.store.add("events", 1) - 1
    run.keeper.step()
    run.tell("recovered", generation=1)
    run.ledger.store.set(f"event/{index}", '{"kind": "finished", "exit_code": 3}')
    run.keeper.step()
    assert run.keeper.exit_code == 3


def test_a_sign_of_life_that_is_put_back_is_none(run: Run) -> None:
    key, known = "recovery/flag/beat/1/0/0", []
    for _ in range(2):
        run.beat(1, 0)
        run.keeper.step()
        known.append(run.store.get(key))
    for seconds, sealed in ((20, known[0]), (40, known[1])):
        run.seconds = seconds
        run.store.set(key, sealed)
        run.keeper.step()
    assert run.ledger.flag("kill/1/0") == "1"


def test_verdicts_and_flags_of_strangers_are_not_there(run: Run) -> None:
    stranger = Ledger(run.store, b"a stranger's guess")
    stranger.publish(Verdict(2, exit_code=0))
    stranger.signal(1, 0, "over:0")
    run.store.set("recovery/flag/start", b"\xfftheirs")
    assert run.nodes(2) is None and run.signals(1) == []
    assert run.ledger.first_to_say("start", "ours") == run.ledger.first_to_say("start", "others") == "ours"

"""The rules of the event kernel, in examples; its Python reference gives the same of any schedule (`test_every_schedule.py`)."""

import numpy as np
import pytest

from multimodal.schedule.simulate_events import EventArrays, NodeKind, simulate_events


def starts(rows):
    return np.cumsum([0, *map(len, rows)])


def flat(rows, dtype=np.int64):
    return np.array([value for row in rows for value in row], dtype)


def build_arrays(lanes, *, seconds, needs=None, fillers=(), kinds=None, latency=None, receivers=None, links=None):
    """Nodes 0, 1, ... are computations without needs unless told otherwise."""
    nodes = range(len(seconds))
    needs = [(needs or {}).get(node, ()) for node in nodes]
    receivers = [(receivers or {}).get(node, ()) for node in nodes]
    links = [(links or {}).get(node, -1) for node in nodes]
    return EventArrays(
        starts(lanes),
        flat(lanes),
        flat([[node in fillers for node in lane] for lane in lanes], np.uint8),
        np.array([(kinds or {}).get(node, NodeKind.COMPUTE) for node in nodes], np.uint8),
        starts(needs),
        flat(needs),
        starts(receivers),
        flat(receivers),
        np.array(seconds, np.float64),
        np.array([(latency or {}).get(node, 0.0) for node in nodes]),
        np.array(links),
        max(links) + 1,
    )


def test_fillers_run_while_their_carrier_waits_and_the_rest_right_after_it():
    arrays = build_arrays([[0], [1, 2, 3, 4, 5]], seconds=[5, 2, 2, 2, 1, 1], needs={4: [0]}, fillers={1, 2, 3})
    assert simulate_events(arrays).start_seconds.tolist() == [
        0,
        0,
        2,
        4,
        6,
        7,
    ]  # The third would start at 4, when the carrier waits.
    arrays = build_arrays([[0], [1, 2, 3, 4, 5]], seconds=[4, 2, 2, 2, 1, 1], needs={4: [0]}, fillers={1, 2, 3})
    assert simulate_events(arrays).start_seconds.tolist() == [0, 0, 2, 5, 4, 7]  # At 4 the carrier is ready: it goes first.


def test_a_carrier_that_is_ready_goes_before_its_fillers():
    arrays = build_arrays([[0, 1, 2]], seconds=[1, 1, 1], fillers={0})
    assert simulate_events(arrays).start_seconds.tolist() == [1, 0, 2]


def test_a_filler_that_is_not_ready_is_passed_over_until_after_the_carrier():
    lanes, needs = [[0, 1], [2, 3, 4, 5]], {2: [0], 4: [1]}
    arrays = build_arrays(lanes, seconds=[1, 4, 1, 1, 1, 1], needs=needs, fillers={2, 3})
    assert simulate_events(arrays).start_seconds.tolist() == [0, 1, 6, 0, 5, 7]


def test_what_is_left_of_the_fillers_runs_before_the_carrier_is_sent():
    arrays = build_arrays(
        [[0, 1, 2], [3]], seconds=[5, 1, 0, 1], needs={2: [1], 3: [2]}, fillers={0}, kinds={2: NodeKind.SEND}, receivers={2: [1]}
    )
    assert simulate_events(arrays).start_seconds.tolist() == [1, 0, 6, 6]


def test_sends_of_a_lane_go_one_by_one_and_their_latencies_overlap():
    arrays = build_arrays(
        [[0, 1, 2], [3], [4]],
        seconds=[1, 2, 2, 1, 1],
        needs={1: [0], 2: [0], 3: [1], 4: [2]},
        kinds={1: NodeKind.SEND, 2: NodeKind.SEND},
        receivers={1: [1], 2: [2]},
        latency={1: 10, 2: 10},
    )
    assert simulate_events(arrays).start_seconds.tolist() == [0, 1, 3, 13, 15]


@pytest.mark.parametrize(("receivers", "links"), [({2: [2], 3: [2]}, {}), ({2: [2], 3: [3]}, {2: 0, 3: 0})])
def test_a_receiver_and_a_shared_link_take_one_message_after_the_other(receivers, links):
    lanes = [[0, 2], [1, 3], [4], [5]]
    arrays = build_arrays(
        lanes,
        seconds=[1, 1, 2, 2, 1, 1],
        needs={2: [0], 3: [1], 4: [2], 5: [3]},
        kinds={2: NodeKind.SEND, 3: NodeKind.SEND},
        receivers=receivers,
        links=links,
    )
    assert simulate_events(arrays).start_seconds.tolist() == [0, 0, 1, 3, 3, 5]
    alone = build_arrays(lanes, seconds=[1, 1, 2, 2, 1, 1], needs={2: [0], 3: [1], 4: [2], 5: [3]}, kinds={2: 1, 3: 1})
    assert simulate_events(alone).start_seconds.tolist() == [0, 0, 1, 1, 3, 3]


def test_a_collective_waits_for_all_lanes_and_holds_up_none():
    arrays = build_arrays([[0, 2, 3], [1, 2]], seconds=[1, 4, 3, 1], needs={2: [0, 1]}, kinds={2: NodeKind.COLLECTIVE})
    times = simulate_events(arrays)
    assert times.start_seconds.tolist() == [0, 0, 4, 1]
    assert times.end_seconds.tolist() == [1, 4, 7, 2]


def test_lanes_wait_at_a_gate_for_its_needs_but_not_for_each_other():
    arrays = build_arrays([[1, 2, 3], [2, 0]], seconds=[1, 4, 0, 1], needs={2: [0]}, kinds={2: NodeKind.GATE})
    assert simulate_events(arrays).positions.tolist() == [1, 0]  # its need comes behind it
    arrays = build_arrays([[0], [1, 2, 3], [2, 4]], seconds=[3, 4, 0, 1, 1], needs={2: [0]}, kinds={2: NodeKind.GATE})
    assert simulate_events(arrays).start_seconds.tolist() == [0, 0, 4, 4, 3]


def test_lanes_that_wait_for_each_other_stop():
    times = simulate_events(build_arrays([[0, 1], [2]], seconds=[1, 1, 1], needs={1: [2], 2: [1]}))
    assert np.isnan(times.start_seconds).tolist() == [False, True, True]
    assert times.positions.tolist() == [1, 0]

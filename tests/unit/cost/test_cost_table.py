import pytest

from multimodal.cost.cost_table import CostTable, TableCosts, build_table_step
from multimodal.values.action import Action, ActionKind, Place
from multimodal.values.backward_need import BackwardNeed, layers_backward_need
from multimodal.values.errors import ConfigError
from multimodal.values.model_graph import Role

FROZEN, TRAINED = {"forward": 1.0}, {"forward": 1.0, "backward": 2.0}
PASSED_ON = {"forward": 1.0, "input_gradient": 1.0, "weight_gradient": 0.0}


def table_of(units, **more):
    return CostTable.from_dict({"num_microbatches": 2, "units": units, **more})


def needs_of(units):
    model, _ = build_table_step(table_of(units))
    return {
        name: [
            layers_backward_need(model.graph, name, model.plan.virtual_stage(name, 0, stage).layers)
            for stage in range(len(entry["stages"]))
        ]
        for name, entry in units.items()
    }


def test_each_stage_gets_a_lane_and_each_microbatch_a_sample():
    model, assignment = build_table_step(
        table_of({"vision": {"stages": [TRAINED] * 2}, "llm": {"upstream": ["vision"], "stages": [TRAINED] * 3}})
    )
    assert model.plan.lanes == ((0,), (1,), (2,), (3,), (4,))
    assert [model.plan.lanes_of_stage("llm", 0, stage) for stage in range(3)] == [(2,), (3,), (4,)]
    assert [assignment.num_microbatches(unit, 0) for unit in model.graph.unit_names] == [2, 2]


def test_ranks_place_virtual_stages_and_colocated_units():
    units = {
        "vision": {"stages": [TRAINED] * 2},
        "llm": {"upstream": ["vision"], "stages": [TRAINED] * 4, "ranks": [0, 1, 1, 0]},
    }
    plan = build_table_step(table_of(units))[0].plan
    assert plan.lanes == ((0,), (1,))
    assert [plan.lanes_of_stage("llm", 0, stage) for stage in range(4)] == [(0,), (1,), (1,), (0,)]


@pytest.mark.parametrize(
    ("upstream", "roles"),
    [
        ({"a": []}, {"a": "backbone"}),
        ({"a": [], "b": ["a"]}, {"a": "encoder", "b": "backbone"}),
        ({"a": [], "b": [], "c": ["a", "b"]}, {"a": "encoder", "b": "encoder", "c": "backbone"}),
        ({"a": [], "b": ["a"], "c": ["b"]}, {"a": "encoder", "b": "backbone", "c": "generator"}),
        ({"c": ["b"], "b": ["a"], "a": []}, {"a": "encoder", "b": "backbone", "c": "generator"}),
        ({"a": [], "b": ["a"], "c": ["a"]}, {"a": "backbone", "b": "generator", "c": "generator"}),
    ],
)
def test_roles_follow_from_the_place(upstream, roles):
    graph = build_table_step(table_of({name: {"upstream": up, "stages": [TRAINED]} for name, up in upstream.items()}))[0].graph
    assert {unit.name: unit.role for unit in graph.units} == {name: Role(role) for name, role in roles.items()}


def test_gradients_exist_where_the_table_lists_them():
    full, weight, passed, none = BackwardNeed.FULL, BackwardNeed.WEIGHT_GRADIENT, BackwardNeed.INPUT_GRADIENT, BackwardNeed.NONE
    behind = {"upstream": ["vision"]}
    frozen = {"vision": {"stages": [FROZEN] * 2}, "llm": {**behind, "stages": [TRAINED] * 2}}
    assert needs_of(frozen) == {"vision": [none, none], "llm": [weight, full]}
    projector = {"vision": {"stages": [FROZEN, TRAINED]}, "llm": {**behind, "stages": [PASSED_ON] * 2}}
    assert needs_of(projector) == {"vision": [none, weight], "llm": [passed, passed]}
    inference = {"vision": {"stages": [FROZEN]}, "llm": {**behind, "stages": [FROZEN] * 2}}
    assert needs_of(inference) == {"vision": [none], "llm": [none, none]}


def test_costs_are_the_tables():
    stage = {"forward": [0.5, 0.25], "backward": [1.0, 3.0]}
    table = table_of(
        {"vision": {"stages": [FROZEN, stage]}, "llm": {"upstream": ["vision"], "stages": [PASSED_ON]}}, send_seconds=0.1
    )
    costs = TableCosts(table)
    assert [costs.compute(Action(kind, "vision", 0, 1, 1)).seconds for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)] == [
        0.25,
        3.0,
    ]
    assert costs.compute(Action(ActionKind.INPUT_GRADIENT, "vision", 0, 1, 1)).seconds == 1.5
    assert costs.compute(Action(ActionKind.WEIGHT_GRADIENT, "llm", 0, 0, 1)).seconds == 0.0
    forward = Action(ActionKind.SEND_FORWARD, "vision", 0, 0, 1, Place("vision", 0, 1, 1))
    backward = Action(ActionKind.SEND_BACKWARD, "vision", 0, 1, 1, Place("vision", 0, 0, 1))
    assert costs.transfer(forward).latency_seconds == 0.1
    assert costs.transfer(backward).latency_seconds == 0.0  # nobody would send it


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_microbatches": 0}, "positive integer, found 0"),
        ({"num_microbatches": 10**9}, "num_microbatches: expected an integer of at most 100,000"),
        ({"num_microbatches": True}, "num_microbatches: expected a positive integer, found True"),
        ({"send_seconds": "fast"}, "send_seconds: expected a number of at least 0, found 'fast'"),
        ({"units": {}}, "units: expected each unit's name with its upstream and stages, found {}"),
    ],
)
def test_wrong_tables_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        CostTable.from_dict({"num_microbatches": 2, "units": {"a": {"stages": [FROZEN]}}, **change})
    with pytest.raises(ConfigError, match="'num_microbatches' is missing"):
        CostTable.from_dict({"units": {}})


@pytest.mark.parametrize(
    ("unit", "message"),
    [
        ({"stages": [FROZEN], "ranks": [True]}, r"ranks\[0\]: expected an integer"),
        ({"stages": [FROZEN], "ranks": [10**12]}, r"ranks\[0\]: .* of at most"),
        ({"stages": [FROZEN], "ranks": [0, 1]}, "1 stages but 2 ranks"),
        ({"stages": [FROZEN], "ranks": [3]}, "leave gaps"),
        ({"stages": {}}, "stages: expected a list with at least one stage, found {}"),
        ({"stages": []}, "at least one stage"),
        ({"stages": [{"forward": [1.0]}]}, "unit 'a', stage 0, forward: .* 2 microbatches"),
        ({"stages": [{"forward": -1}]}, "a number of at least 0, found -1"),
        ({"stages": [{"forward": 1, "bakward": 1}]}, "unknown key 'bakward'"),
        ({"stages": [{"backward": 1}]}, "'forward' is missing"),
        ({"stages": [{"forward": 1, "backward": 1, "input_gradient": 1}]}, "not both"),
        ({"stages": [{"forward": 1, "input_gradient": 1}]}, "weight_gradient is missing"),
        ({"stages": [FROZEN], "upstream": ["c"]}, "names 'c', which is no unit"),
        ({"stages": [FROZEN], "upstream": ["b", "b"]}, r"unit 'a', upstream\[1\]: names 'b' again; keep one"),
        ({"stages": [FROZEN], "upstream": ["a"]}, "units a wait for each other in a circle"),
    ],
)
def test_wrong_units_are_refused(unit, message):
    with pytest.raises(ConfigError, match=message):
        table_of({"b": {"stages": [FROZEN], "ranks": [0]}, "a": unit})


@pytest.mark.parametrize(
    ("units", "message"),
    [
        (
            {"a": {"stages": [TRAINED]}, "b": {"upstream": ["a"], "stages": [TRAINED, FROZEN]}},
            "unit 'b', stage 1: lists no backward, but unit 'a' upstream has one",
        ),
        ({"a": {"stages": [TRAINED, FROZEN]}}, "unit 'a', stage 1: lists no backward, but stage 0 has one"),
        (
            {name: {"upstream": up, "stages": [TRAINED]} for name, up in {"a": [], "b": ["a"], "c": ["b"], "d": ["c"]}.items()},
            "one unit must be the backbone",
        ),
    ],
)
def test_tables_of_no_model_are_refused(units, message):
    with pytest.raises(ConfigError, match=message):
        build_table_step(table_of(units))

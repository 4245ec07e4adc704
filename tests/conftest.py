"""Settings that every test relies on, and the two speeds: by default a part of the tests, with --all every one of them.

Deep are tests, and rows of parametrised tests, that repeat what others show: `@pytest.mark.deep`, or with `when`, a function of a
row's parameters, for those rows of which it is true.
"""

import atexit
import gc
import os
from collections.abc import Iterable, Iterator
from inspect import signature
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported anywhere: with more threads, processes forked from this one hang after a backward in the parent.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as runs have it

# Before Triton is imported anywhere: without a GPU its kernels run in its interpreter. Libraries import it on their own.
if not os.path.exists("/dev/nvidiactl"):
    os.environ["TRITON_INTERPRET"] = "1"

SHARE_OF_EXAMPLES = 6
"""Without --all, hypothesis draws one in so many of a test's examples, but no fewer than the following."""
FEWEST_EXAMPLES = 3

LONG = {
    **dict.fromkeys(("test_transformer_engine.py", "test_engine_training.py"), 0),
    **dict.fromkeys(("test_stopped_ranks.py", "test_plan_auto.py", "test_data_runs.py", "test_denoisers.py"), 1),
    **dict.fromkeys(("test_create_groups.py", "test_recovery.py", "test_pretrain.py", "test_megatron_checkpoint.py"), 2),
}
"""Files of long tests -> the third of all tests that begins with them. Each of three processes gets a third and, when it has none
left, takes from the end of another's, so that all end with short ones. One alone starts ranks with Transformer Engine."""

LONGEST_VALUE, LONGEST_ID = 32, 120
"""Characters of a string's part in the id of a row, and of the id."""

# The same examples every time, none kept from another; and no limits of time, as a busy machine exceeds any sensible one.
DRAWS_ANEW = "BRAID_MASTER_EXAMPLES" in os.environ
SLOW = HealthCheck.too_slow, HealthCheck.data_too_large
settings.register_profile("braid", deadline=None, derandomize=not DRAWS_ANEW, database=None, suppress_health_check=SLOW)
settings.load_profile("braid")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run deep tests, too, and all examples of hypothesis")


def pytest_make_parametrize_id(val: object) -> str | None:
    """Of long strings their beginning; rows that are then alike get numbers."""
    if not isinstance(val, str | bytes):
        return None
    text = repr(val)[2:-1] if isinstance(val, bytes) else val.encode("unicode_escape").decode("ascii")
    return f"{text[:LONGEST_VALUE]}..." if len(text) > LONGEST_VALUE + 3 else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Nothing that is imported or collected goes before the end: collect no garbage of it, now or later."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """Give what was frozen back in the end, or extension modules say that it leaks; pytest looks through it five times before."""
    atexit.register(gc.unfreeze)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    long = [item.nodeid for item in items if len(item.nodeid.partition("[")[2]) > LONGEST_ID]
    if long:
        raise pytest.UsageError(f"ids of more than {LONGEST_ID} characters; give the rows names (ids=...): {', '.join(long)}")
    if config.getoption("all"):
        items[:] = _in_order(items)
        return
    deep = {item for item in items if _is_deep(item)}
    if planted := sorted(item.nodeid for item in deep if "planted" in item.nodeid):
        raise pytest.UsageError(f"planted errors are never deep; take the mark from {', '.join(planted)}")
    config.hook.pytest_deselected(items=list(deep))
    items[:] = _in_order(item for item in items if item not in deep)
    if not DRAWS_ANEW:
        for function in {item.obj for item in items if hasattr(getattr(item, "obj", None), "hypothesis")}:
            _draw_fewer(function)


def _in_order(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the tests with long ones at the beginning of the third of all that is theirs."""
    thirds: list[list[pytest.Item]] = [[], [], []]
    others = []
    for item in items:
        (thirds[LONG[item.path.name]] if item.path.name in LONG else others).append(item)
    share = (sum(map(len, thirds)) + len(others)) // len(thirds)
    for third in thirds:
        count = max(0, share - len(third))
        third += others[:count]
        del others[:count]
    return [*thirds[0], *thirds[1], *thirds[2], *others]


def _is_deep(item: pytest.Item) -> bool:
    """Tell whether a mark of it, or of its file, says so without a condition or with one that its parameters meet."""
    for mark in item.iter_markers("deep"):
        when = mark.kwargs.get("when")
        if when is None or when(**{name: item.callspec.params[name] for name in signature(when).parameters}):
            return True
    return False


def _draw_fewer(function: Any) -> None:
    given = function._hypothesis_internal_use_settings
    number = max(min(FEWEST_EXAMPLES, given.max_examples), given.max_examples // SHARE_OF_EXAMPLES)
    function._hypothesis_internal_use_settings = settings(given, max_examples=number)

"""What a step launches, counted on the CPU: a ceiling, so that nobody adds operations to every layer without knowing."""

from benchmarks.launches import measure

MOST = {"forward": 48, "backward": 72}
"""Operations that a layer more may add to an action."""
MOST_OF_ENDS = 50
"""Those of an action beside its layers': embedding, projector, head, loss."""


def test_actions_launch_no_more_than_they_did() -> None:
    rows = measure([])
    for action, most in MOST.items():
        for unit in ("vision", "llm"):
            row = rows[f"{action} of {unit}"]
            assert 0 < row["of a layer"] <= most
            assert row["operations"] - 4 * row["of a layer"] <= MOST_OF_ENDS

"""The errors a user can meet; each message says what was found, what was expected, where, and what to change."""

from importlib.util import find_spec


class BraidError(ValueError):
    """Base of every error that Braid raises about its input.

    place: keys and indices that lead to the wrong value in the plain form of a file; the line in the file follows from it.
    """

    def __init__(self, message: str, *, place: tuple[str | int, ...] = ()) -> None:
        super().__init__(message)
        self.place = place


def require_package(name: str, *, extra: str, needed_by: str, error: type[BraidError]) -> None:
    """Raise the error of something that needs a package which is not installed; extra: of Braid's, which brings it."""
    if find_spec(name) is None:
        raise error(f"{needed_by}: needs the package '{name}'; install it with: pip install 'braid[{extra}]'")


class ConfigError(BraidError):
    """A flag or a configuration file is wrong, contradictory, or would be ignored."""


class ModelError(BraidError):
    """A model graph does not describe a model that can be built."""


class PlanError(BraidError):
    """A plan does not fit the model, the ranks, or itself."""


class NothingFitsError(PlanError):
    """No plan fits the memory of so many GPUs."""


class AssignmentError(BraidError):
    """An assignment drops, repeats or misplaces an atom."""


class ScheduleError(BraidError):
    """A schedule breaks a dependency, misses or repeats an action, or cannot finish."""


class DataError(BraidError):
    """A sample, an image or a manifest cannot be used."""


class RemoteError(BraidError):
    """Remote data cannot be read, for a reason that does not lie in a sample."""


class CheckpointError(BraidError):
    """A checkpoint is missing, damaged, or belongs to another model."""


def first_line(problem: BaseException) -> str:
    """Return the first line of an error's text, or its type; torch's errors go on with stacks of C++."""
    return (str(problem).strip() or type(problem).__name__).splitlines()[0]

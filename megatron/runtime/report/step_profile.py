"""Profiles some steps: by torch's profiler into a file, or between the marks that Nsight Systems waits for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from megatron.runtime.flags.configuration import LoggingConfig


class StepProfile:
    """Megatron's --profile of one rank: steps from --profile-step-start to the one before --profile-step-end."""

    def __init__(self, logging: LoggingConfig, *, rank: int, name_actions: Callable[[bool], None]) -> None:
        """name_actions: called with True while profilers are to be given the names of actions, and with False afterwards."""
        self._logging, self._rank, self._name_actions = logging, rank, name_actions
        self._is_running = False
        self._profiler: torch.profiler.profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile the code inside if the step is one of those."""
        logging = self._logging
        is_wanted = logging.profile and self._rank in logging.profile_ranks
        if is_wanted and number == logging.profile_step_start:
            self._is_running = True
            self._name_actions(True)
            if logging.use_pytorch_profiler:
                self._profiler = torch.profiler.profile()
                self._profiler.start()
            else:
                torch.cuda.cudart().cudaProfilerStart()  # type: ignore[attr-defined]
        yield
        if number == logging.profile_step_end - 1:
            self.close()

    def close(self) -> None:
        """Stop the profiler if it runs, even if training ends before --profile-step-end."""
        if not self._is_running:
            return
        self._is_running = False
        self._name_actions(False)
        if self._profiler is None:
            torch.cuda.cudart().cudaProfilerStop()  # type: ignore[attr-defined]
            return
        self._profiler.stop()
        assert self._logging.report_dir is not None, "a rule of the flags asks for it"
        self._logging.report_dir.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self._logging.report_dir / f"profile_rank_{self._rank}.json"))
        self._profiler = None

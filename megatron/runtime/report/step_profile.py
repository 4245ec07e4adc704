"""Profiles some steps, by torch or for Nsight Systems, and finds ranks that compute longer than others with the same layers."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from megatron.runtime.flags.configuration import LoggingConfig
from multimodal.values.plan import Plan


class StepProfile:
    """Megatron's --profile of one rank: steps from --profile-step-start to the one before --profile-step-end."""

    def __init__(self, logging: LoggingConfig, *, rank: int, name_actions: Callable[[bool], None]) -> None:
        """name_actions: called with True while profilers are to be given the names of actions, and with False afterwards."""
        self._logging, self._rank, self._name_actions = logging, rank, name_actions
        self._running = ExitStack()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile the code inside if the step is one of those."""
        logging = self._logging
        if logging.profile and self._rank in logging.profile_ranks and number == logging.profile_step_start:
            self._running.enter_context(self._profiling())
        yield
        if number == logging.profile_step_end - 1:
            self.close()

    def close(self) -> None:
        """Stop the profiler if it runs, even if training ends before --profile-step-end."""
        self._running.close()

    @contextmanager
    def _profiling(self) -> Iterator[None]:
        self._name_actions(True)
        if self._logging.use_pytorch_profiler:
            with torch.profiler.profile() as profiler:
                yield
            assert self._logging.report_dir is not None, "a rule of the flags asks for it"
            self._logging.report_dir.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self._logging.report_dir / f"profile_rank_{self._rank}.json"))
        else:
            with torch.cuda.profiler.profile():
                yield
        self._name_actions(False)


class Stragglers:
    """Sums each rank's seconds over the steps of a report; batches even out over steps, slow devices do not."""

    def __init__(self, plan: Plan) -> None:
        stages: dict[int, set[tuple[str, int]]] = defaultdict(set)  # rank -> its stages: unit, index in a replica
        for name, unit in plan.units.items():
            for replica in unit.replicas:
                for index, stage in enumerate(replica.stages):
                    for rank in stage.ranks:
                        stages[rank].add((name, index))
        peers: dict[tuple[tuple[str, int], ...], list[int]] = defaultdict(list)
        for rank, own in stages.items():
            peers[tuple(sorted(own))].append(rank)
        self._peers = list(peers.values())
        self._seconds: list[float] = []

    def add(self, seconds: Sequence[float]) -> None:
        """Add a step; seconds: computing time of each rank."""
        self._seconds = [total + new for total, new in zip(self._seconds or [0.0] * len(seconds), seconds, strict=True)]

    def tell(self) -> str:
        """Return one line about the steps since the last call, and forget them."""
        seconds = self._seconds
        medians = [statistics.median(seconds[rank] for rank in peers) if seconds else 0.0 for peers in self._peers]
        compared = zip(self._peers, medians, strict=True)
        ratios = [(seconds[rank] / median, rank) for peers, median in compared if median for rank in peers]
        self._seconds = []
        ratio, rank = max(ratios, default=(1.0, 0))
        return f"stragglers: rank {rank} computes longest, {ratio:.2f} times the median of the ranks with the same layers"

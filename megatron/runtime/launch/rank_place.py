"""The place of this process among those of its run, from the launcher's environment, and the secret that they share."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from multimodal.values.errors import ConfigError
from multimodal.values.plan import MOST_RANKS
from multimodal.values.typed_reader import shown


class StoreGoneError(RuntimeError):
    """The store in which ranks meet does not answer: its process was killed or is frozen."""


@dataclass(frozen=True)
class RankPlace:
    """This process's place among all others, and the address at which they meet."""

    rank: int
    size: int
    local_rank: int
    address: str
    port: int
    launcher_keeps_store: bool
    """True if torchrun keeps the store in which the ranks meet, False if rank 0 does."""

    @property
    def keeps_store(self) -> bool:
        """True if the store lives in this process."""
        return self.rank == 0 and not self.launcher_keeps_store


def find_rank_place(environ: Mapping[str, str]) -> RankPlace:
    """Read RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; without them it is alone. Raises ConfigError if invalid."""
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):  # srun's and mpirun's
        if environ.get(name, "1") != "1" and "WORLD_SIZE" not in environ:
            found = f"{name} is {environ[name]} and WORLD_SIZE is not set, so each process would train alone"
            raise ConfigError(f"{found}; start one torchrun on each node, as scripts/slurm/pretrain.sh does")
    size = _whole_number(environ, "WORLD_SIZE", default=1)
    if not 1 <= size <= MOST_RANKS:
        raise ConfigError(
            f"the environment variable WORLD_SIZE must be the number of processes, found '{size}'; launch with torchrun"
        )
    rank = _whole_number(environ, "RANK", default=0)
    local_rank = _whole_number(environ, "LOCAL_RANK", default=rank)
    for name, number in (("RANK", rank), ("LOCAL_RANK", local_rank)):
        if number >= size:
            fix = f"ranks count from 0 to {size - 1}; launch with torchrun"
            raise ConfigError(f"the environment variable {name} is {number} but WORLD_SIZE is {size}: {fix}")
    port = _whole_number(environ, "MASTER_PORT", default=0 if size == 1 else 29500)
    if port > 65535:
        raise ConfigError(f"the environment variable MASTER_PORT is {port}, expected a port: 1 to 65535")
    address, keeps = environ.get("MASTER_ADDR") or "127.0.0.1", environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return RankPlace(rank, size, local_rank, address, port, launcher_keeps_store=keeps)


def find_ranks_per_node(environ: Mapping[str, str]) -> int | None:
    """Return the number of processes on a node according to torchrun; None with other launchers."""
    text = environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() and int(text[:9]) else None


def _whole_number(environ: Mapping[str, str], name: str, *, default: int) -> int:
    text = environ.get(name, str(default))
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        meaning = "the number of processes" if name == "WORLD_SIZE" else "a whole number"
        raise ConfigError(f"the environment variable {name} must be {meaning}, found {shown(text)}; launch with torchrun")
    return int(text)


LEAST_BYTES = 16
HOW = "make one for each run, readable by you alone: (umask 077; python -c 'import secrets; print(secrets.token_hex())' > FILE)"


def read_token(path: Path, *, flag: str) -> bytes:
    """Return the token in a file; raises ConfigError. flag: that names the file."""
    try:
        token = path.read_bytes()
    except OSError as problem:
        raise ConfigError(f"{flag} {path}: the run's token cannot be read ({problem.strerror}); {HOW}") from problem
    return check_token(token, where=f"{flag} {path}")


def check_token(token: bytes, *, where: str) -> bytes:
    """Return a token without space around it; raises ConfigError for one that is too short, or cannot be a variable's value."""
    token = token.strip()
    if len(token) < LEAST_BYTES or b"\0" in token:
        raise ConfigError(f"{where}: the token has {len(token)} bytes, expected at least {LEAST_BYTES}, none zero; {HOW}")
    return token

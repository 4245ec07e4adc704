"""The secret by which processes of a run know each other: those that decode, and those of an elastic run."""

from pathlib import Path

from multimodal.values.errors import ConfigError

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

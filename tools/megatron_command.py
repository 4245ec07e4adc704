"""Reads a training command of Megatron: the flags themselves, or those that a shell script would start it with.

The script is run by a restricted bash without programs: variables, arrays, conditions and loops are bash's own, whatever would
start a program is only noted, and files can be neither written nor sourced.
"""

import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from multimodal.values.errors import ConfigError

_SECONDS = 20
_START = 'exec 3>&"$1"; _text=$2; shift 2; eval "$_text"'
_BEFORE = Path(__file__).with_name("read_script.sh").read_text()
_OUT_OF_PLACE = (
    (r"(?m)^(\s*)set\s+[-+][a-zA-Z].*$", r"\1:"),  # an error must not end the script
    (r"\$\{(\w+):?\?[^}]*\}", r"${\1}"),
    (r"<[a-z]+((?: [a-z]+)+)>", "placeholder"),  # <some dir>, for the reader to fill in
    (r"(?m)(?<=\s)(?:&>>?|[12]?>>?(?!&))\s*[^\s<>;|&)]+", ""),  # redirections, which are refused
    (r"(?m)^(\s*)(?:exec\s+)?(?:[\w.~${}/-]*/)?(python[\d.]*|torchrun|srun|mpirun|bash|sh)(?=\s)", r"\1\2"),
)
_PROGRAM = re.compile(r"[\w./${}-]+\.py")
_LAUNCHERS = "torch.distributed", "debugpy", "pdb"
"""Modules that start a program."""
_NUMBER = re.compile(r"(?:--n(?:proc|nodes)(?:[-_]per[-_]node)?|mpi(?:run|exec)\b.* -np?)[= ](\d+)")
_OF_JOB = re.compile(r"(?:-N|--nodes|--gpus-per-node|--gres=gpu(?::[a-z]\w*)?)[= :](\d+)")
_OVERRIDE = re.compile(r"\+{0,2}[a-z_]+(?:\.[a-z_]+)+=.*|mixed_precision=.*")
_MODULES = {"LLM": "llm", "VISION": "encoder"}
"""Modules whose sizes Megatron-Bridge's examples of MegatronMIMO read from MIMO_MODULE_SIZE -> flags of the same."""
_BRIDGE = {"freeze-language-model": "freeze-LM", "freeze-vision-model": "freeze-ViT", "sequence-length": "seq-length"}
"""Names that Megatron-Bridge's configuration has for flags."""
_OWN = ("BASH_SOURCE", "HOME", "HOSTNAME", "PWD", "RANDOM", "SECONDS", "USER")
"""Variables that every shell has."""


class Command(NamedTuple):
    """A training command."""

    program: str
    flags: Mapping[str, tuple[str, ...]]
    """Names without dashes in front, with dashes inside -> values; of several the last."""
    world_size: int | None
    """Processes that the launcher starts; None: not known."""
    unset: tuple[str, ...] = ()
    """Variables of the script that nobody sets, which count as empty."""


def read_command(words: Sequence[str]) -> Command:
    """Read flags, or a script followed by variables (NAME=VALUE) and its arguments; raises ConfigError."""
    script = Path(words[0])
    if words[0].startswith("-") or not script.is_file():
        if not any(word.startswith("--") for word in words):
            raise ConfigError(f"{script}: no such file; give the script that starts the training, or its flags behind --")
        return _command(list(words))
    variables = dict(word.split("=", 1) for word in words[1:] if re.match(r"[A-Za-z_]\w*=", word))
    arguments = [word for word in words[1:] if not re.match(r"[A-Za-z_]\w*=", word)]
    text = script.read_text(encoding="utf-8", errors="replace")
    commands = [_command(started) for started in _started(script, text, variables=variables, arguments=arguments)]
    found = max(commands, key=lambda each: len(each.flags), default=None)
    if found is None or not found.flags:
        raise ConfigError(f"{script}: starts no program with flags; give the script that starts the training, or its flags")
    if found.world_size is None and (numbers := _OF_JOB.findall(" ".join(re.findall(r"(?m)^#SBATCH.*$", text)))):
        found = found._replace(world_size=math.prod(map(int, numbers)))
    return found._replace(unset=_unset(text, variables=variables, num_arguments=len(arguments)))


def _started(script: Path, text: str, *, variables: Mapping[str, str], arguments: Sequence[str]) -> list[list[str]]:
    """Return the words of every command that a script starts."""
    bash = shutil.which("bash")
    if bash is None:
        raise ConfigError("there is no bash to read a script with; give the flags themselves behind --")
    for pattern, replacement in _OUT_OF_PLACE:
        text = re.sub(pattern, replacement, text)
    with tempfile.TemporaryFile() as notes:
        environment = {**{name: os.environ.get(name, "") for name in _OWN}, **variables, "PATH": "/nowhere"}
        told = str(notes.fileno())
        command = [bash, "--norc", "--noprofile", "-r", "-c", _START, script.name, told, _BEFORE + text, *arguments]
        silent: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        process = subprocess.Popen(command, env=environment, pass_fds=(notes.fileno(),), start_new_session=True, **silent)
        try:
            process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise ConfigError(f"the script does not end in {_SECONDS} s; give the flags themselves behind --") from None
        notes.seek(0)
        words = notes.read().decode(errors="replace").split("\0")
    commands: list[list[str]] = [[]]
    for word in words[:-1]:
        if word == "\x01":
            commands.append([])
        else:
            commands[-1].append(word)
    return [_unwrapped(command) for command in commands if command]


def _unwrapped(words: list[str]) -> list[str]:
    """Return a command that a launcher gets as one word (srun sh -c "...") as words."""
    for word in words:
        if " --" in word and _PROGRAM.search(word):
            with suppress(ValueError):  # a text with quotation marks of its own
                inner = shlex.split(word.rsplit(";", 1)[-1].rsplit("&&", 1)[-1])
                return [*words[: words.index(word)], *inner]
    return words


def _command(words: list[str]) -> Command:
    starts = [
        index
        for index, (before, word) in enumerate(zip(["", *words], words, strict=False))
        if _PROGRAM.fullmatch(word) or (before == "-m" and not word.startswith(_LAUNCHERS))
    ]
    start = next((index for index in starts if any(word.startswith("-") or "=" in word for word in words[index + 1 :])), None)
    launcher = " ".join(words[: start or 0])
    flags: dict[str, list[str]] = {}
    current: list[str] = []
    given = words[0 if start is None else start + 1 :]
    split = (shlex.split(word) if re.match(r"--[\w-]+ ", word) else [word.strip("'\"")] for word in given)
    for word in chain.from_iterable(split):
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word[2:].partition("=")
            current = flags[name.replace("_", "-")] = [value] if equals else []
        elif _OVERRIDE.fullmatch(word):
            key, _, value = word.partition("=")
            name = key.rsplit(".", 1)[-1].replace("_", "-")
            if key == "mixed_precision":
                flags[value.partition("_")[0]] = []
            elif value.lower() not in ("false", "null", "none"):
                flags[_BRIDGE.get(name, name)] = [] if value.lower() == "true" else [value]
        else:
            current.append(word)
    for module, size, value in re.findall(r"\bMIMO_([A-Z]+)_(TP|PP|DP|OFFSET)=(\d+)", launcher):
        if module in _MODULES:
            name = f"{_MODULES[module]}-{size.lower()}".replace("encoder-pp", "encoder-pipeline-model-parallel-size")
            flags.setdefault(name, [value])
    if freezes := flags.pop("freeze-llm", None):
        flags |= {"freeze-LM": []} if freezes == ["true"] else {}
    numbers = [int(number) for number in _NUMBER.findall(launcher)]
    world_size = numbers[0] * (numbers[1] if len(numbers) > 1 else 1) if numbers else None
    program = "" if start is None else words[start]
    return Command(program, {name: tuple(values) for name, values in flags.items()}, world_size)


def _unset(text: str, *, variables: Mapping[str, str], num_arguments: int) -> tuple[str, ...]:
    """Return the variables and arguments that a script uses, without a default, and nobody sets."""
    text = re.sub(r"(?m)(^|\s)#.*$", "", text)
    outside = re.sub(r"(?ms)^\s*(?:function\s+)?\w+\s*\(\)\s*\{.*?(?:^|; *)\}", "", text)  # functions have arguments of their own
    found = re.findall(r"\$\{?([1-9])(?=\W|$)", outside) + re.findall(r"\$\{?([A-Z]\w*)(?=\W|$)", text)
    used = dict.fromkeys(name for name in found if not re.fullmatch(r"SLURM_\w*ID\w*|MASTER_\w+|\w*RANK|OPTARG", name))
    has_default = {*_OWN, *re.findall(r"\$\{(\w+):?[-=+]", text), *re.findall(r"\b([A-Za-z_]\w*)\+?=", text)}
    has_default |= {*re.findall(r"-n\s+\"?\$\{?(\w+)", text)}  # what only counts if it is set
    looped = re.findall(r"\b(?:for|read(?: -\w+(?: '')?)*)\s+(\w+)", text)
    is_set = {*variables, *has_default, *looped, *map(str, range(1, num_arguments + 1))}
    return tuple(f"argument {name}" if name.isdigit() else name for name in used if name not in is_set)

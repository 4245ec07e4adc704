"""Indexes the data of a run ahead of it; --check reads every image, clip and frame once and lists what is broken.

python tools/index_data.py [--check] <flags of pretrain_mllm.py, as for a run with --plan auto>

The index is kept beside the data, or in --data-cache-path, for the run. Ends with exit code 2 if something is broken.
"""

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from multimodal.values.errors import ConfigError, DataError
from tools.command_line import Parser, parser_beside_a_run, program, read_run_flags

if TYPE_CHECKING:
    from multimodal.data.manifest import ManifestSource

_BLOCK = 1024
"""Items that wait for being read at a time."""


def build_parser() -> Parser:
    """Return the parser of the tool's own flags."""
    parser = parser_beside_a_run("index_data.py", __doc__)
    parser.add_argument("--check", action="store_true", help="Read every item once, and list all that cannot be read.")
    return parser


@program("index_data.py")
def main(argv: Sequence[str]) -> None:
    """Index, and check if asked to; raises BraidError."""
    given, config, graph = read_run_flags(build_parser(), argv)
    from megatron.runtime.feed.data_sets import open_manifest, text_settings  # behind the flags, as torch takes seconds

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    if config.data.sample_program is not None:
        raise ConfigError("--data-path: a program's samples (digits, FILE.py) have no index; use a manifest")
    tokenizer, chat = text_settings(config).open()
    tolerant = replace(config.data, bad_sample="skip", bad_samples_per_thousand=1000.0) if given.check else config.data
    num_broken, num_samples = 0, 0
    for path in dict.fromkeys(named.path for named in (*config.data.mixture, *config.evaluation.valid_sets.values())):
        source = open_manifest(path, config=replace(config, data=tolerant), graph=graph, tokenizer=tokenizer, chat=chat)
        num_samples += len(source)
        for problem in _problems(source) if given.check else ():
            print(problem, flush=True)
            num_broken += 1
    if num_broken:
        raise DataError(f"{num_broken} items are broken, listed above; repair or remove them, or train with --bad-sample skip")
    print(f"{num_samples:,} samples" + (", all of whose items can be read" if given.check else ""))


def _problems(source: "ManifestSource") -> Iterator[str]:
    """Yield what is wrong with samples that could not be indexed, and with items that cannot be decoded, each once."""
    from multimodal.data.index.sample_indexer import BAD

    found = [reason.removeprefix(BAD) for reason in source.skipped if reason.startswith(BAD)]
    items = ((index, item) for index in range(len(source)) for item in range(len(source.lengths(index).items)))
    blocks, seen = iter(lambda: list(islice(items, _BLOCK)), []), set[str]()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        decoded = chain.from_iterable(pool.map(partial(_problem, source), some) for some in blocks)
        for problem in chain(found, decoded):
            if problem is not None and problem not in seen:
                seen.add(problem)
                yield problem


def _problem(source: "ManifestSource", place: tuple[int, int]) -> str | None:
    try:
        source.item(*place)
    except DataError as problem:
        return str(problem)
    return None


if __name__ == "__main__":
    sys.exit(main())

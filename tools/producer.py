"""Tokenises and decodes for the ranks of runs: python tools/producer.py --listen HOST:PORT --token FILE; see docs/data.md.

Start one on each CPU node that can read the files of --data-path, and give the run all addresses with --producers and the token
with --producer-token.
"""

import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.runtime.launch.rank_place import read_token
from multimodal.values.errors import ConfigError
from tools.command_line import Parser, at_least_zero, count, program


def build_parser() -> Parser:
    """Return the parser."""
    parser = Parser(prog="producer.py", description=__doc__)
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="Address of this machine in the run's network.")
    parser.add_argument("--token", required=True, type=Path, metavar="FILE", help="The secret that the run's ranks know, too.")
    parser.add_argument("--num-workers", type=count, default=os.cpu_count() or 1, help="Processes that decode (all cores).")
    parser.add_argument("--cache-mib", type=at_least_zero, default=1024, help="Most decoded items kept for other ranks (1024).")
    return parser


@program("producer.py")
def main(argv: Sequence[str]) -> None:
    """Serve until stopped."""
    given = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    token = read_token(given.token, flag="--token")
    from megatron.runtime.feed.producers.producer import Producer  # needs an extra
    from megatron.runtime.feed.producers.wire import parse_address

    address = parse_address(given.listen)
    try:
        listener = socket.create_server(address, backlog=1024)
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise ConfigError(f"--listen {given.listen}: {reason}; give an address of this machine, and a free port") from problem
    producer = Producer(token=token, num_workers=given.num_workers, cache_bytes=given.cache_mib * 2**20)
    host, port = listener.getsockname()[:2]
    print(f"producer listens at {host}:{port}, {given.num_workers} processes decode", flush=True)
    try:
        producer.serve(listener)
    except KeyboardInterrupt:
        pass
    finally:
        producer.close()


if __name__ == "__main__":
    sys.exit(main())

"""Trains a multimodal LLM: `torchrun --nproc-per-node N pretrain_mllm.py --config FILE.yaml [flags]`; see `--help`."""

import faulthandler
import logging
import os
import sys
import warnings
from datetime import timedelta

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
warnings.filterwarnings("ignore", module=r"megatron\.core.*|torch\..*")

from megatron.runtime.flags.arguments import parse_arguments  # noqa: E402
from megatron.runtime.launch.failure import Ending, StopRequests  # noqa: E402


def main(argv: list[str]) -> None:
    """Parse, join the other ranks, train; every failure ends all ranks with one message."""
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # a file that is cut off while it is mapped ends a rank by SIGBUS, without a word
    ending = Ending()
    stop_requests = StopRequests(ending)
    stop_requests.listen()
    try:
        config = parse_arguments(argv, environ=os.environ)
        if config.parallelism.overlaps_collectives_alone:
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # kernels start in the order in which they are issued
        level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING
        logging.basicConfig(level=level, format="%(message)s")
        for chatty in ("megatron.core", "torch"):
            logging.getLogger(chatty).setLevel(logging.ERROR)

        from megatron.runtime import platform

        platform.install()
        if config.parallelism.elastic:
            from megatron.runtime.training.elastic import ElasticRun

            ElasticRun(config, ending=ending, stop_requests=stop_requests).run()
        from megatron.runtime.launch.distributed_setup import join_world, leave_world
        from megatron.runtime.training.loop import train
        from megatron.runtime.training.resumption import resume
        from megatron.runtime.training.run import prepare_run

        world = join_world(
            backend=config.training.distributed_backend,
            timeout=timedelta(minutes=config.training.distributed_timeout_minutes),
            ending=ending,
        )
        run = prepare_run(config, world, stop_requests=stop_requests)
        resume(run)
        train(run)
        leave_world(world)
    except Exception as problem:
        ending.fail(problem)


if __name__ == "__main__":
    main(sys.argv[1:])

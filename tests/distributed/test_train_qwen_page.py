"""docs/train_qwen.md is a script: its blocks run as they stand, on two processes, with a tiny model."""

import json
import os
import re
import subprocess
import sys
from multiprocessing.connection import Client, Listener
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Thread

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")

from safetensors.torch import load_file

from tests.distributed.launch import HANG_SECONDS, REPOSITORY, Forked
from tests.distributed.test_llava_example import write_inputs

BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PYTHON = """#!{python} -ES
import os
import sys
from multiprocessing.connection import Client
with Client({address!r}) as server:
    server.send((sys.argv[1:], os.getcwd(), dict(os.environ)))
    code, said = server.recv()
print(said, end="")
sys.exit(code)
"""
"""Has programs run by `run_programs`."""


def run_programs(listener: Listener) -> None:
    """Run programs in processes that were forked behind the imports, one after another."""
    while True:
        with listener.accept() as caller, NamedTemporaryFile() as output:
            if (asked := caller.recv()) is None:
                return
            (program, *argv), folder, environment = asked
            forked = Forked(program, argv, environment, folder=Path(folder), output=Path(output.name))
            caller.send((forked.wait(HANG_SECONDS), forked.said))


@pytest.mark.deep  # test_llava_example.py trains this model in two stages; sanity tests parse what stands on pages
def test_the_blocks_of_the_page_train_answer_and_export(tmp_path: Path) -> None:
    model, data = write_inputs(tmp_path, "qwen2_5_vl")
    run = tmp_path / "run"
    inputs = {"MODEL": model, "DATA": data, "IMAGE": min((data.parent / "images").iterdir()), "RUN": run}
    small = {
        "NUM_GPUS": "2",
        "CLUSTER": "examples/clusters/cpu.yaml",
        "BATCH": "4",
        "PLAN_FLAGS": "--transformer-impl local --time-budget 0.3",
        "FLAGS": "--train-iters 2 --eval-iters 1 --num-workers 0",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    script = "".join(BLOCK.findall((REPOSITORY / "docs" / "train_qwen.md").read_text()))
    with Listener(family="AF_UNIX") as listener:
        python = tmp_path / "python"
        python.write_text(PYTHON.format(python=sys.executable, address=listener.address))
        python.chmod(0o755)
        server = Thread(target=run_programs, args=(listener,), daemon=True)
        server.start()
        environment = {**os.environ, **{name: str(value) for name, value in inputs.items()}, **small}
        command = ["bash", "-c", script]
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
        )
        with Client(listener.address) as caller:
            caller.send(None)
        server.join()
    assert done.returncode == 0, done.stdout + done.stderr
    *_, opened = done.stdout.splitlines()
    assert opened == "opened"
    assert f"starting at step 0 from the weights of {run}/projector/step_00000002" in done.stdout
    steps = [entry for entry in map(json.loads, (run / "all.jsonl").read_text().splitlines()) if "evaluation" not in entry]
    assert [entry["step"] for entry in steps] == [1, 2]
    assert (run / "report" / "index.html").is_file()
    before, after = (load_file(folder / "model.safetensors") for folder in (model, run / "trained"))
    assert before.keys() == after.keys() and any(not before[key].equal(after[key]) for key in before)

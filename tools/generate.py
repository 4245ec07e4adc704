"""Asks a trained model, on one process; see docs/generate.md.

python tools/generate.py --load CHECKPOINTS --prompt "What is on this picture?" --image cat.png
python tools/generate.py --load-hf DIR --interactive                       a conversation; /image, /audio, /video FILE attach one
python tools/generate.py --load CHECKPOINTS --jsonl held_out.jsonl --output answers.jsonl
python tools/generate.py --load CHECKPOINTS --prompt "draw 47" --output out.png    an image, if the model has a generator
python tools/generate.py --load CHECKPOINTS --held-out 3 --run-flags --config config.yaml    what a run was not trained on

Encoders and projectors are Braid's own, transformers' `generate` chooses the tokens: any model answers that can be trained.
"""

import json
import os
import sys
from argparse import REMAINDER
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.runtime.flags.field_flags import flag_of
from multimodal.data.sample_source import NUM_FRAMES
from multimodal.values.errors import ConfigError
from tools.command_line import Parser, at_least_zero, count, program

if TYPE_CHECKING:
    from megatron.runtime.generation.answering import Answering, Message
    from megatron.runtime.generation.whole_model import StoredModel
    from megatron.runtime.session import Session


def build_parser() -> Parser:
    """Return the parser."""
    parser = Parser(prog="generate.py", description=__doc__)
    models = parser.add_mutually_exclusive_group(required=True)
    models.add_argument("--load", type=Path, metavar="CHECKPOINTS", help="Folder of a run, or one of its checkpoints.")
    models.add_argument("--load-hf", type=Path, metavar="DIR", help="Folder of Hugging Face.")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--prompt", metavar="TEXT", help="One question.")
    asked.add_argument("--interactive", action="store_true", help="Questions from the terminal, one a line, in one conversation.")
    asked.add_argument("--jsonl", type=Path, metavar="FILE", help="Samples in any form of --data-path: their last answers anew.")
    asked.add_argument("--held-out", type=count, metavar="N", help="The run's first held-out samples.")
    parser.add_argument("--image", nargs="+", default=[], metavar="FILE", help="Images before the --prompt.")
    parser.add_argument("--audio", nargs="+", default=[], metavar="FILE", help="Clips of sound before the --prompt.")
    parser.add_argument("--video", nargs="+", default=[], metavar="FILE", help="Videos before the --prompt.")
    parser.add_argument("--num-frames", type=count, metavar="N", help=f"Most frames of each video, evenly spread ({NUM_FRAMES}).")
    parser.add_argument("--video-fps", type=float, metavar="X", help="Frames of a second of each video, up to --num-frames.")
    parser.add_argument("--run-flags", nargs=REMAINDER, metavar="FLAG", help="--held-out: the run's flags, behind all others.")
    parser.add_argument("--output", type=Path, metavar="FILE", help="A JSON object a line; of --prompt: an image or sound.")
    parser.add_argument("--unit", metavar="NAME", help="The generator that makes the --output, if several might.")
    parser.add_argument("--size", metavar="WxH", help="Size of the image in pixels (the smallest square).")
    parser.add_argument("--seconds", type=float, metavar="S", help="Length of the sound (the shortest clip).")
    parser.add_argument("--num-steps", type=count, metavar="N", help="Steps from noise to the --output (50).")
    parser.add_argument("--guidance-scale", type=float, metavar="G", help="Weight of the prompt in the --output (1).")
    parser.add_argument("--tokenizer-model", metavar="PATH", help="Tokenizer in place of the one that the run names.")
    parser.add_argument("--chat-template", metavar="FILE", help="Chat template in place of the one that the run names.")
    parser.add_argument("--max-new-tokens", type=count, default=64, metavar="N", help="The longest answer (64).")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default: the likeliest token each time.")
    parser.add_argument("--top-p", type=float, help="Choose among the likeliest tokens with this sum of probabilities.")
    parser.add_argument("--top-k", type=count, help="Choose among this many likeliest tokens.")
    parser.add_argument("--num-beams", type=count, default=1, metavar="N", help="Beams (1).")
    parser.add_argument("--seed", type=at_least_zero, default=0, help="Seed of the choices (0).")
    return parser


@program("generate.py")
def main(argv: Sequence[str]) -> None:
    """Answer; raises BraidError."""
    flags = build_parser().parse_args(argv)
    options = _generation_options(flags)
    if (flags.image or flags.audio or flags.video) and flags.prompt is None:
        raise ConfigError("--image, --audio and --video go with a --prompt; in a conversation attach one: /image FILE, say")
    frames = {name: given for name in ("num_frames", "video_fps") if (given := getattr(flags, name)) is not None}
    for name, given in frames.items():
        if not flags.video:
            raise ConfigError(f"{flag_of(name)} would be ignored: there is no --video; leave it out")
        if not given > 0:
            raise ConfigError(f"{flag_of(name)} {given}: expected a number above 0")
    if flags.held_out is not None and (flags.load is None or not flags.run_flags):
        raise ConfigError("--held-out needs --load and --run-flags: the checkpoints and flags of the run that holds samples out")
    if flags.output is not None and not flags.output.parent.is_dir():
        raise ConfigError(f"--output {flags.output}: there is no folder {flags.output.parent}; make it, or name another file")
    making = _making_options(flags)
    # Behind the flags, since torch takes seconds.
    from megatron.runtime.generation.answering import generate, open_answering
    from megatron.runtime.generation.drawing import make_item, size_of
    from megatron.runtime.generation.whole_model import open_model

    with open_model(flags.load or flags.load_hf, is_hugging_face=flags.load is None) as (session, model):
        changed = {"tokenizer_model": flags.tokenizer_model, "chat_template": flags.chat_template}
        model = model.with_texts(**{name: value for name, value in changed.items() if value is not None})
        if making is not None:
            made = make_item((session, model), flags.prompt, images=flags.image, audio=flags.audio, seed=flags.seed, **making)
            made.save(flags.output)
            print(f"{flags.output}: {size_of(made)}")
        elif flags.prompt is not None:
            files = {"images": flags.image, "audio": flags.audio, "videos": flags.video}
            print(generate((session, model), flags.prompt, **files, **frames, **options))
        elif flags.interactive:
            _talk(session, model, options)
        else:
            answering = _held_out(session, flags) if flags.held_out else open_answering(session, model, flags.jsonl)
            _answer_all(answering, num=flags.held_out or len(answering.source), options=options, output=flags.output)


def _making_options(flags: Any) -> dict[str, Any] | None:
    """Return the options of `make_item`; None if words are asked for."""
    names = "unit", "size", "seconds", "num_steps", "guidance_scale"
    options = {name: value for name in names if (value := getattr(flags, name)) is not None}
    if flags.output is None or flags.prompt is None:
        for name in options:
            raise ConfigError(
                f"{flag_of(name)} would be ignored: it is of images and sound; name one with --prompt TEXT --output FILE.png"
            )
        return None
    if flags.video:
        raise ConfigError("--video would be ignored: a --prompt, images and sound make an --output; leave one of the two out")
    from PIL import Image

    suffix, is_sound = flags.output.suffix.lower(), flags.output.suffix.lower() == ".wav"
    if not is_sound and suffix not in Image.registered_extensions():
        raise ConfigError(
            f"--output {flags.output}: of a --prompt it is a generator's image or sound; name a .png or .wav file, or use --jsonl"
        )
    if (other := "size" if is_sound else "seconds") in options:
        raise ConfigError(f"--{other} would be ignored: it is none of a {suffix} file's; leave it out")
    if not 0 <= options.get("seconds", 0) < float("inf"):
        raise ConfigError(f"--seconds {flags.seconds}: expected a number above 0")
    if flags.size is not None:
        width, _, height = flags.size.partition("x")
        if not (width.isdigit() and height.isdigit()):
            raise ConfigError(f"--size {flags.size}: expected WIDTHxHEIGHT in pixels, such as 256x256")
        options["size"] = int(width), int(height)
    return {**options, "kind": "audio" if is_sound else "image"}


def _generation_options(flags: Any) -> dict[str, Any]:
    if flags.temperature and not 1e-3 <= flags.temperature < float("inf"):
        raise ConfigError(f"--temperature {flags.temperature}: expected 0 (the likeliest token) or at least 0.001")
    if flags.top_p is not None and not 0 < flags.top_p <= 1:
        raise ConfigError(f"--top-p {flags.top_p}: expected a probability above 0, up to 1")
    if not flags.temperature and (flags.top_p is not None or flags.top_k is not None):
        raise ConfigError("--top-p and --top-k would be ignored: without a --temperature nothing is chosen at random; set one")
    sampling = {name: value for name in ("temperature", "top_p", "top_k") if (value := getattr(flags, name))}
    given = {"max_new_tokens": flags.max_new_tokens, "seed": flags.seed, "num_beams": flags.num_beams}
    return {**given, "do_sample": bool(sampling), **sampling}


def _held_out(session: "Session", flags: Any) -> "Answering":
    from megatron.runtime.checkpoint.manifest import read_newest
    from megatron.runtime.feed.data_sets import build_data_sets
    from megatron.runtime.flags.arguments import parse_arguments
    from megatron.runtime.generation.answering import Answering
    from multimodal.values.plan import Plan

    num_ranks = Plan.from_dict(read_newest(flags.load)[1].plan).num_ranks
    config = parse_arguments(flags.run_flags, environ={"WORLD_SIZE": str(num_ranks)})
    data = build_data_sets(config, session.graph)
    return Answering(session, data.valid.source, data.tokenizer)


def _answer_all(answering: "Answering", *, num: int, options: Mapping[str, Any], output: Path | None) -> None:
    lines, num_right = [], 0
    for index in range(min(num, len(answering.source))):
        said, expected = answering.answer(index, **options), answering.expected(index)
        lines.append(json.dumps({"index": index, "answer": said, "expected": expected}, ensure_ascii=False) + "\n")
        num_right += said == expected
        if output is None:
            print(f"{answering.asked(index).strip()}\n  -> {said}" + ("" if said == expected else f"    (expected: {expected})"))
    if output is not None:
        output.write_text("".join(lines))
    print(f"{num_right} of {len(lines)} answers are those in the data" + (f"; all in {output}" if output else ""))


def _talk(session: "Session", model: "StoredModel", options: Mapping[str, Any]) -> None:
    from megatron.runtime.generation.answering import generate, user_message

    messages: list[Message] = []
    files: dict[str, list[str]] = {"images": [], "audio": [], "videos": []}
    kinds = dict(zip(("/image", "/audio", "/video"), files, strict=True))
    print(f"A question a line; {' FILE, '.join(kinds)} FILE attach one to the next question, /new forgets, an empty line ends.")
    for line in iter(lambda: sys.stdin.readline().strip(), ""):
        command, _, path = line.partition(" ")
        if command in kinds:
            files[kinds[command]].append(path.strip())
        elif command == "/new":
            messages = []
        else:
            messages.append(user_message(line, **files))
            files = {kind: [] for kind in files}
            said = generate((session, model), messages, **options)
            messages.append({"role": "assistant", "content": [{"type": "text", "text": said}]})
            print(said, flush=True)


if __name__ == "__main__":
    sys.exit(main())

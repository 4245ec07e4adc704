"""A sample with text, an image and a video: tokens, positions, pixels, logits and answers are those of transformers."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("av", reason="PyAV is not installed (pip install 'braid[video]')")
pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")

import av
import transformers
from PIL import Image
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

import multimodal
from megatron.runtime.feed.packing import pack_language_microbatch
from megatron.runtime.generation.answering import open_answering
from megatron.runtime.generation.whole_model import open_model
from multimodal.model.latents import normalised_patches
from multimodal.values.assignment import Atom
from tests.distributed.hugging_face_models import qwen2_5_vl, qwen2_vl, qwen3_vl
from tests.distributed.launch import train
from tests.distributed.test_data_runs import producer
from tests.distributed.test_generate import forward_logits
from tests.distributed.wide_transformers import build_wide_model, double_precision
from tests.unit.data import video_processors
from tests.unit.data.chat.templates import CHATML, write_tokenizer
from tools import convert, generate

WIDTH, HEIGHT, TOTAL, FPS = 16, 8, 30, 10
BOUNDS = {"shortest_edge": 16, "longest_edge": 10**4}
PIXELS = "pixel_values", "pixel_values_videos"
IMAGES = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3, "patch_size": 2, "merge_size": 2, "temporal_patch_size": 2}


def write_clip(path: Path, *, num_frames: int = TOTAL) -> Path:
    """Noise of which no two frames are alike, without loss."""
    draw = np.random.default_rng(0)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=FPS)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "bgr0"
        for _ in range(num_frames):
            pixels = draw.integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return path


def write_model(folder: Path, make: partial[Any]) -> Any:
    """Write a tiny model with tokenizer, template and processors; returns transformers'."""
    write_tokenizer(folder, template=CHATML)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    names = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in names.items()}
    text = {**make.keywords["text_config"], "vocab_size": len(tokenizer)}
    model = build_wide_model(partial(make, text_config=text, **ids), folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({**IMAGES, "size": BOUNDS}))
    return model


FAMILIES: Mapping[str, tuple[partial[Any], type[Any]]] = {
    "qwen2-vl": (qwen2_vl, Qwen2_5_VLProcessor),
    "qwen2.5-vl": (qwen2_5_vl, Qwen2_5_VLProcessor),
    "qwen3-vl": (qwen3_vl, Qwen3VLProcessor),
}


class Theirs:
    """What transformers' processor makes of a clip and an image, that need no resizing, and of the text around them."""

    def __init__(self, folder: Path, graph: Any, kind: type[Any], messages: list[Any], clip: Path, image: Path) -> None:
        vision = graph.unit("vision").image
        processor = video_processors.build_processor(vision.video, patch_size=2)
        with av.open(str(clip)) as container:
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        metadata = video_processors.VideoMetadata(total_num_frames=len(frames), fps=float(FPS))
        metadata.frames_indices = video_processors.sampled(processor, metadata, num_frames=6)
        shown = self._normalised([frames[index] for index in metadata.frames_indices])
        patches, *grid = processor.patchify(shown, 2, 2, 2)
        still = self._normalised([np.asarray(Image.open(image))] * 2)
        self.given = {"pixel_values": processor.patchify(still, 2, 2, 2)[0][0], "pixel_values_videos": patches[0]}
        self.given |= {"image_grid_thw": torch.tensor([processor.patchify(still, 2, 2, 2)[1:]])}
        self.given |= {"video_grid_thw": torch.tensor([grid])}
        self.timed = {"second_per_grid_ts": torch.tensor([2 / metadata.sampled_fps], dtype=torch.float32)}
        start, end, token = "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"
        names = {"video_token": token, "vision_start_token": start, "vision_end_token": end, "video_processor": processor}
        own = SimpleNamespace(**names, _calculate_timestamps=partial(Qwen3VLProcessor._calculate_timestamps, None))
        expanded = kind.replace_video_token(own, {**self.given, "video_metadata": [metadata]}, 0)
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        text = tokenizer.apply_chat_template(messages, chat_template=CHATML, tokenize=False)
        num_tokens = int(self.given["image_grid_thw"].prod()) // 4
        text = text.replace(token, expanded).replace("<|image_pad|>", "<|image_pad|>" * num_tokens)
        self.ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        kinds = zip(("<|image_pad|>", token), (1, 2), strict=True)
        self.given["mm_token_type_ids"] = sum(
            (self.ids == tokenizer.convert_tokens_to_ids(name)) * number for name, number in kinds
        )

    def _normalised(self, frames: list[Any]) -> torch.Tensor:
        return (torch.from_numpy(np.stack(frames)).double().permute(0, 3, 1, 2)[None] / 255 - 0.5) / 0.25


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sample_with_a_video_is_what_transformers_make_of_it(name, tmp_path, capsys):
    make, kind = FAMILIES[name]
    folder, clip, image = tmp_path / "model", write_clip(tmp_path / "clip.mkv"), tmp_path / "image.png"
    Image.effect_noise((8, 12), 90).convert("RGB").save(image)
    model = write_model(folder, make)
    asked = [{"type": "text", "text": "look: "}, {"type": "image", "image": str(image)}, {"type": "text", "text": " at\n"}]
    asked += [{"type": "video", "video": str(clip)}, {"type": "text", "text": " the a, and then say what the end is like"}]
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": "words"}]
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    with open_model(folder, is_hugging_face=True, dtype=torch.float64) as (session, stored):
        answering = open_answering(session, stored, tmp_path / "data.jsonl", num_frames=6)
        expected = Theirs(folder, session.graph, kind, messages, clip, image)
        text = answering.source.text(0)
        assert text.token_ids.tolist() == expected.ids[0].tolist()
        given = expected.given | (expected.timed if name == "qwen2.5-vl" else {})
        vision = session.graph.unit("vision").image
        packed, _ = pack_language_microbatch([Atom(0)], source=answering.source, images={"vision": vision})
        wanted = {key: value for key, value in given.items() if not key.startswith("pixel")}
        positions, _ = model.model.get_rope_index(expected.ids, **wanted)
        assert torch.equal(packed.positions, positions[:, 0].t())
        items = [answering.source.item(0, index).patches for index in range(len(text.item_starts))]
        pixels = normalised_patches(torch.from_numpy(np.concatenate(items)), vision).double()
        sizes = [len(given[key]) for key in PIXELS]
        torch.testing.assert_close(pixels, torch.cat([given[key] for key in PIXELS]), rtol=0, atol=1e-6)
        given |= zip(PIXELS, pixels.split(sizes), strict=True)  # rounded as here, to float32
        with torch.no_grad(), double_precision():
            logits = model.eval()(input_ids=expected.ids, **given).logits[0, torch.from_numpy(text.is_target)]
            asked_ids = expected.ids[:, : len(answering.question(0).token_ids)]
            kinds = given["mm_token_type_ids"][:, : asked_ids.shape[1]]
            end = answering.question(0).answer[-1]
            options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": end, "pad_token_id": end}
            written = model.generate(asked_ids, **{**given, "mm_token_type_ids": kinds}, **options)[0, asked_ids.shape[1] :]
        assert (forward_logits(answering, 0)[:, : logits.shape[1]] - logits).abs().max() < 1e-9
        answer = answering.answer(0, max_new_tokens=6)
        assert answer == answering.tokenizer.decode(written.tolist())
        asked_as = {"num_frames": 6, "max_new_tokens": 6}
        assert multimodal.generate((session, stored), messages[:1], **asked_as) == answer
        said = multimodal.generate((session, stored), "what?", videos=[clip], **asked_as)
    if name == "qwen2.5-vl":
        assert convert.main(["--load-hf", str(folder), "--save-hf", str(tmp_path / "written")]) == 0
        flags = ["--load-hf", str(tmp_path / "written"), "--prompt", "what?", "--video", str(clip), "--num-frames", "6"]
        assert generate.main([*flags, "--max-new-tokens", "6"]) == 0
        assert capsys.readouterr().out.endswith(said + "\n")


PLANS: Mapping[str, Mapping[str, object]] = {
    "both cut by context": {"--colocate-units": None, "--llm-cp": 2, "--vision-cp": 2, "--balance": "orchmllm"},
    "apart, from a producer": {"--vision-dp": 1, "--llm-dp": 1, "--schedule": "1f1b"},
}


def test_any_plan_trains_on_videos_like_one_process(tmp_path):
    """Two steps through pretrain_mllm.py."""
    write_model(tmp_path / "model", qwen2_5_vl)
    (tmp_path / "token").write_text("a secret of these tests")
    lines = []
    for number, num_frames in enumerate((30, 9, 4)):
        clip = write_clip(tmp_path / f"{number}.mkv", num_frames=num_frames)
        asked = [{"type": "video", "video": clip.name}] * (number + 1) + [{"type": "text", "text": "what?"}]
        lines.append({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": f"it is {number}"}]})
    lines.append({"messages": [{"role": "user", "content": "nothing to see"}, {"role": "assistant", "content": "so"}]})
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags: dict[str, object] = {"--load-hf": tmp_path / "model", "--data-path": tmp_path / "data.jsonl", "--num-frames": 6}
    flags |= {
        "--dtype": "float64",
        "--seq-length": 512,
        "--global-batch-size": 4,
        "--train-iters": 2,
        "--lr": 0.01,
        "--split": 100,
    }
    flags |= {"--log-json": tmp_path / "log.jsonl", "--num-workers": 0}
    expected = [step["loss"] for step in train(flags, num_ranks=1)[0]]
    assert len(expected) == 2 and expected[0] != expected[1]
    for name, plan in PLANS.items():
        with ExitStack() as stack:
            more: dict[str, object] = {}
            if "producer" in name:
                address = stack.enter_context(producer(tmp_path)).address
                more = {"--producers": address, "--producer-token": tmp_path / "token"}
            found, _ = train({**flags, **plan, **more}, num_ranks=2)
        assert [step["loss"] for step in found] == pytest.approx(expected, rel=1e-9), name

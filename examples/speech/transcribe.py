"""Transcribes the held-out samples with the trained model, by transformers alone, and says how many words are wrong.

python examples/speech/transcribe.py --model runs/speech/digits/trained --data runs/speech/digits/held_out.jsonl --loss 1.2345

The same with silence of the same length shows what the LLM makes up. `--loss`: also hold the mean loss of all tokens of the
transcripts, which follows from their logits, against the one that the run had.
"""

import argparse
import json
import re
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from scipy.signal import resample_poly
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM, WhisperFeatureExtractor, WhisperForConditionalGeneration
from transformers.utils.logging import disable_progress_bar

AUDIO_TOKEN = "<filename>"
TEMPLATE = Path(__file__).parent / "template.jinja"
MESSAGES = [{"role": "user", "content": [{"type": "audio"}]}]
END = "<|im_end|>"
RATE, SAMPLES_PER_FRAME = 16000, 160
MAX_NEW_TOKENS = 40
LARGEST_DIFFERENCE = {"float32": 1e-3}
"""Of losses, by the type in which the LLM was written; of half as many bits: the rounding of what adapters add."""


class Prompt(NamedTuple):
    """A held-out sample."""

    name: str
    sound: np.ndarray
    """Samples at 16 kHz."""
    transcript: str


class Transcriber:
    """Whisper's encoder, the projector and SmolLM2, as --save-hf wrote them."""

    def __init__(self, folder: Path) -> None:
        self.ear = WhisperForConditionalGeneration.from_pretrained(
            folder / "audio", dtype=torch.float32, trust_remote_code=False
        ).model.encoder.eval()
        self.extract = WhisperFeatureExtractor.from_pretrained(folder / "audio", trust_remote_code=False)
        self.llm = LlamaForCausalLM.from_pretrained(folder / "llm", dtype=torch.float32, trust_remote_code=False).eval()
        self.saved_dtype = json.loads((folder / "llm" / "config.json").read_text()).get("dtype", "float32")
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "llm", trust_remote_code=False)
        template, options = TEMPLATE.read_text(), {"add_generation_prompt": True, "tokenize": False}
        self.prompt = str(self.tokenizer.apply_chat_template(MESSAGES, chat_template=template, **options))
        described = json.loads((folder / "projectors" / "model.json").read_text())["units"]["audio"]
        self.num_merged = described["audio"]["merge_factor"]
        weights = load_file(folder / "projectors" / "model.safetensors")
        self.projector = [
            (weights[f"audio.layers.{described['num_layers'] + 1}.mlp.linear_fc{index}.{kind}"]).float()
            for index in (1, 2)
            for kind in ("weight", "bias")
        ]

    def hear(self, sound: np.ndarray) -> Tensor:
        """Return what the LLM is given of a clip, [num_tokens, hidden_size]: nothing is padded but two frames behind it."""
        num_frames = -(-len(sound) // SAMPLES_PER_FRAME)
        frames = self.extract(sound, sampling_rate=RATE, return_tensors="pt").input_features[:, :, : num_frames + 2]
        functional = torch.nn.functional
        hidden = functional.gelu(self.ear.conv2(functional.gelu(self.ear.conv1(frames))))
        hidden = hidden.transpose(1, 2)[:, : (num_frames - 1) // 2 + 1]
        hidden = hidden + self.ear.embed_positions.weight[: hidden.shape[1]]
        for layer in self.ear.layers:
            output = layer(hidden, None)
            hidden = output[0] if isinstance(output, tuple) else output
        hidden = self.ear.layer_norm(hidden)[0]
        joined = hidden[: len(hidden) // self.num_merged * self.num_merged].reshape(-1, self.num_merged * hidden.shape[1])
        first, first_bias, second, second_bias = self.projector
        return functional.linear(functional.gelu(functional.linear(joined, first, first_bias)), second, second_bias)

    def embed(self, sound: np.ndarray, answer: str = "") -> tuple[Tensor, list[int]]:
        """Return the LLM's input, [1, num_tokens, hidden_size], and the ids of the answer at its end."""
        heard = self.hear(sound)
        tokens, answer_ids = self.encode(len(heard), answer)
        rows = self.llm.get_input_embeddings()(tokens)
        rows[self.is_sound(tokens)] = heard
        return rows[None], answer_ids

    def encode(self, num_heard: int, answer: str) -> tuple[Tensor, list[int]]:
        """Return the ids of a sample with a placeholder for everything heard, and those of the answer at their end."""
        ids = self.tokenizer(self.prompt.replace(AUDIO_TOKEN, AUDIO_TOKEN * num_heard), add_special_tokens=False).input_ids
        answer_ids = self.tokenizer(answer, add_special_tokens=False).input_ids if answer else []
        return torch.tensor(ids + answer_ids), answer_ids

    def is_sound(self, tokens: Tensor) -> Tensor:
        """Return which tokens are placeholders."""
        return tokens == self.tokenizer.convert_tokens_to_ids(AUDIO_TOKEN)

    @torch.no_grad()
    def transcribe(self, sound: np.ndarray) -> str:
        """Return what the model says, taking the likeliest token each time."""
        rows, _ = self.embed(sound)
        mask = torch.ones(rows.shape[:2], dtype=torch.long)
        end = self.tokenizer.convert_tokens_to_ids(END)
        options: dict[str, Any] = {"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False, "eos_token_id": end, "pad_token_id": end}
        found = self.llm.generate(inputs_embeds=rows, attention_mask=mask, **options)
        return str(self.tokenizer.decode(found[0], skip_special_tokens=True)).strip()

    @torch.no_grad()
    def logits(self, prompt: Prompt) -> tuple[Tensor, Tensor]:
        """Return those of each token of a transcript, [num_targets, vocab_size], and the tokens."""
        rows, answer = self.embed(prompt.sound, prompt.transcript + END)
        found: Tensor = self.llm(inputs_embeds=rows).logits[0, -len(answer) - 1 : -1]
        return found, torch.tensor(answer)


def read_prompts(path: Path) -> list[Prompt]:
    """Return the samples of a file that make_sounds.py wrote."""
    found = []
    for line in path.read_text().splitlines():
        user, assistant = json.loads(line)["messages"]
        name = user["content"][0]["audio"]
        with wave.open(str(path.parent / name)) as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), np.int16) / 32768
            sound = resample_poly(samples, RATE, file.getframerate())
        found.append(Prompt(name, sound.astype(np.float32), assistant["content"]))
    return found


def words(text: str) -> list[str]:
    """Return the words of a text without case and punctuation."""
    return re.findall(r"[a-z0-9']+", text.lower())


def num_errors(said: Sequence[str], meant: Sequence[str]) -> int:
    """Return the fewest words to insert, leave out or replace."""
    row = list(range(len(meant) + 1))
    for index, word in enumerate(said, 1):
        before, row[0] = row[0], index
        for column, expected in enumerate(meant, 1):
            before, row[column] = row[column], min(row[column] + 1, row[column - 1] + 1, before + (word != expected))
    return row[-1]


def word_error_rate(prompts: Sequence[Prompt], transcripts: Sequence[str]) -> float:
    """Return wrong words of all, in percent."""
    wrong = sum(num_errors(words(said), words(each.transcript)) for each, said in zip(prompts, transcripts, strict=True))
    return 100 * wrong / sum(len(words(each.transcript)) for each in prompts)


def check_loss(model: Transcriber, prompts: Sequence[Prompt], *, expected: float) -> None:
    """Print the loss of all transcripts here and in the run; exit with an error where they differ."""
    losses = torch.cat([torch.nn.functional.cross_entropy(*model.logits(each), reduction="none") for each in prompts])
    found = float(losses.mean())
    print(f"loss of {len(losses)} tokens by transformers {found:.4f}, by the run {expected:.4f}")
    if abs(found - expected) > LARGEST_DIFFERENCE.get(model.saved_dtype, 0.05):
        raise SystemExit("error: the logits of what was exported are not those of the run")


def main() -> None:
    """Transcribe, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="what --save-hf wrote")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--loss", type=float, help="what the run said of the same samples")
    parser.add_argument("--num-shown", type=int, default=3)
    options = parser.parse_args()
    disable_progress_bar()
    model, prompts = Transcriber(options.model), read_prompts(options.data)
    if options.loss is not None:
        check_loss(model, prompts, expected=options.loss)
    heard = [model.transcribe(each.sound) for each in prompts]
    silent = [model.transcribe(np.zeros_like(each.sound)) for each in prompts]
    print(f"word error rate of {len(prompts)} held-out samples: {word_error_rate(prompts, heard):.1f} %")
    print(f"the same with silence in their place: {word_error_rate(prompts, silent):.1f} %")
    for each, said in list(zip(prompts, heard, strict=True))[: options.num_shown]:
        print(f"{each.name}, {len(each.sound) / RATE:.1f} s\n  said:  {each.transcript}\n  heard: {said}")


if __name__ == "__main__":
    main()

"""Holds the logits of the exported model, computed by transformers, against those of the run's checkpoint, computed by Braid.

python examples/speech/compare_logits.py --model runs/speech/digits/trained --run runs/speech/digits/checkpoints \
    --data runs/speech/digits/held_out.jsonl

Of every token of some transcripts, over the whole vocabulary, in float32. In the exported weights adapters are merged, in the
checkpoint they are apart.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transcribe import END, Prompt, Transcriber, read_prompts
from transformers.utils.logging import disable_progress_bar

from megatron.runtime.generation.whole_model import open_model
from megatron.runtime.session import Session
from multimodal.data.audio import audio_positions, audio_to_patches
from multimodal.model.stage_input import PackedInput

LARGEST_DIFFERENCE = 1e-2
"""Of logits, which are up to about 30."""


class Reference:
    """The model of a checkpoint."""

    def __init__(self, session: Session) -> None:
        self.stages: dict[str, Any] = {unit: stage for (unit, _), stage in session.stages.items()}
        self.audio = session.graph.unit("audio").audio
        llm = self.stages["llm"]
        head = llm.layers[str(len(llm.unit.layers) - 1)]
        head.output_layer.register_forward_hook(lambda module, inputs, output: self.found.append(output[0][:, 0]))
        self.found: list[Tensor] = []

    @torch.no_grad()
    def logits(self, prompt: Prompt, tokens_of: Transcriber) -> Tensor:
        """Return those of each token of a transcript, [num_targets, vocab_size]."""
        assert self.audio is not None
        frames = audio_to_patches(prompt.sound, audio=self.audio)
        positions = torch.from_numpy(audio_positions(frames.grid, audio=self.audio))
        sound = PackedInput((len(positions),), positions, patches=torch.from_numpy(frames.patches)).with_kept_rows()
        heard = self.stages["audio"](None, sound)
        tokens, answer = tokens_of.encode(len(heard), prompt.transcript + END)
        rows = torch.arange(len(tokens))
        text = PackedInput(
            (len(tokens),),
            rows,
            token_ids=tokens,
            item_rows=tokens_of.is_sound(tokens).nonzero()[:, 0],
            target_rows=rows[-len(answer) - 1 : -1],
            targets=torch.tensor(answer),
        )
        self.stages["llm"](None, text, heard)
        return self.found.pop()


def main() -> None:
    """Compare, and print; exit with an error where they differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="what --save-hf wrote")
    parser.add_argument("--run", type=Path, required=True, help="the run's checkpoints")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--num-compared", type=int, default=8)
    options = parser.parse_args()
    disable_progress_bar()
    exported, prompts = Transcriber(options.model), read_prompts(options.data)[: options.num_compared]
    largest, num_tokens, num_same = 0.0, 0, 0
    with open_model(options.run, dtype=torch.float32) as (session, _):
        reference = Reference(session)
        for prompt in prompts:
            theirs, answer = exported.logits(prompt)
            mine = reference.logits(prompt, exported)[:, : theirs.shape[1]]
            largest = max(largest, float((mine - theirs).abs().max()))
            num_tokens, num_same = num_tokens + len(answer), num_same + int((mine.argmax(1) == theirs.argmax(1)).sum())
    print(f"logits of {num_tokens} tokens by transformers and by the run: {largest:.1e} apart, {num_same} have the same first")
    if largest > LARGEST_DIFFERENCE:
        sys.exit("error: the logits of what was exported are not those of the run")


if __name__ == "__main__":
    main()

"""A small vision-language model, trained on the digits by torch's DistributedDataParallel, as a user would without Braid.

    torchrun --nproc-per-node 4 benchmarks/beside/torch_ddp.py [STEPS]

It uses nothing of Braid. The model has the layers and widths of examples/digits/model.yaml: digits of 8x8 pixels become tokens,
and what they show is learnt behind them. `benchmarks/starts.py --first-step` starts it beside Braid.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH_SIZE, NUM_DIGITS, VOCAB_SIZE = 32, 6, 384


class Reader(nn.Module):
    """An encoder of one layer of 64 channels, and an LLM of four layers of 96."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(64, 64)
        self.encoder = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.projector = nn.Linear(64, 96)
        self.words = nn.Embedding(VOCAB_SIZE, 96)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(96, 4, 192, dropout=0.0, batch_first=True, norm_first=True) for _ in range(4)
        )
        self.output = nn.Linear(96, VOCAB_SIZE)

    def forward(self, pictures: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits, [batch, digits + tokens, VOCAB_SIZE]; pictures: [batch, digits, 64]; tokens: [batch, tokens]."""
        hidden = torch.cat([self.projector(self.encoder(self.patches(pictures))), self.words(tokens)], dim=1)
        mask = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.output(hidden)


def main(num_steps: int) -> None:
    """Train, and print a line for each step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1234)
    model = DistributedDataParallel(Reader())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.4e-3)
    found = load_digits()
    glyphs, digits = torch.tensor(found.data, dtype=torch.float32) / 8 - 1, torch.tensor(found.target)
    random = torch.Generator().manual_seed(1234 + rank)
    for step in range(1, num_steps + 1):
        drawn = torch.randint(len(digits), (BATCH_SIZE // size, NUM_DIGITS), generator=random)
        answer = digits[drawn] + 1
        tokens = torch.cat([torch.zeros_like(answer[:, :1]), answer], dim=1)
        logits = model(glyphs[drawn], tokens[:, :-1])[:, -NUM_DIGITS:]
        loss = nn.functional.cross_entropy(logits.reshape(-1, VOCAB_SIZE), answer.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if rank == 0:
            print(f"step {step}/{num_steps}  loss {float(loss.detach()):.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", type=int, nargs="?", default=1, metavar="STEPS", help="of training (1)")
    main(parser.parse_args().steps)

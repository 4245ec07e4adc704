"""Plain torch DDP, a vision encoder and an LLM: items where they were drawn, images balanced, images and samples balanced.

Run `torchrun --nproc-per-node 4 examples/balance/torch_ddp.py`. Nothing of Braid but its exchange is used.
"""

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from multimodal.balance.exchange.module_exchange import DrawnItems, ModuleExchange, plan_exchange

HIDDEN, MERGED, PIXELS, VOCABULARY, NUM_SAMPLES = 64, 4, 48, 128, 6
VARIANTS = {"as drawn": (), "images balanced": ("vision",), "images and samples balanced": ("vision", "llm")}


class Block(nn.Module):
    """Attention within each item of packed rows, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))

    def forward(self, rows: Tensor, lengths: list[int]) -> Tensor:
        """rows: [sum(lengths), HIDDEN]."""
        items = self.qkv(rows).unflatten(-1, (3, 4, -1)).permute(1, 2, 0, 3).split(lengths, dim=2) if len(rows) else ()
        mixed = [scaled_dot_product_attention(*item).transpose(0, 1).flatten(1) for item in items]
        rows = rows + self.out(torch.cat([*mixed, self.qkv(rows[:0])[:, :HIDDEN]]))  # no rows: still a part of the graph
        return rows + self.mlp(rows)


class Encoder(nn.Module):
    """Merges each four patches into one feature."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(PIXELS, HIDDEN), Block(), nn.Linear(MERGED * HIDDEN, HIDDEN)

    def forward(self, patches: Tensor, lengths: list[int]) -> Tensor:
        """patches: [sum(lengths), PIXELS]; returns [sum(lengths) / MERGED, HIDDEN]."""
        return self.last(self.block(self.first(patches), lengths).view(-1, MERGED * HIDDEN))


class LanguageModel(nn.Module):
    """Takes each sample's features before its text, and returns the summed loss of the text."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(VOCABULARY, HIDDEN), Block(), nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, features: Tensor, num_features: list[int], tokens: Tensor, num_tokens: list[int]) -> Tensor:
        """features, tokens: of all samples in turn, as many of each as the lists say."""
        texts, images = self.embedding(tokens).split(num_tokens), features.split(num_features)
        rows = torch.cat([features[:0], *(part for pair in zip(images, texts, strict=True) for part in pair)])
        hidden = self.block(rows, [sum(sizes) for sizes in zip(num_features, num_tokens, strict=True)])
        is_text = torch.tensor([i >= n for n, m in zip(num_features, num_tokens, strict=True) for i in range(n + m)], dtype=bool)
        return cross_entropy(self.head(hidden[is_text]), tokens, reduction="sum")


class Batch:
    """A rank's share of a step: samples of very unequal images, some without any."""

    def __init__(self, step: int, rank: int, dtype: torch.dtype) -> None:
        random = torch.Generator().manual_seed(1000 * step + rank)
        self.tokens_of = torch.randint(4, 40, (NUM_SAMPLES,), generator=random).tolist()
        self.sample_of = torch.randint(NUM_SAMPLES, (rank * 4,), generator=random).sort()[0].tolist()  # rank 0 draws no image
        self.patches_of = [MERGED * int(2 ** torch.rand(1, generator=random).mul(6)) for _ in self.sample_of]
        self.patches = torch.rand(sum(self.patches_of), PIXELS, generator=random, dtype=dtype)
        self.tokens = torch.randint(VOCABULARY, (sum(self.tokens_of),), generator=random)

    def plan(self, balanced: tuple[str, ...], group: dist.ProcessGroup) -> dict[str, ModuleExchange]:
        """Return the exchange of this batch's rows."""
        features = [0] * NUM_SAMPLES
        for sample, patches in zip(self.sample_of, self.patches_of, strict=True):
            features[sample] += patches // MERGED
        images = DrawnItems(
            lengths=self.patches_of,
            rows={"features": [patches // MERGED for patches in self.patches_of]},
            consumer="llm",
            consumed_by=self.sample_of,
        )
        lengths = [sum(sizes) for sizes in zip(features, self.tokens_of, strict=True)]
        samples = DrawnItems(lengths=lengths, rows={"features": features, "tokens": self.tokens_of})
        return plan_exchange({"vision": images, "llm": samples}, group=group, balanced=balanced)


def train(
    balanced: tuple[str, ...], *, num_steps: int = 3, dtype: torch.dtype = torch.float32
) -> tuple[list[float], dict[str, Tensor], list[float], float]:
    """Train; returns mean losses, the last gradients, the encoder's busiest rank over the mean, seconds a step."""
    torch.manual_seed(0)
    encoder, model = (DistributedDataParallel(module.to(dtype)) for module in (Encoder(), LanguageModel()))
    parameters = [*encoder.parameters(), *model.parameters()]
    group, size = dist.new_group(), dist.get_world_size()  # of its own, so that exchanges do not wait behind DDP's reductions

    def start(step: int) -> tuple:
        """Plan a step and send its inputs."""
        batch = Batch(step, dist.get_rank(), dtype)
        plan = batch.plan(balanced, group)
        return plan, plan["vision"].send_inputs(batch.patches), plan["llm"].send_inputs(batch.tokens, "tokens")

    losses, shares, ahead, begin = [], [], start(0), time.perf_counter()
    for step in range(num_steps):
        plan, patches, tokens = ahead
        ahead = start(step + 1)  # travels while this step computes
        vision, llm = plan["vision"], plan["llm"]
        features = vision.send_outputs(encoder(patches.wait(), vision.rows_here()), "features")
        loss = model(features, llm.rows_here("features"), tokens.wait(), llm.rows_here("tokens"))
        num_targets = torch.tensor(sum(llm.rows_here("tokens")))
        dist.all_reduce(num_targets)  # ranks compute unequal numbers of samples, so the mean is over all targets
        for parameter in parameters:
            parameter.grad = None
        (loss * size / num_targets).backward()  # DDP divides by the number of ranks
        with torch.no_grad():
            for parameter in parameters:
                parameter -= 0.1 * parameter.grad
        total = loss.detach() / num_targets
        dist.all_reduce(total)
        losses.append(total.item())
        shares.append(float(vision.costs[1].max() / vision.costs[1].mean()))
    for pending in ahead[1:]:
        pending.wait()
    names = [name for module in (encoder, model) for name, _ in module.named_parameters(type(module.module).__name__)]
    gradients = dict(zip(names, [parameter.grad for parameter in parameters], strict=True))
    return losses, gradients, shares, (time.perf_counter() - begin) / num_steps


def main() -> None:
    """Train three times and print what differs."""
    dist.init_process_group("gloo")
    expected = None
    for title, balanced in VARIANTS.items():
        losses, gradients, shares, seconds = train(balanced, num_steps=10, dtype=torch.float64)
        expected = expected or (losses, gradients)
        difference = max(float((gradients[name] - other).abs().max()) for name, other in expected[1].items())
        if dist.get_rank() == 0:
            print(
                f"{title}: busiest rank / mean {sum(shares) / len(shares):.2f}, {seconds:.3f} s a step, loss {losses[-1]:.9f}, ",
                end="",
            )
            print(f"gradients differ by {difference:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""megatron-core's MIMO, four data parallel ranks: images encoded where they were drawn, then balanced.

Run `torchrun --nproc-per-node 4 examples/balance/megatron_mimo.py`. The model, its data parallelism and the loop are
megatron-core's. What changes is in `BalancedEncoder`: it takes the exchange of a batch beside the images, and sends outputs back.
Where MIMO's encoder has ranks of its own, `group` is the encoder's data parallel group, each of whose ranks reads its own share.
"""

import time
from contextlib import nullcontext
from pathlib import Path
from sys import path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.mimo.config.base_configs import MimoModelConfig
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import utils as transformer_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron.runtime import platform
from multimodal.balance.exchange.module_exchange import DrawnItems, ModuleExchange, plan_exchange

path.append(str(Path(__file__).parent))
from torch_ddp import HIDDEN, MERGED, PIXELS, Encoder

IMAGE, VOCABULARY, SEQUENCE_LENGTH, BATCH_SIZE, ENCODERS = 0, 128, 160, 4, "vit"


class BalancedEncoder(Encoder):
    """An encoder of any kind, given the images of all ranks that fall to this one."""

    def forward(self, patches: Tensor, exchange: ModuleExchange) -> Tensor:
        """patches: of the images that this rank encodes; returns features of those that it drew."""
        return exchange.send_outputs(super().forward(patches, exchange.rows_here()), "features")


def build_model(dtype: torch.dtype, encoder: type[Encoder] = BalancedEncoder) -> DistributedDataParallel:
    """Return MIMO with an encoder and a GPT."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
    )
    language = {
        "config": config,
        "transformer_layer_spec": get_gpt_layer_local_spec(),
        "vocab_size": VOCABULARY,
        "max_sequence_length": SEQUENCE_LENGTH,
        "position_embedding_type": "rope",
    }
    vision = ModuleSpec(VisionModalitySubmodules, submodules={"encoders": {ENCODERS: ModuleSpec(encoder)}})
    model = MimoModel(MimoModelConfig(ModuleSpec(GPTModel, params=language), {"vision": vision}, {"vision": IMAGE}))
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model.to(dtype))


class Batch:
    """A rank's share of a step: sequences of one length; a rank's images are all small or large."""

    def __init__(self, step: int, rank: int, dtype: torch.dtype) -> None:
        random = torch.Generator().manual_seed(1000 * step + rank)
        self.features_of = torch.randint(1, 2 ** (2 * rank + 1) + 1, (BATCH_SIZE,), generator=random).tolist()
        self.patches = torch.rand(MERGED * sum(self.features_of), PIXELS, generator=random, dtype=dtype)
        self.tokens = torch.randint(1, VOCABULARY, (BATCH_SIZE, SEQUENCE_LENGTH), generator=random)
        for row, length in zip(self.tokens, self.features_of, strict=True):
            row[:length] = IMAGE


def train(
    is_balanced: bool, *, num_steps: int = 3, dtype: torch.dtype = torch.float32
) -> tuple[list[float], dict, list[float], float]:
    """Train; returns mean losses, the last gradients, the encoder's busiest rank over the mean, seconds a step."""
    torch.manual_seed(0)
    model = build_model(dtype)
    group = dist.new_group()

    def start(step: int) -> tuple:
        """Plan a step and send its images."""
        batch = Batch(step, dist.get_rank(), dtype)
        lengths = [MERGED * length for length in batch.features_of]
        images = DrawnItems(lengths=lengths, rows={"features": batch.features_of})
        exchange = plan_exchange({"vision": images}, group=group, balanced=("vision",) if is_balanced else ())["vision"]
        return batch.tokens, exchange, exchange.send_inputs(batch.patches)

    positions = torch.arange(SEQUENCE_LENGTH).expand(BATCH_SIZE, -1)
    is_hidden = torch.ones(1, 1, SEQUENCE_LENGTH, SEQUENCE_LENGTH, dtype=torch.bool).triu(1)
    losses, shares, ahead, begin = [], [], start(0), time.perf_counter()
    for step in range(num_steps):
        tokens, exchange, patches = ahead
        ahead = start(step + 1)  # travels while this step computes
        model.zero_grad_buffer()
        images = {"vision": {ENCODERS: {"patches": patches.wait(), "exchange": exchange}}}
        logits, _ = model(tokens, positions, is_hidden, modality_inputs=images)
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        model.finish_grad_sync()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.main_grad
        total = loss.detach() / dist.get_world_size()
        dist.all_reduce(total)
        losses.append(total.item())
        shares.append(float(exchange.costs[1].max() / exchange.costs[1].mean()))
    ahead[2].wait()
    gradients = {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()}
    return losses, gradients, shares, (time.perf_counter() - begin) / num_steps


def prepare() -> None:
    """Set Megatron up as its training scripts do; without CUDA, replace what it needs CUDA for."""
    platform.install()
    if not torch.cuda.is_available():
        CudaRNGStatesTracker.fork = lambda *_: nullcontext()  # of a dropout of zero
        transformer_utils.torch = platform.CpuTorch(torch)  # of masks, which MIMO of 0.19 leaves to attention
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()


def main() -> None:
    """Train twice and print what differs."""
    dist.init_process_group("gloo")
    prepare()
    expected = None
    for is_balanced in (False, True):
        losses, gradients, shares, seconds = train(is_balanced, num_steps=10, dtype=torch.float64)
        expected = expected or gradients
        difference = max(float((gradients[name] - other).abs().max()) for name, other in expected.items())
        if dist.get_rank() == 0:
            title = "images balanced" if is_balanced else "as drawn"
            share = sum(shares) / len(shares)
            print(f"{title}: busiest rank / mean {share:.2f}, {seconds:.3f} s a step, loss {losses[-1]:.9f}, ", end="")
            print(f"gradients differ by {difference:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import pytest
import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.fusions.fused_bias_geglu import bias_geglu_impl
from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl
from megatron.core.transformer.transformer_config import TransformerConfig

from multimodal.model.layers import backbone_ends
from multimodal.model.layers.backbone_ends import vocab_parallel_cross_entropy
from multimodal.model.norm import Norm
from multimodal.model.swiglu import swiglu
from multimodal.model.transformer_config import BuildOptions, build_transformer_config, gelu_tanh
from multimodal.values.model_graph import ModelGraph
from tests.unit.model.rank_groups import LiveBytes


def build(normalization: str, dtype: torch.dtype, *, sequence_parallel: bool = False) -> Norm:
    sizes = {"num_layers": 1, "hidden_size": 6, "num_attention_heads": 2, "tensor_model_parallel_size": 2}
    how = {"normalization": normalization, "params_dtype": dtype, "sequence_parallel": sequence_parallel}
    config = TransformerConfig(**sizes, **how)
    norm = Norm(config, 6, eps=1e-3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(6, generator=generator))
    return norm


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_bfloat16_is_normalised_in_float32(normalization):
    norm = build(normalization, torch.bfloat16)
    hidden = torch.randn(5, 1, 6, generator=torch.Generator().manual_seed(2)).bfloat16()
    wide = build(normalization, torch.float32)
    wide.load_state_dict({name: value.float() for name, value in norm.state_dict().items()})
    assert norm(hidden).dtype == torch.bfloat16
    assert torch.equal(norm(hidden), wide(hidden.float()).bfloat16())


@pytest.mark.parametrize(
    ("changes", "dtype", "is_fused"),
    [
        ({"activation": "gelu_tanh", "add_bias_linear": True}, torch.bfloat16, True),
        ({"activation": "geglu_tanh"}, torch.float32, True),
        ({"activation": "swiglu"}, torch.float64, True),
        ({"activation": "gelu_tanh"}, torch.bfloat16, False),
        ({"activation": "geglu_tanh"}, torch.float64, False),
        ({"activation": "gelu", "add_bias_linear": True}, torch.bfloat16, False),
        ({"activation": "quick_gelu", "add_bias_linear": True}, torch.bfloat16, False),
        ({"activation": "quick_geglu"}, torch.bfloat16, False),
        ({"activation": "geglu_tanh", "experts": {"num_experts": 2, "router_topk": 1}}, torch.bfloat16, False),
    ],
)
def test_activations_are_fused_where_the_kernel_computes_the_same(changes, dtype, is_fused):
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 16}
    graph = ModelGraph.from_dict({"units": {"llm": {"role": "backbone", **sizes, **changes}}})
    for fuses in (False, True):
        options = BuildOptions(dtype, fuses_kernels=fuses)
        config = build_transformer_config(graph.backbone, tensor_parallel_size=1, options=options)
        assert config.gated_linear_unit == (changes["activation"] in ("swiglu", "geglu_tanh", "quick_geglu"))
        assert config.bias_activation_fusion == (fuses and is_fused)
        assert config.bias_dropout_fusion == (fuses and "add_bias_linear" in changes)
        own_gelu = changes["activation"] == "gelu" or (fuses and is_fused and changes["activation"] != "swiglu")
        assert (config.activation_func is torch.nn.functional.gelu) == own_gelu


def test_the_fused_kernels_compute_gelu_by_tanh_and_residual_sums():
    """Run step by step, as a CPU needs a compiler for them."""
    draw = torch.Generator().manual_seed(3)
    values, bias, gradient = (3 * torch.randn(*shape, generator=draw) for shape in ((7, 1, 8), (8,), (7, 1, 8)))

    def gated(values: torch.Tensor) -> torch.Tensor:
        gate, inner = values.chunk(2, dim=-1)
        return gelu_tanh(gate) * inner

    for fused, plain in (
        (bias_gelu_impl, lambda given, added: gelu_tanh(given + added)),
        (bias_geglu_impl, lambda given, added: gated(given + added)),
        (lambda given, added: bias_geglu_impl(given, None), lambda given, added: gated(given)),
        (
            lambda given, added: get_bias_dropout_add(True, True)((given, added), gradient, 0.0),
            lambda given, added: given + added + gradient,
        ),
    ):
        found = []
        for function in (fused, plain):
            leaves = [each.clone().requires_grad_() for each in (values, bias)]
            with torch.compiler.set_stance("force_eager"):
                output = function(*leaves)
                output.backward(gradient[..., : output.shape[-1]])
            found.append([output, *(each.grad for each in leaves if each.grad is not None)])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_swiglu_gives_the_bits_of_its_definition(dtype):
    draw = torch.Generator().manual_seed(3)
    stacked, gradient = (torch.randn(7, 1, size, generator=draw).to(dtype) for size in (34, 17))
    found = []
    for function in (swiglu, lambda given: torch.nn.functional.silu(given[..., :17]) * given[..., 17:]):
        leaf = stacked.clone().requires_grad_()
        output = function(leaf)
        output.backward(gradient)
        found.append((output, leaf.grad))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_bfloat16_logits_give_float32_losses_and_bfloat16_gradients(world_of_one):
    logits = torch.tensor([[1.0, 2.0, 300.0]], dtype=torch.bfloat16, requires_grad=True)
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([1]), group=world_of_one)
    loss.sum().backward()
    assert loss.dtype == torch.float32 and float(loss) == 298.0
    assert logits.grad is not None and logits.grad.tolist() == [[0.0, -1.0, 1.0]]


def test_no_targets_give_no_losses_but_a_graph(world_of_one):
    logits = torch.zeros(0, 3, requires_grad=True)
    losses = vocab_parallel_cross_entropy(logits, torch.zeros(0, dtype=torch.int64), group=world_of_one)
    assert losses.shape == (0,) and losses.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_more_than_four_bytes_a_logit_beside_the_logits(world_of_one, dtype, monkeypatch):
    """The gradient, which takes as much as the logits, and a few rows."""
    monkeypatch.setattr(backbone_ends, "CHUNK_ENTRIES", 4 * 2048)
    monkeypatch.setattr(backbone_ends, "MOST_CHUNKS", 64)
    logits, targets = torch.randn(256, 2048).to(dtype).requires_grad_(), torch.randint(2048, (256,))
    with LiveBytes() as forward:
        losses = vocab_parallel_cross_entropy(logits, targets, group=world_of_one)
    with LiveBytes() as backward:
        losses.sum().backward()
    chunks = 3 * 4 * 2048 * 4
    assert forward.peak < chunks + 100 * 256
    assert logits.nbytes <= backward.peak < logits.nbytes + chunks + 100 * 256

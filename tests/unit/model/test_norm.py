import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from multimodal.model.norm import Norm


def build(normalization: str, dtype: torch.dtype, *, sequence_parallel: bool = False) -> Norm:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=6,
        num_attention_heads=2,
        normalization=normalization,
        params_dtype=dtype,
        tensor_model_parallel_size=2,
        sequence_parallel=sequence_parallel,
    )
    norm = Norm(config, 6, eps=1e-3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(6, generator=generator))
    return norm


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_equals_the_formula_in_float64(normalization: str) -> None:
    norm = build(normalization, torch.float64)
    hidden = torch.randn(5, 1, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) + 0.5
    centred = hidden - hidden.mean(-1, keepdim=True) if normalization == "LayerNorm" else hidden
    expected = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-3) * norm.weight
    expected = expected if norm.bias is None else expected + norm.bias
    assert (norm.bias is None) == (normalization == "RMSNorm")
    assert norm(hidden).dtype == torch.float64
    assert torch.allclose(norm(hidden), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_bfloat16_is_normalised_in_float32(normalization: str) -> None:
    norm = build(normalization, torch.bfloat16)
    hidden = torch.randn(5, 1, 6, generator=torch.Generator().manual_seed(2)).bfloat16()
    wide = build(normalization, torch.float32)
    wide.load_state_dict({name: value.float() for name, value in norm.state_dict().items()})
    assert norm(hidden).dtype == torch.bfloat16
    assert torch.equal(norm(hidden), wide(hidden.float()).bfloat16())


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_parameters_are_marked_for_the_sum_over_tensor_parallel_ranks(sequence_parallel: bool) -> None:
    norm = build("LayerNorm", torch.float32, sequence_parallel=sequence_parallel)
    assert [parameter.sequence_parallel for parameter in norm.parameters()] == [sequence_parallel] * 2

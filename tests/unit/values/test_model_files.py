"""Model files that would train something else than they say, or nothing, are refused with file, line and fix."""

import re

import pytest

from multimodal.values.errors import ModelError
from multimodal.values.model_graph import ModelGraph, Role, Transformer, Unit

SHAPE = "num_layers: 2, hidden_size: 16, num_attention_heads: 2, ffn_hidden_size: 32"
TEXT = f"""\
units:
  vision:
    {{role: encoder, {SHAPE}}}
  llm:
    {{role: backbone, {SHAPE}}}
"""


def read(tmp_path, text):
    path = tmp_path / "model.yaml"
    path.write_text(text)
    return ModelGraph.from_file(path)


def refusal_of(tmp_path, text):
    with pytest.raises(ModelError) as caught:
        read(tmp_path, text)
    found = re.fullmatch(r".*/model\.yaml, line (\d+): (.*)", str(caught.value))
    assert found, caught.value
    return int(found[1]), found[2]


def test_an_edge_that_is_there_twice_is_refused(tmp_path):
    line, problem = refusal_of(tmp_path, TEXT + "edges:\n  - [vision, llm]\n  - [vision, llm]\n")
    assert line == 8 and problem == "edge vision -> llm: is there twice, and would count its gradients twice; keep one"
    shape = Transformer(2, 16, 2, 32)
    units = Unit("vision", Role.ENCODER, shape), Unit("llm", Role.BACKBONE, shape)
    with pytest.raises(ModelError, match="is there twice"):
        ModelGraph(units, (("vision", "llm"),) * 2)


def test_a_unit_or_a_key_that_is_there_twice_is_refused(tmp_path):
    assert refusal_of(tmp_path, TEXT + f"  vision: {{role: encoder, {SHAPE}}}\n")[0] == 6
    assert refusal_of(tmp_path, TEXT.replace("encoder", "encoder, num_layers: 3"))[0] == 3


def test_an_encoder_takes_one_kind_of_item(tmp_path):
    assert "has an image and audio" in refusal_of(tmp_path, TEXT.replace("encoder", "encoder, image: {}, audio: {}"))[1]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("freeze_module: 'false'", "freeze_module: expected true or false, found 'false'; write it without quotes"),
        ("layernorm_epsilon: '1e-5'", "layernorm_epsilon: expected a positive number, found '1e-5'; write it without quotes"),
        ("layernorm_epsilon: 10", "layernorm_epsilon: expected a number of at most 1, found 10"),
        ("rotary_base: .nan", "rotary_base: expected a positive number, found nan"),
        ("rotary_base: 1e999", "rotary_base: expected a number of at most"),
        ("init_method_std: -0.1", "init_method_std: expected a positive number, found -0.1"),
        ("kv_channels: -4", "kv_channels: expected a positive integer, found -4"),
        ("activation: relu", "activation: expected one of swiglu, geglu_tanh, gelu, gelu_tanh, quick_gelu, found 'relu'"),
        ("vocab_size: [32]", "vocab_size: expected a positive integer, found [32]"),
        ("image: {}", "image belongs to encoders; remove it here"),
        ("audio: {}", "audio belongs to encoders; remove it here"),
        ("freeze_projector: true", "freeze_projector belongs to encoders; remove it here"),
        ("num_layer: 2", "did you mean 'num_layers'?"),
    ],
)
def test_values_that_mean_nothing_are_refused(tmp_path, entry, message):
    line, problem = refusal_of(tmp_path, TEXT.replace("backbone", f"backbone, {entry}"))
    assert line == 5 and problem.startswith("unit 'llm'") and message in problem


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("vocab_size: 32", "vocab_size belongs to the backbone"),
        ("untie_embeddings_and_output_weights: false", "untie_embeddings_and_output_weights belongs to the backbone"),
        ("image: []", "image: expected a mapping with patch_size, merge_size"),
        ("image: {patch_size: 4.5}", "image, patch_size: expected a positive integer, found 4.5"),
        ("audio: {tokens: 3}", "unknown key 'tokens'"),
        ("experts: {num_experts: 8}", "experts belong to the backbone"),
        ("image: {max_pixels: 1}", "max_pixels 1 is below min_pixels 3136"),
    ],
)
def test_an_encoders_values_are_checked(tmp_path, entry, message):
    line, problem = refusal_of(tmp_path, TEXT.replace("encoder", f"encoder, {entry}"))
    assert line == 3 and problem.startswith("unit 'vision'") and message in problem


@pytest.mark.parametrize("key", ["num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size"])
@pytest.mark.parametrize("value", [10**9, 10**12])
def test_sizes_that_would_fill_the_memory_are_refused(tmp_path, key, value):
    line, problem = refusal_of(tmp_path, re.sub(rf"{key}: \d+", f"{key}: {value}", TEXT))
    assert line == 3 and problem.startswith(f"unit 'vision', {key}: expected an integer of at most ")


@pytest.mark.parametrize("edges", ["3", "[[vision]]", "[[vision, [llm]]]", "[vision, llm]", "{vision: llm}", "null"])
def test_malformed_edges_are_refused(tmp_path, edges):
    assert refusal_of(tmp_path, TEXT + f"edges: {edges}\n")[0] == 6


@pytest.mark.parametrize("name", ["'1'", "a b", "a/b", "'--lr'", "a=b", "_a", "'a.b'", "x" * 65])
def test_names_that_no_flag_or_schedule_can_carry_are_refused(tmp_path, name):
    assert "a unit's name starts with a letter" in refusal_of(tmp_path, TEXT.replace("llm", name))[1]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Transformer(2, 16, 2, 32, rotary_base=float("nan")), "rotary_base: expected a positive number, found nan"),
        (Transformer(10**9, 16, 2, 32), "num_layers: expected an integer of at most 10,000"),
    ],
)
def test_models_made_in_python_are_held_against_the_same_bounds(shape, message):
    with pytest.raises(ModelError, match=message):
        ModelGraph((Unit("llm", Role.BACKBONE, shape),))

"""Flags against each other, schedules against plans, and files with mistakes."""

import json
import random
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import yaml

from megatron.runtime.feed.data_sets import with_vocabulary
from megatron.runtime.flags import cross_checks
from megatron.runtime.flags.arguments import build_plan, choose_trained, parse_arguments
from megatron.runtime.flags.configuration import RunConfig
from megatron.runtime.flags.cross_checks import check_plan
from megatron.runtime.flags.field_flags import all_flags, whole_number
from megatron.runtime.flags.ignored_flags import IGNORED_FLAGS
from megatron.runtime.flags.schedule_checks import with_device_defaults
from multimodal.balance.length_cost import CostForm, LengthCost
from multimodal.cost.engine_limits import engine_products
from multimodal.cost.layers.registry import LAYER_KINDS, read_model
from multimodal.cost.layers.transformer import TransformerLayer
from multimodal.data.tokenizer import ByteTokenizer
from multimodal.values.errors import BraidError, ConfigError, ModelError
from multimodal.values.model_graph import Lora, ModelGraph
from tests.distributed.mutations.mutation import Inputs, Mutation
from tests.distributed.mutations.table import list_mutations
from tests.distributed.small_run import NUM_RANKS, working_flags, write_working_files
from tests.unit.runtime.flags.conftest import BACKBONE, ENCODER, HUGGING_FACE, UNITS, write_adapter, write_hugging_face
from tests.unit.runtime.flags.test_answers import MODELS, machine_of


def test_every_row_of_the_table_names_fields_that_exist():
    names = {flag.name for flag in all_flags()}
    assert {name for row in IGNORED_FLAGS for name in (row.name, *row.because_of)} <= names


def test_costs_of_units_are_declared(parse_on_base):
    config = parse_on_base("--balance orchmllm --unit-costs vision=padded-attention:0.5 language=linear")
    assert config.training.declared_costs == {
        "vision": LengthCost(CostForm.PADDED_ATTENTION, 0.5),
        "language": LengthCost(CostForm.LINEAR),
    }


def test_numbers_outside_their_bounds_are_refused(parse_on_base):
    for flag in all_flags():
        outside = {"above": lambda bound: bound, "below": lambda bound: bound, "minimum": lambda bound: bound - 1}
        outside["maximum"] = lambda bound: 10 * bound
        for number in [outside[name](bound) for name, bound in flag.bounds.items()]:
            text = f"{number:.0f}" if flag.parse is whole_number else str(number)
            with pytest.raises(ConfigError, match=rf"^argument {flag.flag}: must be .*, found "):
                parse_on_base(f"{flag.flag} {text}")


HARMLESS_WHEN_LARGE = {
    # intervals: what is never due
    *("exit_interval", "eval_interval", "save_interval", "log_interval", "timeline_interval", "keep_last_checkpoints"),
    "save_retain_interval",
    # bounded by rules about two flags: warm-up and decay, microbatch and global batch
    *("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters", "micro_batch_size"),
    "max_image_pixels",  # itself a bound
    "profile_ranks",  # names, not counts
}


def test_every_count_has_an_upper_bound():
    """No number that is a typing error takes memory or time."""
    assert {
        flag.name for flag in all_flags() if flag.parse is whole_number and "maximum" not in flag.bounds
    } == HARMLESS_WHEN_LARGE


def test_adapters_are_added_to_what_the_patterns_match(parse_on_base):
    graph = ModelGraph.from_dict({"units": UNITS})

    def adapted(line: str) -> dict[str, tuple[str, ...]]:
        found = choose_trained(graph, parse_on_base(line).model)
        return {unit.name: unit.lora.targets for unit in found.units if unit.lora is not None}

    inside = tuple(f"transformer.{name}" for name in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"))
    assert adapted("--lora-rank 4") == {"language": inside}
    assert adapted("--lora-rank 4 --lora-targets llm.*")["language"] == (*inside, "head.output_layer")
    assert adapted("--lora-rank 4 --lora-targets *.linear_fc? --freeze llm --lora-alpha 2") == {
        "vision": (*inside[2:], "projector.linear_fc1", "projector.linear_fc2"),
        "language": inside[2:],
    }
    assert adapted("--lora-rank 4 --lora-targets vision.projector linear_qkv") == {
        "vision": ("projector.linear_fc1", "projector.linear_fc2", inside[0]),
        "language": inside[:1],
    }


def test_what_the_model_file_freezes_stays_frozen(parse_on_base):
    config = parse_on_base("--freeze-projector vision")
    frozen = ModelGraph.from_dict({"units": {**UNITS, "vision": {**UNITS["vision"], "freeze_module": True}}})
    graph = choose_trained(frozen, config.model)
    assert graph.unit("vision").freeze_module
    assert graph.unit("vision").freeze_projector
    assert not graph.unit("language").freeze_module


class CountedLayer(TransformerLayer):
    is_built_in = staticmethod(lambda unit: False)


def test_a_layer_that_nobody_builds_is_refused(parse_on_base, monkeypatch):
    monkeypatch.setitem(LAYER_KINDS, "counted", CountedLayer)
    language = {**BACKBONE, "num_layers": 2, "layers": ["token_embedding", "transformer", "counted", "head"]}
    found = r"unit 'language', layers\[2\]: 'counted' can be planned and simulated but not trained yet"
    with pytest.raises(ModelError, match=found):
        parse_on_base(units={"vision": ENCODER, "language": language})


LLM, SCHEDULE_UNITS = MODELS["llm of 8 layers"], MODELS["vision, llm of 8 layers"]


def test_a_plan_file_may_cut_layers_as_it_likes_but_gives_a_schedule_what_it_needs(parse_on_base, tmp_path):
    parse, path = partial(parse_on_base, world_size=3, units=SCHEDULE_UNITS), tmp_path / "plan.yaml"
    config = parse("--llm-pp 2 --llm-vpp 2 --schedule interleaved-1f1b")
    build_plan(config, ModelGraph.from_file(config.model.model), 3).to_file(path)
    for schedule in ("1f1b", "interleaved-1f1b"):
        assert parse(f"--plan {path} --schedule {schedule}").training.schedule == schedule
    with pytest.raises(
        ConfigError, match=r"in the shape of a V.*give a unit such 'layers' in .*plan\.yaml, or choose --schedule zb"
    ):
        parse(f"--plan {path} --schedule zb-v")


MUTATIONS = [mutation for mutation in list_mutations() if mutation.area in ("model", "plan")]


def refusal_of(mutation: Mutation, folder: Path) -> str:
    """What the flags' parser says to the run with this mutation, in a new folder; empty where it takes it."""
    inputs = Inputs(folder, random.Random(0), working_flags(folder) | {"--data-path": folder.parent / "data" / "manifest.jsonl"})
    folder.mkdir()
    shutil.copy(folder.parent / "model.yaml", folder)
    mutation.apply(inputs)
    flags = [str(part) for pair in inputs.flags.items() for part in pair]
    try:
        parse_arguments(flags, environ={"WORLD_SIZE": str(NUM_RANKS)})
    except BraidError as problem:
        return str(problem)
    return ""


@pytest.mark.parametrize("area", ["model", "plan"])
def test_every_mutation_of_a_file_is_refused_in_one_line_or_taken(area, tmp_path, pytestconfig):
    """Every fourth without --all."""
    write_working_files(tmp_path)
    wrong = []
    mutations = [mutation for mutation in MUTATIONS if mutation.area == area]
    for number, mutation in enumerate(mutations[:: 1 if pytestconfig.getoption("all") else 4]):
        message = refusal_of(mutation, tmp_path / str(number))
        is_of_a_value = "." in mutation.name and " is " not in mutation.name and mutation.names
        names = (*mutation.names, f"{area}.yaml, line" if is_of_a_value else "")
        if message and (not all(name in message for name in names) or not message.isprintable() or len(message) > 1000):
            wrong.append(f"{mutation.name}: {message}")
        if mutation.must_be_refused and not message:
            wrong.append(f"{mutation.name}: taken")
    assert not wrong, "\n".join(wrong)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_hugging_face(tmp_path / "model")


def parse(line: str) -> RunConfig:
    flags = f"{line} --data-path m.jsonl --lr 1e-3 --train-iters 2 --global-batch-size 2"
    return parse_arguments(flags.split(), environ={})


def test_the_folder_is_the_model(folder):
    config = parse(f"--load-hf {folder}")
    assert config.model.model == config.checkpoint.load_hf == folder
    model = parse(f"--model {folder}")
    assert (model.checkpoint.load_hf, model.data.tokenizer_type) == (None, "ByteTokenizer")


def test_its_tokenizer_is_taken_unless_another_is_asked_for(folder):
    taken = parse(f"--load-hf {folder}").data
    assert (taken.tokenizer_type, taken.tokenizer_model) == ("HuggingFaceTokenizer", str(folder / "tokenizer.json"))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"--load-hf .*: there is no tokenizer.json; copy the model's own there"):
        parse(f"--load-hf {folder}")
    assert parse(f"--load-hf {folder} --tokenizer-type ByteTokenizer").data.tokenizer_type == "ByteTokenizer"


def test_a_config_that_is_not_known_is_an_error_of_the_model(folder):
    (folder / "config.json").write_text(json.dumps({**HUGGING_FACE, "architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(ModelError, match="cannot be trained here; expected one of LlamaForCausalLM"):
        parse(f"--load-hf {folder}")


def test_a_vocabulary_grows_for_special_tokens_alone(folder):
    graph = read_model(folder)
    assert with_vocabulary(graph, ByteTokenizer()).backbone.vocab_size == ByteTokenizer().vocab_size == 265
    for frozen in (replace(graph.backbone, freeze_module=True), replace(graph.backbone, lora=Lora(2))):
        for vocab_size, grown in ((260, 265), (320, 320)):
            unit = with_vocabulary(replace(graph, units=(replace(frozen, vocab_size=vocab_size),)), ByteTokenizer()).backbone
            assert (unit.vocab_size, unit.new_tokens) == (grown, (256, 265)), "also where there are rows to spare"
            assert [bool(unit.new_rows(kind)) for kind in unit.layers] == [True, False, False, True]
    (folder / "config.json").write_text(json.dumps({**HUGGING_FACE, "vocab_size": 255}))
    with pytest.raises(
        ConfigError, match="the tokenizer has 256 tokens, but the vocabulary of unit 'llm' 255; give the model's own"
    ):
        with_vocabulary(read_model(folder), ByteTokenizer())


def test_adapters_say_what_is_trained(folder, tmp_path):
    adapter = write_adapter(tmp_path / "adapter")
    model = parse(f"--load-hf {folder} --load-adapter {adapter}").model
    assert (model.lora_rank, model.lora_alpha, model.lora_targets) == (2, 8.0, ("llm.transformer.linear_proj",))
    with pytest.raises(ConfigError, match=r"--lora-rank would be ignored: --load-adapter .* says which adapters there are"):
        parse(f"--load-hf {folder} --load-adapter {adapter} --lora-rank 4")
    described = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**described, "lora_dropout": 0.05}))
    with pytest.raises(ConfigError, match=r"lora_dropout is 0.05 in adapter_config.json, .*; make it 0 there"):
        parse(f"--load-hf {folder} --load-adapter {adapter}")
    (adapter / "adapter_config.json").write_text(json.dumps(described))
    (adapter / "adapter_model.safetensors").write_bytes(b"not a file of tensors")
    with pytest.raises(ConfigError, match="adapter_model.safetensors: is no safetensors file"):
        parse(f"--load-hf {folder} --load-adapter {adapter}")
    with pytest.raises(ConfigError, match="nowhere: there is no adapter_config.json; give a folder that save_pretrained"):
        parse(f"--load-hf {folder} --load-adapter {tmp_path / 'nowhere'}")


DOCS = Path(__file__).parents[4] / "docs"
VARIANTS = {
    "plain": "",
    "HF": "--save-hf out",
    "LoRA": "--lora-rank 4",
    "experts": "",
    "FP8": "--fp8-format hybrid",
    "zero bubble": "--schedule zb-h1 --llm-pp 2",
    "waits": "--schedule optimus --llm-tp 2",
    "ZeRO-3": "--data-parallel-sharding-strategy optim_grads_params",
    "resume": "--load saved",
}
EXAMPLES = sorted((DOCS.parent / "examples" / "models").glob("*.yaml"))


def with_experts(model: Path, folder: Path) -> Path:
    """The model with experts in its LLM, which have no biases."""
    document = yaml.safe_load(model.read_text())
    llm = document["units"][read_model(model).backbone.name]
    for name in ("add_bias_linear", "add_mlp_bias"):
        llm.pop(name, None)
    llm.setdefault("experts", {"num_experts": 4})
    changed = folder / model.name
    changed.write_text(yaml.safe_dump(document, sort_keys=False))
    return changed


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_example_has_layers_of_transformer_engine(tmp_path, variant, request, monkeypatch):
    """Without --all one in eight, but in FP8."""
    monkeypatch.setattr(cross_checks, "check_autoencoders", lambda graph: None)  # their folders are not here
    trained, in_bfloat16 = 0, set()
    is_whole = variant == "FP8" or request.config.getoption("all")
    given = f"--data-path digits --global-batch-size 16 --train-iters 1 --lr 1e-3 {VARIANTS[variant]}"
    with machine_of("CUDA"):
        for model in EXAMPLES if is_whole else EXAMPLES[::8]:
            path = with_experts(model, tmp_path) if variant == "experts" else model
            graph = read_model(path)
            if variant == "waits" and not graph.encoders:
                continue
            sharing = "--colocate-units" if len(graph.units) > 1 else ""
            config = parse_arguments(f"--model {path} {given} {sharing}".split(), environ={"WORLD_SIZE": "8"})
            graph = choose_trained(graph, config.model)
            plan = build_plan(config, graph, 8)
            found = with_device_defaults(config, graph=graph, plan=plan, has_cuda=True)
            check_plan(found, graph=graph, plan=plan)
            assert (found.training.dtype, found.model.transformer_impl) == ("bfloat16", "transformer_engine"), model.name
            trained += 1
            for unit in graph.units if variant == "FP8" else ():
                products = engine_products(graph, unit, max(plan.units[unit.name].tensor_sizes), "tensorwise")
                in_bfloat16 |= {(model.stem, product.name) for product in products if not product.is_in_fp8}
    assert trained >= (40 if is_whole else 5)
    assert in_bfloat16 == ({(name, product) for name in NARROW for product in MLP} if variant == "FP8" else set())


MLP = ("linear_fc1", "linear_fc2")
NARROW = {"entrain-llama-1b", "entrain-llama-3b", "qwen2.5-omni-7b", "qwen2.5-vl-3b", "qwen2.5-vl-7b"}
"""Their vision encoders' MLP is 3,420 wide."""

"""The configuration of a run: one frozen dataclass per group of flags; each field's docstring is the flag's help.

A field `eval_iters` is the flag `--eval-iters`; a boolean that is on by default is the flag that turns it off (`load_optim` is
`--no-load-optim`), whose help is in `off`. `cross_checks.py` checks which flags go together.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from multimodal.balance import BALANCERS, UNBALANCED
from multimodal.data.blend import NamedData, read_data_path, read_mixture
from multimodal.data.sample_source import DEFAULT_MAX_PIXELS, DIGITS_PROGRAM, NUM_FRAMES, BadSample, Overlong
from multimodal.plan.plans_of_sizes import UnitSizes
from multimodal.schedule.builders import BUILDERS, schedule_name
from multimodal.schedule.passes import PASSES, PassRow, passes_named
from multimodal.values.errors import ConfigError

if TYPE_CHECKING:
    from multimodal.balance.length_cost import LengthCost
    from multimodal.data.remote import RemoteOptions

AT_LEAST_ONE = {"minimum": 1}
AT_LEAST_ZERO = {"minimum": 0}
A_COUNT = {"minimum": 1, "maximum": 10**9}
"""A number of steps, samples or tokens: more than the maximum is a typing error that would only cost memory and time."""
INPUT_PATH = {"input_path": True}
"""Inside a configuration file, such a path is first looked up beside that file."""
DEFAULT_SAVE_INTERVAL = 1000
AUTO = Path("auto")
"""Value in place of a plan: the run plans by itself."""
DIGITS = "digits"
"""Value in place of a path of data: the program `DIGITS_PROGRAM`."""
PER_UNIT = {"per_unit": True}
"""Filled from the flags that contain a unit's name; has no flag of its own."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model and its layers."""

    model: Path = field(metadata={**INPUT_PATH, "metavar": "FILE.yaml"})
    """The model graph: its units, their shapes, and the edges between them; or a folder of Hugging Face, for its config.json."""
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    """Implementation of transformer layers; transformer_engine needs that package and CUDA, where it is the default if the rest
    of the run allows it."""
    fp8_format: Literal["e4m3", "hybrid"] | None = None
    """Products of transformer layers in FP8: e4m3, or e5m2 for gradients (hybrid); by Transformer Engine, on CUDA."""
    fp8_recipe: Literal["tensorwise", "delayed", "mxfp8", "blockwise"] = "tensorwise"
    """--fp8-format: how scales are found; mxfp8 needs a Blackwell GPU."""
    attention_backend: Literal["auto", "sequences", "flash", "blocks", "flex", "triton", "dense"] = "auto"
    """Implementation of attention; flash, flex and triton need CUDA, dense is for checks; auto takes, of those that run here, the
    fastest of flash and sequences, or for items and context parallelism of triton, flex and blocks."""
    gradient_accumulation_fusion: bool = field(
        default=True,
        metadata={
            "off": "Add weight gradients to their buffers after their product, not in it, even where Apex, Transformer Engine "
            "or, on a CPU, torch can."
        },
    )
    """Add weight gradients to their buffers in their product, where Apex, Transformer Engine or, on a CPU, torch can."""
    kernel_fusion: bool = field(
        default=True, metadata={"off": "Compute activations and rotary positions step by step on CUDA, not in one kernel each."}
    )
    """Compute SwiGLU, GELU by tanh with its bias, and rotary positions in one kernel each on CUDA."""
    attention_mask: Literal["causal", "prefix", "embedded", "modality"] = "causal"
    """The LLM's mask of items: causal like text; all up to the last item in both directions, images first (prefix); or, anywhere
    in the text, each item in both directions (embedded), or all items of an encoder in a sample (modality)."""
    freeze: tuple[str, ...] = field(default=(), metadata={"metavar": "UNIT"})
    """Units whose module is not trained (the projector of an encoder or generator still is)."""
    freeze_projector: tuple[str, ...] = field(default=(), metadata={"metavar": "UNIT"})
    """Encoders and generators whose projector is not trained."""
    lora_rank: int | None = field(default=None, metadata={"minimum": 1, "maximum": 2**14})
    """Train adapters of this rank (LoRA) in place of the weights of the units that --lora-targets names, which are frozen."""
    lora_alpha: float | None = field(default=None, metadata={"above": 0, "maximum": 1e6})
    """Products of adapters are scaled by this over --lora-rank; by default they are not."""
    lora_targets: tuple[str, ...] = field(default=(), metadata={"metavar": "PATTERN"})
    """Linear layers with adapters, as UNIT.KIND.MODULE or the end of it, with * and ?; by default all inside the LLM. Others are
    listed in an error."""
    allow_callbacks: bool = False
    """Run programs, which do whatever they like: the functions that the model file names between modules, --data-path FILE.py."""
    make_vocab_size_divisible_by: int = field(default=128, metadata={"minimum": 1, "maximum": 2**16})
    """The vocabulary is padded to a multiple of this, whatever the plan; the LLM's tensor parallel size must divide it."""


@dataclass(frozen=True, kw_only=True)
class ParallelismConfig:
    """The ranks of the units: by default each has ranks of its own, encoders first, then the LLM, then generators."""

    units: Mapping[str, UnitSizes] = field(default_factory=dict, metadata=PER_UNIT)
    """Sizes of every unit of the model."""
    sequence_parallel: bool = False
    """Shard norms and residual sums over the tensor parallel ranks; needs a unit with tensor parallel size above 1."""
    tp_comm_overlap: bool = False
    """Cut the tensor parallel collectives of transformer layers into parts, each of which runs beside the product of another."""
    tp_comm_overlap_parts: int = field(default=4, metadata={"minimum": 2, "maximum": 1024})
    """--tp-comm-overlap: number of parts; a microbatch of fewer tokens has fewer."""
    tp_comm_overlap_rows: int | None = field(default=None, metadata=A_COUNT)
    """--tp-comm-overlap: let layers of Transformer Engine in the LLM overlap in user buffers of this many tokens, to which
    microbatches of at least nine tenths are padded; others overlap nothing."""
    context_parallel_distribution: Literal["by-item", "lpt", "zigzag", "ring", "random"] = "by-item"
    """Rule that deals a microbatch's tokens to context parallel ranks: whole items of encoders and generators, of which only long
    ones are cut, and the LLM's as lpt (by-item); or blocks of tokens, by work (lpt) or as schemes for causal masks do."""
    context_parallel_block_size: int = field(default=128, metadata=A_COUNT)
    """Tokens of such a block; a multiple of the patches that an encoder with context parallelism merges into one token."""
    data_parallel_sharding_strategy: Literal["optim", "optim_grads_params"] = "optim"
    """State that data parallel ranks shard: the optimizer's (ZeRO-1; in float64 none), or weights and gradients, too (ZeRO-3)."""
    reduce_gradients_once: bool = False
    """optim_grads_params: add up a step's gradients on each rank, in 4 bytes per weight of its stages (8 in float64), and reduce
    them in the last backward, not in each."""
    num_distributed_optimizer_instances: int = field(default=1, metadata=A_COUNT)
    """Copies of all sharded state, each shared by as many neighbouring ranks: of the optimizer's, or with optim_grads_params of
    weights and gradients, too (hybrid sharding). Must divide the data parallel sizes."""
    layer_partition: Literal["frozen-aware", "even"] = "frozen-aware"
    """Rule that cuts a unit into the pipeline stages of its size flags: the slowest is as fast as can be, as forwards and those
    backwards are predicted that freezing leaves (frozen-aware); or all have equally many transformer layers (even)."""
    colocate_units: bool = False
    """All units share all ranks, each with dp = processes / (tp x cp x pp). Chosen by itself when there is one process."""
    plan: Path | None = field(default=None, metadata={**INPUT_PATH, "metavar": "FILE.yaml|auto"})
    """A whole plan (unit, replicas, stages, ranks, layers) instead of the size flags; with --elastic a set of templates; or the
    word auto: measure the data, the layers and the links, and search a plan in which sizes that are given are kept."""
    plan_time_budget: float = field(default=10.0, metadata={"above": 0, "maximum": 10**5})
    """--plan auto: nominal seconds of simulation that the search may use up."""
    plan_trial_iters: int = field(default=3, metadata={"minimum": 0, "maximum": 10**6})
    """--plan auto: measure so many steps under the best plan and under the second best, if that is predicted to take at most 10 %
    longer, and go on under the faster one; 0: go by the prediction."""
    plan_review_iters: int = field(default=20, metadata={"minimum": 0, "maximum": 10**9})
    """--plan auto: hold the prediction against the measurement after so many steps, and tell of a better plan; 0: never."""
    replan: bool = False
    """--plan auto: go on under a plan that is then found to be more than 5 % better."""
    elastic: bool = False
    """Go on without a restart when nodes are lost or return, by the templates of --plan; started by scripts/elastic.sh."""
    elastic_timeout: float = field(default=30.0, metadata={"minimum": 1, "maximum": 10**6})
    """--elastic: seconds after which a rank that gives no sign of life is taken for lost."""
    fault_tolerance: int | None = field(default=None, metadata={"minimum": 0, "maximum": 2**20})
    """--elastic: nodes that may be lost at once without loss of work; by default what the templates were planned for."""

    @property
    def plans_itself(self) -> bool:
        """True if the run makes its own plan."""
        return self.plan == AUTO

    @property
    def cuts_by_seconds(self) -> bool:
        """True if predicted seconds of layers determine the layers of pipeline stages."""
        is_cut = any(sizes.pipeline_parallel_size > 1 for sizes in self.units.values())
        return is_cut and self.plan is None and self.layer_partition == "frozen-aware"

    @property
    def num_overlapped_parts(self) -> int:
        """Parts into which tensor parallel collectives are cut; 1: not cut."""
        return self.tp_comm_overlap_parts if self.tp_comm_overlap else 1

    @property
    def overlaps_collectives_alone(self) -> bool:
        """True if tensor parallel collectives run beside products, and no messages between stages or units run beside both."""
        has_messages = not self.colocate_units or any(sizes.pipeline_parallel_size > 1 for sizes in self.units.values())
        return self.tp_comm_overlap and self.plan is None and not has_messages

    @property
    def item_block_size(self) -> int | None:
        """Tokens of a block of an item that context parallel ranks cut; None: they have no whole items."""
        return self.context_parallel_block_size if self.context_parallel_distribution == "by-item" else None

    @property
    def num_state_copies(self) -> int | None:
        """Copies of sharded state, as in `RunOptions`."""
        return None if self.num_distributed_optimizer_instances == 1 else self.num_distributed_optimizer_instances

    @property
    def shards_weights(self) -> bool:
        """True if weights are sharded, too (ZeRO-3)."""
        return self.data_parallel_sharding_strategy == "optim_grads_params"


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Length, batches, order and precision of the training."""

    micro_batch_size: int = field(default=1, metadata=AT_LEAST_ONE)
    """Samples in one microbatch of the LLM; the mean where --balance equalises their work."""
    tokens_per_microbatch: int | None = field(default=None, metadata=A_COUNT)
    """Most tokens of the LLM in one microbatch, in place of a number of samples; a longer sample has one of its own."""
    packing_seq_length: int | None = field(default=None, metadata=A_COUNT)
    """Join samples into sequences of at most so many tokens of the LLM, which --global-batch-size and --micro-batch-size then
    count. Samples of a sequence do not see each other, and balancers may part them."""
    encoder_micro_batch_sizes: Mapping[str, int] = field(default_factory=dict, metadata=PER_UNIT)
    """Items in one microbatch of an encoder; an encoder that is not named follows the LLM's microbatches."""
    global_batch_size: int = field(metadata={"minimum": 1, "maximum": 2**17})
    """Samples in one optimizer step, over all replicas."""
    train_iters: int = field(metadata=A_COUNT)
    """Optimizer steps in all, those before a resumption included."""
    num_epochs: float | None = field(default=None, metadata={"above": 0, "maximum": 10**6})
    """Passes over the training samples, in place of --train-iters; rounded up to whole steps."""
    loss_average: Literal["tokens", "samples"] = "tokens"
    """The loss is the mean over all target tokens of the global batch, or over its samples, of the means of their tokens; the
    `loss_weight` of a sample in the data multiplies its part of either."""
    sample_loss_weight: tuple[float, ...] = field(default=(), metadata={"metavar": "W", "above": 0})
    """Weights, one for each data set of --data-path, by which its samples count in the loss, in addition to their own."""
    skip_train: bool = False
    """Train no step: evaluate, and write what --save-hf and --save-adapter ask for."""
    exit_interval: int | None = field(default=None, metadata=AT_LEAST_ONE)
    """Stop after the next step that this divides."""
    exit_duration_in_mins: float | None = field(default=None, metadata={"above": 0, "maximum": 10**9})
    """Save and stop after the step in which the run has lasted this many minutes, start-up included."""
    seed: int = field(default=1234, metadata={"minimum": 0, "maximum": 2**32 - 1})
    """Seed of weights, data order and the split of a manifest."""
    dtype: Literal["float32", "bfloat16", "float64"] = field(
        default="float32", metadata={"shorthand": ("bf16", "bfloat16", "float32")}
    )
    """Precision of weights and activations: bfloat16, the default on CUDA, keeps float32 main weights and gradients, float64 is
    for exact checks."""
    recompute_granularity: Literal["selective", "full"] | None = field(
        default=None, metadata={"shorthand": ("recompute_activations", "selective", None)}
    )
    """Recompute in the backward instead of storing: the attention core (selective) or whole layers (full)."""
    schedule: str = field(
        default="1f1b",
        metadata={"choices": lambda: tuple(BUILDERS), "parse": schedule_name, "metavar": "NAME", "names": BUILDERS.listed},
    )
    """Order of forwards and backwards on every rank, also with parameters (dip:rounds=6); some need virtual stages."""
    schedule_passes: str = field(default="", metadata={"metavar": "A,B", "names": lambda: tuple(PASSES)})
    """Passes that rewrite the schedule, one after another; on CUDA by default reduce-by-layer,gather-parameters where they change
    anything, '' for none."""
    emulate: Path | None = field(default=None, metadata={**INPUT_PATH, "metavar": "COSTS.yaml"})
    """Wait as long as this table says instead of computing, and hold the measured step against the simulated one."""
    balance: str = field(default=UNBALANCED, metadata={"choices": lambda: tuple(BALANCERS)})
    """Method that distributes samples and items over replicas and microbatches; NAME:key=value,key gives it the options of the
    next six flags, too: granularity, costs (one for each unit), rearrange-nodes, num-microbatches, merge-encoders,
    refine-encoders."""
    balance_granularity: Literal["item", "sample"] = "item"
    """The unit that balancing an encoder moves: each image or clip by itself, or all of a sample together."""
    unit_costs: tuple[str, ...] = field(default=(), metadata={"metavar": "UNIT=FORM[:W]"})
    """Costs that balancers equalise in place of a unit's FLOPs, for units whose module pads: linear, linear+quadratic:W, padded
    or padded-attention:W, in tokens; W weighs the quadratic term."""
    rearrange_nodes: bool = False
    """Permute the batches of every encoder and generator over its replicas such that least crosses nodes (OrchMLLM, Alg. 3),
    whoever balances them: to and from the LLM and, with --lengths-from decode, raw samples. Prints the bytes with the balance."""
    balance_num_microbatches: Literal["given", "effective", "predicted"] = "given"
    """The number of microbatches that --balance entrain (also as tried by auto) makes: as --micro-batch-size asks; as many as can
    all have the encoders' work of the longest sample (Entrain's K_eff); or whichever is predicted to take shortest."""
    merge_encoders: bool = False
    """--balance entrain: balance all encoders as one, by their work in sum (--schedule encoders-colocated also runs them so)."""
    refine_encoders: bool = False
    """Balance encoders over their replicas by themselves where the --balance would place them beside the LLM: disttrain and
    entrain as published leave their replicas uneven where these are not the LLM's."""
    cluster: Path | None = field(default=None, metadata={**INPUT_PATH, "metavar": "C.yaml"})
    """The machine whose durations --balance auto, the order of --balance disttrain and schedules made from durations go by; by
    default one like this."""
    layer_costs: Path | None = field(default=None, metadata={**INPUT_PATH, "metavar": "COSTS.yaml"})
    """The layers' seconds as tools/profile_layers.py measured them, in place of those that follow from the machine's description,
    or that the run measures; with --plan auto, in place of measuring them."""
    measure_interval: int = field(default=20, metadata={"minimum": 0, "maximum": 10**9})
    """After so many steps, and then after twice, four times, ... as many, measure the layers' seconds from the last timelines,
    and go by them wherever a run goes by durations; and what --balance auto gains, which decides no steps where that is nothing;
    0: never."""
    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Communication library; by default nccl where CUDA is present, else gloo."""
    allow_python_kernels: bool = False
    """Train on CUDA although the C++ kernels are not there, and decide every step with their slow Python references."""
    allow_low_memory: bool = False
    """Build the model although the plan needs more memory than a rank has free, by an estimate from below."""
    distributed_timeout_minutes: float = field(default=10.0, metadata={"minimum": 0.01, "maximum": 30000})
    """Minutes that a rank waits for its peers before the run ends with an error."""

    @property
    def passes(self) -> tuple[PassRow, ...]:
        """The passes that rewrite the schedule, in order; raises ConfigError for wrong names."""
        return passes_named(self.schedule_passes)

    @property
    def splits_backwards(self) -> bool:
        """True if the schedule, or a pass, cuts backwards into input and weight gradients."""
        return BUILDERS[self.schedule].splits_backwards or any(row.splits_backwards for row in self.passes)

    @property
    def most_microbatch_tokens(self) -> int | None:
        """Most tokens of the LLM in a microbatch of several samples; None: it has a number of samples."""
        most = self.packing_seq_length
        return self.tokens_per_microbatch if most is None else most * self.micro_batch_size

    @property
    def declared_costs(self) -> "dict[str, LengthCost]":
        """Unit -> its declared cost, by the names in --unit-costs; raises ConfigError."""
        from multimodal.balance.length_cost import CostForm, LengthCost  # behind the flags, like all that they do not list

        found: dict[str, LengthCost] = {}
        for words in self.unit_costs:
            name, _, text = words.partition("=")
            try:
                cost = LengthCost.from_text(text)
            except ValueError as problem:
                raise ConfigError(
                    f"--unit-costs {words}: expected UNIT=FORM or UNIT=FORM:W with one of the forms {', '.join(CostForm)}, "
                    f"such as vision=padded-attention:0.001 ({problem})"
                ) from None
            if name in found:
                raise ConfigError(f"--unit-costs: unit '{name}' is there twice; keep one")
            found[name] = cost
        return found


UNIT_RATES = {
    "lr": "Highest learning rate of the unit's module (0 is --freeze), whose decay and warm-up are like those of --lr; by "
    "default --lr.",
    "weight_decay": "Weight decay of the unit's module; by default --weight-decay.",
    "lr_warmup_iters": "Steps in which its learning rate rises; by default --lr-warmup-iters.",
    "projector_lr": "The same for its projector; by default --projector-lr.",
    "projector_weight_decay": "The same for its projector; by default --weight-decay.",
    "projector_lr_warmup_iters": "The same for its projector; by default --lr-warmup-iters.",
}
"""Settings of the optimizer that a unit's module and its projector may have of their own -> the flag's help."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW and its learning rate, under Megatron's names."""

    lr: float = field(metadata={"above": 0})
    """Highest learning rate."""
    min_lr: float = field(default=0.0, metadata=AT_LEAST_ZERO)
    """Learning rate that the decay ends at."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Curve of the learning rate after the warm-up."""
    lr_decay_iters: int | None = field(default=None, metadata=AT_LEAST_ONE)
    """Step at which the decay ends; by default --train-iters."""
    lr_warmup_iters: int = field(default=0, metadata=AT_LEAST_ZERO)
    """Steps in which the learning rate rises linearly."""
    lr_warmup_fraction: float | None = field(default=None, metadata={"minimum": 0, "below": 1})
    """The same, as a fraction of --lr-decay-iters."""
    lr_warmup_init: float = field(default=0.0, metadata=AT_LEAST_ZERO)
    """Learning rate that the warm-up starts at."""
    lr_wsd_decay_iters: int | None = field(default=None, metadata=AT_LEAST_ONE)
    """WSD: steps of the final annealing."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """WSD: curve of the learning rate in the final annealing."""
    weight_decay: float = field(default=0.01, metadata=AT_LEAST_ZERO)
    """AdamW's decoupled weight decay."""
    adam_beta1: float = field(default=0.9, metadata={"minimum": 0, "below": 1})
    """Decay of the running mean of gradients."""
    adam_beta2: float = field(default=0.999, metadata={"minimum": 0, "below": 1})
    """Decay of the running mean of squared gradients."""
    adam_eps: float = field(default=1e-8, metadata={"above": 0})
    """Added to the denominator of the update."""
    clip_grad: float = field(default=1.0, metadata=AT_LEAST_ZERO)
    """Largest global gradient norm, over all units; 0 does not clip."""
    projector_lr: float | None = field(default=None, metadata={"above": 0})
    """Highest learning rate of all projectors, whose decay and warm-up are like those of --lr; by default --lr."""
    generator_ema_decay: float | None = field(default=None, metadata={"minimum": 0, "below": 1})
    """Keep an exponential moving average of the weights of generators with this decay, such as 0.999, to draw with."""
    unit_rates: Mapping[str, float] = field(default_factory=dict, metadata=PER_UNIT)
    """`<unit>.<one of UNIT_RATES>` -> its value; those that are not named are as in other units."""

    def rate(self, unit: str, name: str) -> float:
        """Return one of `UNIT_RATES` of a unit."""
        of_all = self.projector_lr if name == "projector_lr" else None
        common = getattr(self, name.removeprefix("projector_")) if of_all is None else of_all
        return self.unit_rates.get(f"{unit}.{name}", common)

    def in_steps(self, decay_iters: int) -> "OptimizerSettings":
        """Return the settings of a decay that ends at this step, with the warm-up in steps."""
        warmup = self.lr_warmup_iters if self.lr_warmup_fraction is None else int(self.lr_warmup_fraction * decay_iters)
        return replace(self, lr_decay_iters=decay_iters, lr_warmup_iters=warmup)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The training data."""

    data_path: tuple[str, ...] = field(metadata={**INPUT_PATH, "metavar": "DATA|FILE.py|digits"})
    """A manifest, chats in JSON (messages or LLaVA's conversations) or a data set of Hugging Face on disk; several, each with a
    weight before it or none (0.7 A 0.3 B), or a Metadataset v2 (FILE.yaml); or a Python program that makes samples; digits:
    handwritten digits, a program's."""
    data_args_path: Path | None = field(default=None, metadata={**INPUT_PATH, "metavar": "FILE"})
    """Text file with the words of --data-path, in place of it, as Megatron's: for mixtures of many data sets."""
    tokenizer_type: Literal["ByteTokenizer", "HuggingFaceTokenizer"] = "ByteTokenizer"
    """Tokenizer of texts."""
    tokenizer_model: str | None = field(default=None, metadata={**INPUT_PATH, "metavar": "PATH"})
    """HuggingFaceTokenizer: its tokenizer.json, or the folder that holds it."""
    chat_template: str | None = field(default=None, metadata={**INPUT_PATH, "metavar": "FILE|none"})
    """Template (Jinja) that writes conversations; none: turns of Braid's own. By default the one in the tokenizer's folder."""
    seq_length: int = field(default=4096, metadata=A_COUNT)
    """Most LLM tokens (text and images) that one sample may have."""
    overlong: Overlong = "truncate"
    """Treatment of longer samples: cut them at the end, leave them out, or stop at the first with an error."""
    bad_sample: BadSample = "error"
    """Treatment of samples with an image or sound that is missing or cannot be read: stop at the first with an error, or go on
    without them."""
    bad_samples_per_thousand: float = field(default=1.0, metadata={"minimum": 0, "below": 1000})
    """--bad-sample skip: most such samples among a thousand; more are an error."""
    lengths_from: Literal["index", "decode"] = "index"
    """Source of lengths: metadata, so that each rank loads only samples assigned to it; or decoding, in which each rank decodes a
    share of the global batch, which is then exchanged."""
    data_cache_path: Path | None = field(default=None, metadata={"metavar": "DIR"})
    """Folder for the index that is made of the data, and for what is kept of remote data; by default .braid-index beside it, or
    ~/.cache/braid."""
    data_cache_mib: int = field(default=8192, metadata={"minimum": 0, "maximum": 2**40})
    """Most of remote data (s3://, gs://, http://) that a node keeps on its disk, in MiB."""
    data_retries: int = field(default=8, metadata={"minimum": 0, "maximum": 100})
    """Times that a read of remote data is tried again, ever later, before the run ends."""
    latent_cache: Path | None = field(default=None, metadata={**INPUT_PATH, "metavar": "DIR"})
    """Folder with the latents of what generators make, as tools/cache_latents.py writes it; by default ranks encode images."""
    media_dir: str | None = field(default=None, metadata={**INPUT_PATH, "metavar": "DIR"})
    """Folder, or address, that paths of images, sound and videos in the data begin at; by default that of the data."""
    allow_outside_paths: bool = False
    """Let a manifest name files outside its own folder, by addresses, absolute paths, .. or links; for trusted manifests."""
    max_image_pixels: int = field(default=DEFAULT_MAX_PIXELS, metadata=AT_LEAST_ONE)
    """Largest image file (width x height) of a manifest that is decoded; a larger one is an error at the start."""
    num_frames: int = field(default=NUM_FRAMES, metadata={"minimum": 1, "maximum": 10**5})
    """Most frames that are taken of a video, evenly spread over its time: images to the model, or parts of steps (Qwen2-VL)."""
    video_fps: float | None = field(default=None, metadata={"above": 0, "maximum": 10**4})
    """Frames that are taken of a second of video, up to --num-frames; by default that many of any."""
    video_max_pixels: int | None = field(default=None, metadata={"minimum": 1, "maximum": 2**31})
    """Most pixels of a scaled frame of a video, for encoders of images at native resolution; by default as the model says."""
    video_sound: bool = False
    """Let models with an encoder of sound hear videos, behind their frames."""
    split: str = field(default="969,30,1", metadata={"metavar": "TRAIN,VALID,TEST"})
    """Proportions of training, validation and test samples of a manifest."""
    num_workers: int = field(default=2, metadata={"minimum": 0, "maximum": 256})
    """Processes per rank that load and decode ahead; 0 loads in the training process."""
    producers: tuple[str, ...] = field(default=(), metadata={"metavar": "HOST:PORT"})
    """Processes that tokenise and decode in place of --num-workers, which then only pack (tools/producer.py)."""
    producer_token: Path | None = field(default=None, metadata={**INPUT_PATH, "metavar": "FILE"})
    """A file with the secret that producers were started with."""
    program_samples: int = field(default=10000, metadata=A_COUNT)
    """--data-path FILE.py or digits: number of training samples that the program makes."""

    @property
    def remote(self) -> "RemoteOptions":
        """The way in which remote data are read."""
        from multimodal.data.remote import RemoteOptions

        folder = self.data_cache_path and self.data_cache_path / "remote"
        return RemoteOptions(folder, cache_mib=self.data_cache_mib, retries=self.data_retries)

    @property
    def sample_program(self) -> Path | None:
        """The Python program that makes the samples; None if they are read."""
        path = Path(self.data_path[0])
        if len(self.data_path) > 1 or not (self.data_path[0] == DIGITS or path.suffix == ".py"):
            return None
        return DIGITS_PROGRAM if self.data_path[0] == DIGITS else path

    @property
    def mixture(self) -> tuple[NamedData, ...]:
        """The data sets with their weights; raises ConfigError."""
        return read_mixture(self.data_path)


HELD_OUT = "held out"
"""The name of the validation samples of --data-path in reports."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation on held-out samples."""

    eval_interval: int | None = field(default=None, metadata=AT_LEAST_ONE)
    """Steps between evaluations; by default only after the last step."""
    eval_iters: int = field(default=0, metadata={"minimum": 0, "maximum": 10**9})
    """Global batches per evaluation; 0 does not evaluate."""
    valid_data_path: tuple[str, ...] = field(default=(), metadata={**INPUT_PATH, "metavar": "[NAME=]DATA"})
    """Validation sets beside the samples held out of --data-path, each evaluated and reported by itself under its name, by
    default that of its file."""
    eval_blank_images: bool = False
    """Also evaluate with blank images, to see whether the model uses them."""
    sample_prompts: Path | None = field(default=None, metadata={**INPUT_PATH, "metavar": "FILE"})
    """Questions, in a form of --data-path with the expected answers, that the model answers with every evaluation, in words or by
    an image, into the log and all reports. Weights are handed over in --save, to a process on the CPU beside rank 0."""
    sample_max_new_tokens: int = field(default=64, metadata=A_COUNT)
    """--sample-prompts: the longest answer."""
    sample_guidance_scale: float = field(default=1.0, metadata=AT_LEAST_ZERO)
    """--sample-prompts: weight of the prompt in the images that a generator answers with."""

    @property
    def valid_sets(self) -> Mapping[str, NamedData]:
        """The data sets of --valid-data-path by their names; raises ConfigError for two with one name."""
        named: list[tuple[str, NamedData]] = []
        for name, mark, path in (word.partition("=") for word in self.valid_data_path):
            name, path = (name, path) if mark else (Path(name).stem, name)
            data_sets = read_data_path(path)[1]
            named += ((name if len(data_sets) == 1 else f"{name}/{each.name}", each) for each in data_sets)
        found = dict(named)
        if len(found) < len(named) or HELD_OUT in found:
            raise ConfigError(
                f"--valid-data-path {' '.join(self.valid_data_path)}: every set needs a name of its own, other than "
                f"'{HELD_OUT}'; write NAME=PATH"
            )
        return found


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints to save and to resume from."""

    save: Path | None = field(default=None, metadata={"metavar": "DIR"})
    """Folder for checkpoints; one is written at the end."""
    save_interval: int | None = field(default=None, metadata=AT_LEAST_ONE)
    """Steps between checkpoints, the last of them at the end; by default 1000."""
    keep_last_checkpoints: int = field(default=2, metadata=AT_LEAST_ONE)
    """Newest checkpoints that are kept."""
    save_retain_interval: int | None = field(default=None, metadata=AT_LEAST_ONE)
    """Keep also the checkpoints of all steps that this divides."""
    save_best: Literal["loss", "token_accuracy", "answer_accuracy"] | None = None
    """Keep also the weights with the best of this in an evaluation, of the held-out samples or else the first validation set, in
    the folder `best` of --save."""
    async_save: bool = False
    """Copy the state to host memory, and write checkpoints from there while training goes on."""
    load: Path | None = field(default=None, metadata={"metavar": "DIR"})
    """Folder whose newest complete checkpoint is resumed, under any plan."""
    load_optim: bool = field(default=True, metadata={"off": "Start with a fresh optimizer."})
    """Resume the optimizer's state, too."""
    load_rng: bool = field(default=True, metadata={"off": "Start with fresh random generators."})
    """Resume the state of random generators, too."""
    new_phase: bool = False
    """Resume --load with another global batch size, data, frozen units or learning rate schedule: each data set goes on where
    it was left, and the learning rate begins its schedule anew if that or what is trained changes. No effect without a change."""
    finetune: bool = False
    """Start at step 0 from the weights alone of --load; or go on from --save once that holds a checkpoint."""
    pretrained_checkpoint: Path | None = field(default=None, metadata={"metavar": "DIR"})
    """Folder whose newest weights a run starts from at step 0, unless --load (with --save) holds a checkpoint to go on from."""
    load_hf: Path | None = field(default=None, metadata={**INPUT_PATH, "metavar": "DIR"})
    """Folder of Hugging Face (config.json, safetensors files) that a run starts from as from --pretrained-checkpoint. It also
    gives the model, unless --model does."""
    load_megatron: Path | None = field(default=None, metadata={**INPUT_PATH, "metavar": "DIR"})
    """Checkpoint, or run, of Megatron (torch_dist) that a run goes on from, at its step and with its optimizer's state; with
    --finetune from its weights alone, at step 0. As with --pretrained-checkpoint, a checkpoint in --load comes first."""
    load_adapter: Path | None = field(default=None, metadata={**INPUT_PATH, "metavar": "DIR"})
    """Folder of Hugging Face's PEFT (adapter_config.json, adapter_model.safetensors) whose adapters a run starts from, on top of
    the weights that it starts from. It says what --lora-rank, --lora-alpha and --lora-targets would."""
    save_hf: Path | None = field(default=None, metadata={"metavar": "DIR"})
    """New folder that gets the model after the last step as Hugging Face's transformers load it, with names, types, files and
    tokenizer of --load-hf if given, or of a folder that --model names where the family needs one. Adapters are merged."""
    save_megatron: Path | None = field(default=None, metadata={"metavar": "DIR"})
    """Folder that gets checkpoints which Megatron loads (torch_dist), every --save-interval steps and at the end."""
    save_adapter: Path | None = field(default=None, metadata={"metavar": "DIR"})
    """New folder that gets adapters, and whatever else was trained, after the last step as Hugging Face's PEFT loads them."""

    @property
    def saves_steps(self) -> bool:
        """True if checkpoints are written after steps, of either form."""
        return bool(self.save or self.save_megatron)


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Reports, and the places they go to."""

    log_interval: int = field(default=10, metadata=AT_LEAST_ONE)
    """Steps between lines of the log."""
    tensorboard_dir: Path | None = field(default=None, metadata={"metavar": "DIR"})
    """Folder for TensorBoard."""
    log_json: Path | None = field(default=None, metadata={"metavar": "FILE.jsonl"})
    """File that gets a JSON object a line: of every step (step, loss, grad_norm, num_target_tokens, step_seconds, ...), and of
    every evaluation (step, evaluation: what of, loss, token_accuracy, answer_accuracy)."""
    report_dir: Path | None = field(default=None, metadata={"metavar": "DIR"})
    """Folder for the report: index.html, one file with loss, throughput, balance, timeline, plan and answers; and timelines."""
    timeline_interval: int | None = field(default=None, metadata=AT_LEAST_ONE)
    """Steps between drawn timelines; by default only the last step's."""
    peak_tflops: float | None = field(default=None, metadata={"above": 0})
    """Peak TFLOP/s of one device, for the model FLOPs utilisation (MFU)."""
    log_straggler: bool = False
    """Name, with the lines about balance, the rank that computes longest against the median of the ranks with the same layers."""
    profile: bool = False
    """Profile some steps: name every action as a range, and start and stop CUDA's profiler (nsys profile -c cudaProfilerApi)."""
    profile_step_start: int = field(default=10, metadata=A_COUNT)
    """--profile: first step that is profiled."""
    profile_step_end: int = field(default=12, metadata=A_COUNT)
    """--profile: first step behind those."""
    profile_ranks: tuple[int, ...] = field(default=(0,), metadata={"metavar": "RANK", "minimum": 0})
    """--profile: ranks that are profiled."""
    use_pytorch_profiler: bool = False
    """--profile: by torch's profiler, into --report-dir as profile_rank_N.json, for chrome://tracing or Perfetto."""
    wandb_project: str | None = field(default=None, metadata={"metavar": "NAME"})
    """Project of Weights & Biases that gets the numbers of every step, those of a run that is resumed from --save in the same run
    there; needs the package wandb."""
    wandb_exp_name: str | None = field(default=None, metadata={"metavar": "NAME"})
    """--wandb-project: name of the run there."""
    wandb_entity: str | None = field(default=None, metadata={"metavar": "NAME"})
    """--wandb-project: user or team that the project belongs to."""
    wandb_save_dir: Path | None = field(default=None, metadata={"metavar": "DIR"})
    """--wandb-project: folder for its files; by default wandb's own."""
    mlflow_experiment: str | None = field(default=None, metadata={"metavar": "NAME"})
    """Experiment of MLflow that gets the same as Weights & Biases, at MLFLOW_TRACKING_URI; needs the package mlflow."""
    mlflow_run_name: str | None = field(default=None, metadata={"metavar": "NAME"})
    """--mlflow-experiment: name of the run there."""
    progress_bar: bool = field(default=True, metadata={"off": "Print plain lines instead of a progress bar."})
    """Show a progress bar on a terminal."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The whole configuration of a run."""

    model: ModelConfig
    parallelism: ParallelismConfig
    training: TrainingConfig
    optimizer: OptimizerSettings
    data: DataConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    given: frozenset[str] = frozenset()
    """Names of the fields that were set rather than left at their default; a unit's as `vision.tensor_parallel_size`."""

    @property
    def goes_by_durations(self) -> bool:
        """True if predicted durations determine anything in the run."""
        balancer = BALANCERS[self.training.balance]
        is_predicted = balancer.defers and self.training.balance_num_microbatches == "predicted"
        return balancer.needs_costs or balancer.judges or is_predicted or BUILDERS[self.training.schedule].needs_costs

    @property
    def measuring_interval(self) -> int:
        """Steps after which the run measures its layers, and what balancing gains, anew; 0 if it does not, or does not need to.

        With --layer-costs it measures only what --balance auto gains.
        """
        is_predicted = BALANCERS[self.training.balance].needs_costs
        goes_by_them = self.goes_by_durations if self.training.layer_costs is None else is_predicted
        return self.training.measure_interval if goes_by_them and self.training.emulate is None else 0


GROUPS: Mapping[str, type] = {name: kind for name, kind in RunConfig.__annotations__.items() if isinstance(kind, type)}
"""The groups of flags, by their field of `RunConfig`."""

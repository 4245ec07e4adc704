"""Answers to Megatron-LM's flags that Braid does not have, for error messages: answer -> flags, without their dashes.

`*` stands for any beginning or end of a name. Flags that Braid has under Megatron's name are not listed.
"""

from fnmatch import fnmatchcase

IN_MODEL_FILE = {
    "num_layers": "num-layers encoder-num-layers decoder-num-layers",
    "hidden_size": "hidden-size",
    "num_attention_heads": "num-attention-heads",
    "ffn_hidden_size": "ffn-hidden-size",
    "num_query_groups": "num-query-groups group-query-attention",
    "kv_channels": "kv-channels",
    "normalization": "normalization",
    "layernorm_epsilon": "norm-epsilon",
    "activation": "swiglu openai-gelu",
    "add_bias_linear": "disable-bias-linear",
    "add_qkv_bias": "add-qkv-bias",
    "qk_layernorm": "qk-layernorm",
    "rotary_scaling": "use-rope-scaling rope-scaling-factor",
    "layernorm_zero_centered_gamma": "apply-layernorm-1p",
    "rotary_base": "rotary-base",
    "init_method_std": "init-method-std",
    "experts": (
        "num-experts moe-router-topk moe-ffn-hidden-size moe-shared-expert-intermediate-size moe-aux-loss-coeff "
        "moe-router-pre-softmax"
    ),
    "untie_embeddings_and_output_weights": "untie-embeddings-and-output-weights",
    "image": "img-h img-w num-channels patch-dim",
}
"""Key of a unit in the model file -> flags."""

CALLED = {
    "--attention-backend": "use-flash-attn",
    "--bf16": "fp16",
    "--config": "yaml-cfg",
    "--data-parallel-sharding-strategy optim_grads_params": (
        "use-megatron-fsdp use-torch-fsdp2 fsdp-* megatron-fsdp-* torch-fsdp2-*"
    ),
    "--data-path": "train-data-path per-split-data-args-path",
    "--data-path digits": "mock-data",
    "--distributed-timeout-minutes": "distributed-timeout-seconds-after-init",
    "--freeze": "freeze-all-layers",
    "--log-interval": "tensorboard-log-interval",
    "--no-kernel-fusion": "no-bias-gelu-fusion no-bias-swiglu-fusion no-rope-fusion",
    "--lr-decay-iters": "lr-decay-samples",
    "--lr-warmup-fraction": "warmup",
    "--lr-warmup-iters": "lr-warmup-samples",
    "--lr-wsd-decay-iters": "lr-wsd-decay-samples",
    "--make-vocab-size-divisible-by": "padded-vocab-size",
    "--micro-batch-size": "batch-size",
    "--plan": (
        "pipeline-model-parallel-layout decoder-*-pipeline-num-layers account-for-*-in-pipeline-split use-tp-pp-dp-mapping"
    ),
    "--recompute-granularity": "recompute-method recompute-num-layers recompute-modules checkpoint-activations",
    "--report-dir": "timing-log-* log-timers-to-tensorboard",
    "--save-interval": "persistent-save-interval",
    "--schedule zb-h1": "delay-wgrad-compute defer-embedding-wgrad-compute wgrad-deferral-limit",
    "--schedule-passes gather-parameters": "overlap-param-gather",
    "--schedule-passes reduce-by-layer": "overlap-grad-reduce",
    "--seq-length": "encoder-seq-length decoder-seq-length max-position-embeddings",
    "--split": "test-data-path",
    "--tensor-model-parallel-size": "model-parallel-size",
    "--tokenizer-model": "vocab-file merge-file vocab-size",
    "--tp-comm-overlap-parts": "tp-comm-overlap-cfg",
    "--train-iters": "train-samples",
}
"""Braid's flag with the same or the closest effect -> flags."""

ALWAYS_ON = {
    "optimizer state is shared by replicas (ZeRO-1), but in float64": "use-distributed-optimizer",
    "models are built of megatron-core's layers": "use-mcore-models",
    "positions are rotary": "position-embedding-type use-rotary-position-embeddings no-position-embedding",
    "bfloat16 keeps float32 main gradients": "accumulate-allreduce-grads-in-fp32",
    "the loss is a mean over all target tokens of the global batch": "calculate-per-token-loss",
    "samples of a microbatch are packed, see only themselves and count their own positions": (
        "reset-position-ids reset-attention-mask eod-mask-loss no-create-attention-mask-in-dataloader"
    ),
    "initial weights depend on the seed alone, whatever the plan": "use-cpu-initialization init-model-with-meta-device",
    "a loss or gradient that is not finite ends the run": "no-check-for-nan-in-loss-and-grad",
    "--load ends the run where there is no checkpoint": "exit-on-missing-checkpoint",
    "checkpoints are sharded, complete and load under any plan": (
        "ckpt-format auto-detect-ckpt-format use-dist-ckpt dist-ckpt-* ckpt-fully-parallel-* no-ckpt-fully-parallel-save "
        "ckpt-assume-constant-structure ckpt-convert-* distrib-optim-fully-reshardable-*"
    ),
    "the optimizer is AdamW": "optimizer",
    "every line of the log has throughput": "log-throughput",
    "messages between stages are asynchronous": "no-overlap-p2p-communication overlap-p2p-communication-warmup-flush",
    "the launcher's environment says the rank": "local-rank",
    "--async-save copies the state to host memory and writes it from there in the background": (
        "async-strategy async-ckpt-* use-persistent-ckpt-worker"
    ),
}
"""Behaviour that needs no flag -> Megatron's flags for it."""

NOT_AVAILABLE = {
    "experts are as the model file's 'experts' says, and no token is dropped": (
        "moe-* expert-tensor-parallel-size use-grouped-gemm-* overlap-moe-expert-parallel-comm ep-overlap-* overlap-dispatch-*"
    ),
    "attention has queries in groups and no other variant": (
        "multi-latent-attention q-lora-rank kv-lora-rank v-head-dim mla-* cache-mla-latents mscale* rotary-scaling-factor "
        "experimental-attention-variant *dsa-* linear-* qk-* attention-output-gate window-* softmax-type "
        "apply-query-key-layer-scaling attention-softmax-in-fp32 flash-attention-version"
    ),
    "there are no state space layers": (
        "mamba-* disable-mamba-mem-eff-path hybrid-layer-pattern hybrid-override-pattern is-hybrid-model"
    ),
    "tokens are predicted one ahead": "mtp-*",
    "activations are swiglu or gelu (the model file's 'activation')": (
        "squared-relu use-fused-weighted-squared-relu quick-geglu onnx-safe glu-linear-offset activation-func-clamp-value"
    ),
    "norms are plain ones before each block": (
        "apply-residual-connection-post-layernorm fp32-residual-connection fused-residual-rmsnorm"
    ),
    "all channels of a head rotate; other scalings than Llama 3.1's are the model file's 'rotary_factors'": (
        "rotary-percent rotary-interleaved rotary-seq-len-interpolation-factor rope-type no-rope-freq yarn-* no-yarn-* "
        "mrope-section relative-attention-*"
    ),
    "there is no dropout": "hidden-dropout attention-dropout no-bias-dropout-fusion",
    "widths are scaled by hand": "use-mup mup-* init-method-xavier-uniform embedding-init-method-std",
    "training is in bfloat16, float32 or float64 (--dtype), products perhaps in FP8 (--fp8-format)": (
        "fp8-margin fp8-interval fp8-amax-* fp8-param-gather no-fp8-wgrad keep-fp8-transpose-cache fp4-* first-last-layers-bf16 "
        "num-layers-at-*-in-bf16 te-precision-config-file use-kitchen-attention kitchen-* loss-scale initial-loss-scale "
        "min-loss-scale loss-scale-window hysteresis fp16-lm-cross-entropy grad-reduce-in-bf16 use-precision-aware-optimizer "
        "main-*-dtype exp-avg-* reuse-grad-buf-for-mxfp8-param-ag"
    ),
    "kernels are the layers' own; choose whose with --transformer-impl": (
        "no-masked-softmax-fusion cross-entropy-* no-persist-layer-norm disable-jit-fuser use-transformer-engine-op-fuser "
        "use-te-activation-func"
    ),
    "there are no CUDA graphs": "enable-cuda-graph cuda-graph-* external-cuda-graph te-rng-tracker optimizer-cuda-graph",
    "nothing is kept on the host; --recompute-granularity full and sharding save memory": (
        "cpu-offloading-* fine-grained-* offload-modules optimizer-cpu-offload optimizer-offload-fraction "
        "activation-offload-fraction min-offloaded-tensor-size use-torch-optimizer-for-cpu-offload "
        "overlap-cpu-optimizer-d2h-h2d no-pin-cpu-*"
    ),
    "collectives are cut in one way, --tp-comm-overlap": (
        "no-tp-comm-bulk-* no-tp-comm-overlap-* no-tp-comm-split-* disable-tp-comm-* tp-comm-overlap-rs-dgrad "
        "tp-comm-bootstrap-backend"
    ),
    "context parallel ranks exchange in one way; --context-parallel-distribution deals the tokens": (
        "cp-comm-type hierarchical-context-parallel-sizes hybrid-context-parallel max-seqlen-per-dp-cp-rank"
    ),
    "microbatches are interleaved in groups of the pipeline size": "microbatch-group-size-per-virtual-pipeline-stage",
    "gradient buckets are Braid's; see --schedule-passes reduce-by-layer": (
        "ddp-* *-align-* no-gradient-reduce-div-fusion no-use-layer-wise-param-layout enable-full-sharding-in-hsdp "
        "overlap-param-gather-with-optimizer-step num-distributed-optimizer-instances outer-dp-sharding-strategy"
    ),
    "the optimizer is AdamW with one learning rate and weight decay": (
        "sgd-momentum muon-* lion-* decoupled-lr decoupled-min-lr start-weight-decay end-weight-decay weight-decay-incr-style "
        "apply-wd-to-qk-layernorm head-lr-mult"
    ),
    "the batch has one size; change --global-batch-size": (
        "rampup-batch-size step-batch-size-schedule decrease-batch-size-if-needed"
    ),
    "--load takes the newest checkpoint; its scheduler and model must be the run's": (
        "ckpt-step use-checkpoint-args use-mp-args-from-checkpoint-args override-opt*param-scheduler "
        "use-checkpoint-opt*param-scheduler override-ckpt-iteration"
    ),
    "checkpoints are whole; choose at --load with --no-load-optim and --no-load-rng": (
        "no-save-optim no-save-rng save-params-interval load-main-params-from-ckpt"
    ),
    "checkpoints are written to --save, with --async-save while training goes on": ("non-persistent-* replication replication-*"),
    "samples are read from a manifest; see docs/data.md": (
        "no-mmap-bin-files dataloader-* num-dataset-builder-threads object-storage-cache-path fim-* sft "
        "sft-tokenizer-prompt-format sample-rate mask-prob short-seq-prob no-data-sharding per-dataset-sequences-path "
        "phase-transition-iterations logits-*"
    ),
    "tokenizers are bytes or a tokenizer.json; see --tokenizer-type": (
        "tokenizer-metadata tokenizer-special-tokens tiktoken-* *tokenizer-sentencepiece-* tokenizer-hf-* null-tokenizer-* "
        "vocab-extra-ids trust-remote-code"
    ),
    "evaluation has --eval-iters, --eval-interval and the training batch size": (
        "start-eval-at-iter eval-*-batch-size full-validation multiple-validation-sets validation-set-names test-mode"
    ),
    "norms of weights and zeros of gradients are not logged; --log-json has the norm of all gradients (grad_norm)": (
        "log-params-norm log-num-zeros-in-grad"
    ),
    "the log has its columns; --log-json has all of them": (
        "log-progress log-validation-ppl-to-tensorboard log-memory-* log-device-memory-used "
        "log-max-attention-logit log-world-size-to-tensorboard log-energy straggler-* "
        "disable-straggler-on-startup logging-level one-logger-* no-one-logger app-tag-run-* tensorboard-queue-size "
        "*-log-loss-scale-to-tensorboard no-barrier-with-level-1-timing"
    ),
    "profiles are those of --profile": (
        "pytorch-profiler-* nvtx-ranges record-shapes record-memory-history memory-snapshot-path"
    ),
    "Braid trains; it does not serve": (
        "inference-* flash-decode rl-* no-rl-* no-inference-* perform-rl-step grpo-* langrl-env-config refit-method "
        "max-tokens-to-oom enable-chunked-prefill num-speculative-tokens decode-only-cuda-graphs nccl-all-reduce-for-prefill "
        "mlp-chunks-* use-legacy-static-engine"
    ),
    "units are described in the model file": (
        "spec heterogeneous-layers-* vision-pretraining vision-pretraining-type vision-backbone-type swin-backbone-type dino-* "
        "mask-type mask-factor iter-per-epoch num-classes bert-* biencoder-* ict-* titles-data-path evidence-data-path "
        "block-data-path embedding-path query-in-block-prob use-one-sent-docs output-bert-embeddings retriever-* indexer-* "
        "classes-fraction data-per-class-fraction"
    ),
    "a failed run is started again and resumes": (
        "inprocess-* enable-ft-package calc-ft-timeouts ft-* adlr-* rerun-mode error-injection-* fault-injector-* "
        "check-for-spiky-loss check-for-large-grads"
    ),
    "freed memory stays with torch's allocator": "empty-unused-memory-level",
    "Python collects its garbage when it likes": "manual-gc manual-gc-interval *-manual-gc-eval",
    "replicas start alike and stay alike": "data-parallel-random-init check-weight-hash-across-dp-replicas-interval",
    "a run with the same plan and seed repeats itself only as far as its kernels do": ("deterministic-mode batch-invariant-mode"),
    "every step of --train-iters is run": "iterations-to-skip train-sync-interval",
    "communication is set up with torch's and NCCL's own variables": (
        "nccl-communicator-config-path use-nccl-ub use-sharp sharp-enabled-group disable-gloo-process-groups "
        "high-priority-stream-groups pipeline-model-parallel-comm-backend use-ring-exchange-p2p lazy-mpu-init "
        "*flight-recorder-* fake-process-group create-all-gather-group suggested-communication-unit-size symmetric-ar-type "
        "disable-symmetric-registration high-priority-a2a-comm-stream"
    ),
}
"""Reason -> flags that are not available."""

KNOWN_ELSEWHERE = {
    "--transformer-impl transformer_engine": "use-te use-transformer-engine",
    "--lr": "learning-rate",
    "--llm-tp": "tp tensor-parallel-size",
    "--llm-pp": "pp pipeline-parallel-size",
    "--llm-cp": "cp",
    "--llm-vpp": "vpp",
    "--llm-dp": "dp data-parallel-size",
    "--adam-eps": "adam-epsilon",
    "--clip-grad": "max-grad-norm gradient-clipping",
    "--train-iters": "max-steps train-steps",
    "--num-epochs": "num-train-epochs epochs max-epochs",
    "--data-parallel-sharding-strategy": "zero-stage",
}
"""Braid's flag -> its names in other programs and in the field."""


MULTIMODAL = {
    "use --freeze here, with the encoder of sound": "freeze-sound-model",
    "use --freeze-projector here, with the encoder of sound": "freeze-sound-projection",
    "use --load-hf or a unit's 'weights' in the model file here, or convert a checkpoint with tools/convert.py": (
        "language-model-checkpoint"
    ),
    "use --chat-template here; by default the tokenizer's folder has the model's own": (
        "tokenizer-prompt-format force-system-message tokenizer-keep-history-thinking prompt-path"
    ),
    "use --tokens-per-microbatch here; microbatches are always packed": "packing-seq-length",
    "use --seq-length here": "total-seq-length dataloader-seq-length",
    "use --split here": "valid-path",
    "use --data-path here": "dataset-provider dataset-config",
    "use --model here": "model-provider recipe step-func",
    "use --recompute-granularity here, which holds for all units": "recompute-vision* recompute-sound* recompute-*-vision",
    "use --tp-comm-overlap here": "decoder-tp-comm-overlap",
    "use the size flags of the encoder's unit here, such as --vision-tp": (
        "encoder-tensor-model-parallel-size encoder-pipeline-model-parallel-size encoder-tp encoder-dp"
    ),
    "use --llm-dp here, beside the encoder's --vision-dp, and neither an offset nor a switch": "llm-offset llm-only",
    "it belongs in the model file, as the backbone and its shape": "language-model-type",
    "it belongs in the model file, as an encoder and its shape": "vision-model-type sound-model-type audio-encoder-model",
    "it belongs in the model file, as 'merge_size' 2 of 'image'": "pixel-shuffle use-pixel-shuffle-only",
    "it belongs in the model file, as 'max_tiles' of 'image'": "use-tiling max-num-tiles",
    "it belongs in the model file, as 'class_token' of 'image': dropped, kept, or no such line": "disable-vision-class-token",
    "it belongs in the model file, as 'num_registers' of 'image', beside the class token": "class-token-len",
    "it belongs in the model file, as 'image_size' of 'image'": "image-size",
    "it belongs in the model file, as 'min_pixels' and 'max_pixels' of 'image', without 'image_size'": "dynamic-resolution*",
    "it belongs in the model file, as 'audio'": "sound-embedding-size sound-clip-duration sound-target-rate",
    "leave it out: always, the whole image follows its tiles": "use-thumbnail thumbnail-area-threshold",
    "leave it out: always, items take the place of their marks in the text, whatever the token": (
        "special-tokens image-token-id img-embedding-idx image-seq-length hf-assign-unused-tokens pad-token-id eos-id"
    ),
    "leave it out: always, weights that are given are loaded whole, and projectors without any start anew": (
        "allow-missing-* allow-checkpoint-without-temporal-compression"
    ),
    "leave it out: always, microbatches are packed by --balance, and samples see only themselves": (
        "packing-buffer-size packing-knapsack-algorithm use-packed-sequence"
    ),
    "leave it out: always, each rank reads only the samples assigned to it": "optimize-broadcast use-new-dataloader-path",
    "leave it out: always, clips keep their length": "sound-pad-to-clip-duration sound-batch-split sound-min-duration",
    "leave it out: always, kernels are fused where they can be": "enable-fusions",
    "leave it out: always, tokenizers come from --tokenizer-model or --load-hf": "no-use-tokenizer-model-from-checkpoint-args",
    "leave it out: always, gradients are reduced as --schedule-passes says": "encoder-ddp-overlap",
    "not available: images have no tags in the text but those that the chat template writes": (
        "image-tag-type use-tile-tags image-break-token"
    ),
    "not available: tiles are chosen by InternVL's rule": (
        "use-area-weighted-aspect-ratio match-tiling-dynamic-resolution masked-tiling-dynamic-resolution"
    ),
    "not available: of a video --num-frames are taken, see docs/data.md": (
        "video-* separate-video-embedder allow-large-videos efficient-video-sampling-variant"
    ),
    "not available: the loss is a mean over target tokens of the global batch": "use-loss-scaling no-calculate-per-token-loss",
    "not available: samples of a microbatch see only themselves": "allow-cross-sample-attention",
    "not available: data is checked and taken as it is, see docs/data.md": (
        "relax-* only-keep-samples-with-img apply-data-augment lr-data-range-*"
    ),
    "not available: RADIO is an encoder with learned positions of one size here": "radio-*",
    "not available: neighbouring patches are merged side by side": "conv-merging",
    "not available: freezing is by unit and projector": "unfreeze-router",
    "not available: experts are spread by --expert-model-parallel-size alone": "llm-expt-tp *tensor-parallel-num-weight-shards",
    "not available: --eval-iters evaluates on held-out samples; see docs/generate.md for answers": "online-evaluation-config",
    "not available: norms are logged of the whole model (grad_norm)": "log-model-grad-norms log-model-act-norms",
    "not available: Braid trains; it does not serve, see docs/generate.md": (
        "use-mcore-inference use-vision-backbone-fp8-arch input-image-path output-path model-path task gt-path out-seq-length "
        "temperature top-k top-p num-partitions partition-id num-samples-per-partition input-metadata-path groundtruth-path"
    ),
}
"""Answer -> flags that only Megatron's multimodal scripts have (examples/multimodal, examples/mimo, pretrain_vlm)."""

FREEZES = {
    "--freeze-LM": ("--freeze", "backbone"),
    "--freeze-ViT": ("--freeze", "image"),
    "--freeze-vision-projection": ("--freeze-projector", "image"),
}
"""Megatron's switches that work here -> flag, and whose: the backbone's, or all encoders' of images."""


def explain_megatron_flag(name: str) -> str:
    """Explain a flag of Megatron (or another program); empty for a flag in no table.

    name: without dashes in front.
    """
    for answer, table in (
        ("it belongs in the model file, as '{}' of a unit", IN_MODEL_FILE),
        ("use {} here", CALLED),
        ("use {} here", KNOWN_ELSEWHERE),
        ("leave it out: always, {}", ALWAYS_ON),
        ("not available: {}", NOT_AVAILABLE),
        ("{}", MULTIMODAL),
    ):
        for key, names in table.items():
            if any(fnmatchcase(name, pattern) for pattern in names.split()):
                return answer.format(key)
    return ""


def megatron_flag_names() -> set[str]:
    """Return every name that the tables list in full."""
    tables = (IN_MODEL_FILE, CALLED, ALWAYS_ON, NOT_AVAILABLE, MULTIMODAL)
    return {name for table in tables for names in table.values() for name in names.split() if "*" not in name}

"""Braid's runtime on megatron-core: it executes what `multimodal` decided, and decides nothing itself."""

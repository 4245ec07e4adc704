"""Braid's runtime on megatron-core: it executes the decisions of `multimodal`, and decides nothing itself."""

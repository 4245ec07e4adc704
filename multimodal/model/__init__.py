"""Torch modules, built from a ModelGraph out of megatron-core's layers."""

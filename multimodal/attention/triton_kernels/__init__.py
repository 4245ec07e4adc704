"""Attention by Triton kernels: their launches, tiles, and the work list of a persistent grid of programs."""

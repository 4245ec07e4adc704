"""Attention by Triton kernels: their launches, tiles, and the list of work that a persistent grid of programs takes from."""

"""Algorithms of balancing that know numbers only; several run as C++ kernels, each with its Python reference here."""

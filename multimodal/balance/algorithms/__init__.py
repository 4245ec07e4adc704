"""Balancing algorithms on plain numbers; several run as C++ kernels, each with its Python reference here."""

"""The values that packages exchange: frozen dataclasses without torch, each with a dictionary form and a file form."""

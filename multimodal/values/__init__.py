"""The values that cross borders: frozen dataclasses without torch, each with a dictionary and a file form."""

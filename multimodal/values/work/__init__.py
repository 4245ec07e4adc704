"""The work of a step of some shape: what needs what, and the pieces of work with their needs as numbered arrays."""

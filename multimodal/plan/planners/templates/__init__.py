"""Pipeline templates (Oobleck): model replicas for every number of nodes, and transitions of a run between sets of them."""

"""Pipeline templates (Oobleck): model replicas for every number of nodes, and how a run goes from some of them to others."""

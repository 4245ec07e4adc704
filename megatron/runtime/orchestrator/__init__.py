"""`--plan auto`: measures data and machine at the start of a run, plans, and reviews the plan after some measured steps."""

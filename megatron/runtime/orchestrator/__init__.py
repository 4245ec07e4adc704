"""`--plan auto`: measures data and machine where a run starts, plans, and reviews the plan once it has been measured."""

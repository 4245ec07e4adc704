"""Parts that steps and schedules are made of: how work is cut, and the slots of lanes."""

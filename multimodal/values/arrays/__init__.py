"""Values of a whole step as flat arrays: placements, routes and pieces of work, of which a step has tens of thousands."""

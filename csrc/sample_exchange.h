// Local search on the replicas of samples, for several units at once.

#pragma once

#include "unit_loads.h"

namespace braid {

// Per unit and sample: the load relative to what the heaviest replica has of that unit at least.
using Pressures = std::vector<std::vector<double>>;

// Moves and swaps samples between the heaviest replica and lighter ones, in place, within a budget.
void exchange_samples(const Pressures& pressures, std::int64_t num_replicas, Samples& replicas);

}  // namespace braid

// The order of the microbatches of a pipeline (DistTrain, Alg. 3). Reference: benchmarks/reordering_steps.py

#pragma once

#include <cstdint>
#include <vector>

#include "pipeline_recursion.h"

namespace braid {

// An order that ends no later than 0, 1, 2, ... O((num_microbatches + num_swaps) x steps).
std::vector<std::int64_t> reorder_microbatches(const PipelineShape& shape, std::int64_t num_swaps);

}  // namespace braid

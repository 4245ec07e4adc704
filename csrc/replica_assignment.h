// The replica of each sample (Entrain 4.3). Reference: multimodal/balance/algorithms/greedy_assignment.py

#pragma once

#include "unit_loads.h"

namespace braid {

// The replica of every sample: by Entrain's rule, or by one for all units at once where that is more even.
// encoders: one row per encoder; llm: the LLM's loads; num_replicas: at least 1. O(n log n + n x replicas x units).
Samples assign_replicas(const double* llm, const UnitLoads& encoders, std::int64_t num_samples, std::int64_t num_replicas);

}  // namespace braid

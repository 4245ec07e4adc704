// The replica of each sample (Entrain 4.3).

#pragma once

#include "unit_loads.h"

namespace braid {

// The replica of every sample: by Entrain's rule, or by one for all units at once where that is more even, then exchanged.
// encoders: one row per encoder; llm: the LLM's loads; num_replicas: from 1 to num_samples.
// O(n log n + exchanges), and for each sample the few replicas that could be the best for it; n x replicas x units at worst.
Samples assign_replicas(const double* llm, const UnitLoads& encoders, std::int64_t num_samples, std::int64_t num_replicas);

}  // namespace braid

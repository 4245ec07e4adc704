// The encoder microbatch of each sample (Entrain 4.5.1). Reference: multimodal/balance/algorithms/pairwise_deferral.py

#pragma once

#include "unit_loads.h"

namespace braid {

// Entrain's K_eff, at least `min_num_microbatches` and at most one per member. members: not empty.
std::int64_t effective_num_microbatches(const UnitLoads& encoders, const Samples& members, std::int64_t num_microbatches,
                                        std::int64_t min_num_microbatches);

// The encoder microbatch of every member, in the members' order. num_microbatches: at most the number of members.
// O(n log n + n x num_microbatches x encoders).
Samples stratify(const double* llm, const UnitLoads& encoders, const Samples& members, std::int64_t num_microbatches);

}  // namespace braid

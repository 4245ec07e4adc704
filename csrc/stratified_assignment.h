// The encoder microbatch of each sample (Entrain 4.5.1).
//
// The members with encoder work are divided into a half with high and one with low LLM load. First the former, then the latter
// go, by descending encoder load, each to the microbatch with the least load, so that deferral later finds small LLM loads to move
// everywhere. With several encoders a sample goes where the largest load of an encoder that it needs, relative to that encoder's
// total, is then least. Samples without encoder work come last, by descending LLM load, each to the least LLM load.

#pragma once

#include "unit_loads.h"

namespace braid {

// Entrain's K_eff: the most microbatches that can all have the heaviest sample's encoder load, at least `min_num_microbatches` and at most one per member. members: not empty.
std::int64_t effective_num_microbatches(const UnitLoads& encoders, const Samples& members, std::int64_t num_microbatches,
                                        std::int64_t min_num_microbatches);

// The encoder microbatch of every member, in the members' order. num_microbatches: at most the number of members.
// O(n log n + n x num_microbatches x encoders).
Samples stratify(const double* llm, const UnitLoads& encoders, const Samples& members, std::int64_t num_microbatches);

}  // namespace braid

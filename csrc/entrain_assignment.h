// Entrain's hierarchical microbatch assignment (Alg. 4). Reference: multimodal/balance/algorithms/entrain_assignment.py

#pragma once

#include "unit_loads.h"

namespace braid {

// Where each sample is placed, and how many microbatches each replica has.
struct EntrainPlaces {
    Samples replicas;
    Samples encoder_microbatches;
    Samples llm_microbatches;
    Samples num_microbatches;
};

struct EntrainCounts {
    std::int64_t num_replicas;
    std::int64_t num_microbatches;
    std::int64_t min_num_microbatches;
    std::int64_t max_subset_sums;
};

// llm: one load per sample, of at least num_replicas samples; encoders: one row per encoder. All counts are at least 1.
EntrainPlaces assign_entrain(const double* llm, const UnitLoads& encoders, std::int64_t num_samples, const EntrainCounts& counts);

}  // namespace braid

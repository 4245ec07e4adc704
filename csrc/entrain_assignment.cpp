#include "entrain_assignment.h"

#include <algorithm>

#include "pairwise_deferral.h"
#include "replica_assignment.h"
#include "stratified_assignment.h"

namespace braid {

namespace {

// Place the members of one replica.
void place_members(const double* llm, const UnitLoads& encoders, const Samples& members, const EntrainCounts& counts,
                   EntrainPlaces& places) {
    const std::int64_t num_microbatches =
        effective_num_microbatches(encoders, members, counts.num_microbatches, counts.min_num_microbatches);
    places.num_microbatches.push_back(num_microbatches);
    const Samples placed = stratify(llm, encoders, members, num_microbatches);
    std::vector<Samples> microbatches(num_microbatches);
    for (std::size_t position = 0; position < members.size(); ++position) {
        microbatches[placed[position]].push_back(members[position]);
    }
    const Deferral deferral = defer_pairwise(llm, microbatches, counts.max_subset_sums);
    Samples number(num_microbatches);
    for (std::int64_t index = 0; index < num_microbatches; ++index) number[deferral.order[index]] = index;
    for (std::size_t position = 0; position < members.size(); ++position) {
        places.encoder_microbatches[members[position]] = places.llm_microbatches[members[position]] = number[placed[position]];
    }
    for (const auto& [sample, microbatch] : deferral.deferred) {
        places.llm_microbatches[sample] = number[microbatch];
        const std::int64_t moved = sample;
        const bool is_encoded =
            std::any_of(encoders.begin(), encoders.end(), [moved](const double* loads) { return loads[moved] > 0; });
        if (!is_encoded) places.encoder_microbatches[sample] = number[microbatch];
    }
}

}  // namespace

EntrainPlaces assign_entrain(const double* llm, const UnitLoads& encoders, std::int64_t num_samples, const EntrainCounts& counts) {
    EntrainPlaces places;
    places.replicas = assign_replicas(llm, encoders, num_samples, counts.num_replicas);
    places.encoder_microbatches.resize(num_samples);
    places.llm_microbatches.resize(num_samples);
    std::vector<Samples> members(counts.num_replicas);
    for (std::int64_t sample = 0; sample < num_samples; ++sample) members[places.replicas[sample]].push_back(sample);
    for (const Samples& of_replica : members) place_members(llm, encoders, of_replica, counts, places);
    return places;
}

}  // namespace braid

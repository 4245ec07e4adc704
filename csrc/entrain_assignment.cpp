#include "entrain_assignment.h"

#include <algorithm>

#include "pairwise_deferral.h"
#include "replica_assignment.h"
#include "stratified_assignment.h"

namespace braid {

namespace {

// The microbatches of all pairs in the order of execution, which Entrain leaves open: the lightest pair comes first, so that all
// stages start soon, and the second lightest last, since nothing fills the waits for the last backwards (DistTrain 5.2).
Samples order_pairs(const std::vector<Samples>& pairs, const std::vector<double>& work) {
    std::vector<double> negative_totals;
    for (const Samples& pair : pairs) negative_totals.push_back(-sum_in_order(work.data(), pair));
    const Samples rising = sorted_descending(negative_totals);
    const std::int64_t num_pairs = pairs.size();
    Samples order;
    const auto append = [&](std::int64_t rank) {
        order.insert(order.end(), pairs[rising[rank]].begin(), pairs[rising[rank]].end());
    };
    for (std::int64_t rank = 0; rank < num_pairs; rank += 2) append(rank);
    for (std::int64_t rank = num_pairs / 2 * 2 - 1; rank > 0; rank -= 2) append(rank);
    return order;
}

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
    const std::vector<double> encoder_shares = dominant_shares(encoders, members), llm_shares = dominant_shares({llm}, members);
    std::vector<double> work(num_microbatches, 0.0);
    for (std::size_t position = 0; position < members.size(); ++position) {
        work[placed[position]] += encoder_shares[position] + llm_shares[position];
    }
    const Samples order = order_pairs(deferral.pairs, work);
    Samples number(num_microbatches);
    for (std::int64_t index = 0; index < num_microbatches; ++index) number[order[index]] = index;
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

#include "replica_assignment.h"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace braid {

namespace {

Samples assign_by_llm_load(const double* llm, const UnitLoads& encoders, const Samples& everyone, std::int64_t num_replicas) {
    const std::vector<double> shares = dominant_shares(encoders, everyone);
    std::vector<std::tuple<double, double, std::int64_t>> loads(num_replicas);  // LLM load, encoder share, count
    Samples replicas(everyone.size());
    for (std::int64_t sample : sorted_descending(shares)) {
        const auto best = std::min_element(loads.begin(), loads.end());
        std::get<0>(*best) += llm[sample];
        std::get<1>(*best) += shares[sample];
        ++std::get<2>(*best);
        replicas[sample] = best - loads.begin();
    }
    return replicas;
}

Samples assign_jointly(const UnitLoads& units, const Samples& everyone, std::int64_t num_replicas) {
    const std::vector<double> shares = dominant_shares(units, everyone);
    std::vector<double> totals;
    for (const double* loads : units) totals.push_back(sum_in_order(loads, everyone));
    ShareBins bins(units, totals, num_replicas);
    std::vector<double> share(num_replicas, 0.0);
    Samples replicas(everyone.size());
    for (std::int64_t sample : sorted_descending(shares)) {
        const auto rank = [&](std::int64_t replica) {
            const std::int64_t count = bins.count(replica);
            return std::make_tuple(count > 0, bins.largest_share(sample, replica), share[replica], count);
        };
        std::int64_t best = 0;
        auto best_rank = rank(0);
        for (std::int64_t replica = 1; replica < num_replicas; ++replica) {
            const auto other = rank(replica);
            if (other < best_rank) best = replica, best_rank = other;
        }
        bins.add(sample, best);
        share[best] += shares[sample];
        replicas[sample] = best;
    }
    return replicas;
}

double heaviest_share(const UnitLoads& units, const Samples& replicas, std::int64_t num_replicas) {
    double heaviest = 0.0;
    for (const double* loads : units) {
        double total = 0.0;
        std::vector<double> of_replica(num_replicas, 0.0);
        for (std::size_t sample = 0; sample < replicas.size(); ++sample) {
            total += loads[sample];
            of_replica[replicas[sample]] += loads[sample];
        }
        if (total > 0) heaviest = std::max(heaviest, *std::max_element(of_replica.begin(), of_replica.end()) / total);
    }
    return heaviest;
}

}  // namespace

Samples assign_replicas(const double* llm, const UnitLoads& encoders, std::int64_t num_samples, std::int64_t num_replicas) {
    Samples everyone(num_samples);
    std::iota(everyone.begin(), everyone.end(), 0);
    UnitLoads units{llm};
    units.insert(units.end(), encoders.begin(), encoders.end());
    Samples published = assign_by_llm_load(llm, encoders, everyone, num_replicas);
    Samples joint = assign_jointly(units, everyone, num_replicas);
    const bool is_better = heaviest_share(units, joint, num_replicas) < heaviest_share(units, published, num_replicas);
    return is_better ? joint : published;
}

}  // namespace braid

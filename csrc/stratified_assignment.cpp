#include "stratified_assignment.h"

#include <algorithm>
#include <tuple>

namespace braid {

std::int64_t effective_num_microbatches(const UnitLoads& encoders, const Samples& members, std::int64_t num_microbatches,
                                        std::int64_t min_num_microbatches) {
    std::int64_t allowed = 0;
    for (const double* loads : encoders) {
        double largest = 0.0;
        for (std::int64_t sample : members) largest = std::max(largest, loads[sample]);
        if (!(largest > 0)) continue;
        // Compared before it is converted: the quotient of a tiny load may not fit an integer.
        const double quotient = sum_in_order(loads, members) / largest;
        const bool is_enough = quotient >= static_cast<double>(num_microbatches);
        allowed = std::max(allowed, is_enough ? num_microbatches : static_cast<std::int64_t>(quotient));
    }
    const std::int64_t wanted = std::max(allowed > 0 ? allowed : num_microbatches, min_num_microbatches);
    return std::min({wanted, num_microbatches, static_cast<std::int64_t>(members.size())});
}

namespace {

// Positions of the coarse-grained, the fine-grained, and the samples without encoder work, each in order of placement.
std::vector<Samples> strata(const double* llm, const Samples& members, const std::vector<double>& shares,
                            std::int64_t num_microbatches) {
    std::vector<double> llm_loads;
    for (std::int64_t sample : members) llm_loads.push_back(llm[sample]);
    Samples encoded, others;
    for (std::int64_t position : sorted_descending(llm_loads)) (shares[position] > 0 ? encoded : others).push_back(position);
    const std::int64_t num_encoded = encoded.size();
    const std::int64_t num_coarse = std::min(num_encoded / 2, std::max<std::int64_t>(0, num_encoded - num_microbatches));
    const auto by_share = [&](std::int64_t a, std::int64_t b) {
        return std::make_tuple(-shares[a], a) < std::make_tuple(-shares[b], b);
    };
    std::sort(encoded.begin(), encoded.begin() + num_coarse, by_share);
    std::sort(encoded.begin() + num_coarse, encoded.end(), by_share);
    return {encoded, others};
}

}  // namespace

Samples stratify(const double* llm, const UnitLoads& encoders, const Samples& members, std::int64_t num_microbatches) {
    const std::vector<double> shares = dominant_shares(encoders, members);
    std::vector<double> totals;
    for (const double* loads : encoders) totals.push_back(sum_in_order(loads, members));
    ShareBins bins(encoders, totals, num_microbatches);
    std::vector<double> llm_load(num_microbatches, 0.0);
    Samples microbatches(members.size());
    for (const Samples& stratum : strata(llm, members, shares, num_microbatches)) {
        for (std::int64_t position : stratum) {
            const std::int64_t sample = members[position];
            const auto rank = [&](std::int64_t bin) {
                return std::make_tuple(bins.count(bin) > 0, bins.largest_share(sample, bin), llm_load[bin]);
            };
            std::int64_t best = 0;
            auto best_rank = rank(0);
            for (std::int64_t bin = 1; bin < num_microbatches; ++bin) {
                const auto other = rank(bin);
                if (other < best_rank) best = bin, best_rank = other;
            }
            bins.add(sample, best);
            llm_load[best] += llm[sample];
            microbatches[position] = best;
        }
    }
    return microbatches;
}

}  // namespace braid

#include "pairwise_deferral.h"

#include <algorithm>

#include "bottleneck_matching.h"
#include "subset_sums.h"

namespace braid {

namespace {

// Not inlined: fused with an addition, a product is rounded otherwise than in Python.
#if defined(__GNUC__)
__attribute__((noinline))
#endif
double square(double value) {
    return value * value;
}

// Relative to the mean, so that no load overflows; 0 where all loads are.
double squared_deviation(double load, double mean) { return mean > 0 ? square(load / mean - 1.0) : 0.0; }

// The samples of a microbatch that have an LLM load, heaviest first.
Samples candidates_of(const double* llm, const Samples& members) {
    Samples found;
    std::copy_if(members.begin(), members.end(), std::back_inserter(found), [&](std::int64_t sample) { return llm[sample] > 0; });
    std::sort(found.begin(), found.end(), [&](std::int64_t a, std::int64_t b) { return llm[a] > llm[b] || (llm[a] == llm[b] && a < b); });
    return found;
}

}  // namespace

Deferral defer_pairwise(const double* llm, const std::vector<Samples>& microbatches, std::int64_t max_subset_sums) {
    const std::int64_t num_microbatches = microbatches.size();
    std::vector<double> load;
    double total = 0.0;
    for (const Samples& members : microbatches) {
        load.push_back(sum_in_order(llm, members));
        total += load.back();
    }
    const double mean = total / static_cast<double>(num_microbatches);
    const Samples by_load = sorted_descending(load);
    const Samples overloaded(by_load.begin(), by_load.begin() + num_microbatches / 2);
    const Samples underloaded(by_load.begin() + num_microbatches / 2, by_load.end());

    std::vector<Samples> candidates;
    std::vector<SubsetSums> sums;
    std::vector<std::vector<std::int64_t>> chosen(overloaded.size());
    Matrix bottlenecks(overloaded.size()), costs(overloaded.size());
    for (std::size_t row = 0; row < overloaded.size(); ++row) {
        const double from = load[overloaded[row]];
        candidates.push_back(candidates_of(llm, microbatches[overloaded[row]]));
        std::vector<double> loads;
        for (std::int64_t sample : candidates[row]) loads.push_back(llm[sample]);
        // A sum beyond w_i - w_j is no better than none, for no partner.
        sums.emplace_back(loads, from - load[by_load.back()], max_subset_sums);
        for (std::int64_t partner : underloaded) {
            const std::int64_t subset = sums[row].closest((from - load[partner]) / 2);
            const double left = from - sums[row].sum_of(subset), taken = load[partner] + sums[row].sum_of(subset);
            chosen[row].push_back(subset);
            bottlenecks[row].push_back(std::max(left, taken));
            costs[row].push_back(squared_deviation(left, mean) + squared_deviation(taken, mean));
        }
    }

    Deferral result;
    std::vector<char> is_paired(underloaded.size(), 0);
    const std::vector<std::int64_t> partners = match_bottleneck(bottlenecks, costs);
    for (std::size_t row = 0; row < partners.size(); ++row) {
        const std::int64_t column = partners[row];
        is_paired[column] = 1;
        result.pairs.push_back({overloaded[row], underloaded[column]});
        for (std::int64_t item : sums[row].items_of(chosen[row][column])) {
            result.deferred.emplace_back(candidates[row][item], underloaded[column]);
        }
    }
    for (std::size_t column = 0; column < underloaded.size(); ++column) {
        if (!is_paired[column]) result.pairs.push_back({underloaded[column]});
    }
    return result;
}

}  // namespace braid

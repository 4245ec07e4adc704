#include "longest_first_partition.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>

namespace braid {

template <typename Cost>
std::vector<std::vector<std::int64_t>> partition_longest_first(const std::vector<Cost>& costs, std::int64_t num_bins,
                                                               std::int64_t max_items_per_bin) {
    std::vector<std::int64_t> order(costs.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) { return costs[a] > costs[b]; });

    // Ascending (load, bin) is already a min-heap.
    using LoadedBin = std::pair<Cost, std::int64_t>;
    std::vector<LoadedBin> empty_bins;
    empty_bins.reserve(num_bins);
    for (std::int64_t bin = 0; bin < num_bins; ++bin) empty_bins.emplace_back(Cost{0}, bin);
    std::priority_queue<LoadedBin, std::vector<LoadedBin>, std::greater<LoadedBin>> open_bins(std::greater<LoadedBin>{},
                                                                                              std::move(empty_bins));

    std::vector<std::vector<std::int64_t>> bins(num_bins);
    for (std::int64_t item : order) {
        const auto [load, bin] = open_bins.top();
        open_bins.pop();
        bins[bin].push_back(item);
        if (static_cast<std::int64_t>(bins[bin].size()) < max_items_per_bin) open_bins.emplace(load + costs[item], bin);
    }
    return bins;
}

template std::vector<std::vector<std::int64_t>> partition_longest_first(const std::vector<std::int64_t>&, std::int64_t, std::int64_t);
template std::vector<std::vector<std::int64_t>> partition_longest_first(const std::vector<double>&, std::int64_t, std::int64_t);

}  // namespace braid

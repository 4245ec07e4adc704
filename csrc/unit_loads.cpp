#include "unit_loads.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace braid {

double sum_in_order(const double* loads, const Samples& members) {
    double total = 0.0;
    for (std::int64_t sample : members) total += loads[sample];
    return total;
}

std::vector<double> dominant_shares(const UnitLoads& units, const Samples& members) {
    std::vector<double> shares(members.size(), 0.0);
    for (const double* loads : units) {
        const double total = sum_in_order(loads, members);
        if (!(total > 0)) continue;
        for (std::size_t position = 0; position < members.size(); ++position) {
            shares[position] = std::max(shares[position], loads[members[position]] / total);
        }
    }
    return shares;
}

Samples sorted_descending(const std::vector<double>& keys) {
    Samples order(keys.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) { return keys[a] > keys[b]; });
    return order;
}

ShareBins::ShareBins(const UnitLoads& units, std::vector<double> totals, std::int64_t num_bins)
    : units_(units), totals_(std::move(totals)), loads_(units.size(), std::vector<double>(num_bins, 0.0)), counts_(num_bins, 0) {}

double ShareBins::largest_share(std::int64_t sample, std::int64_t bin) const {
    double largest = 0.0;
    for (std::size_t unit = 0; unit < units_.size(); ++unit) {
        const double load = units_[unit][sample];
        if (load > 0) largest = std::max(largest, (loads_[unit][bin] + load) / totals_[unit]);
    }
    return largest;
}

void ShareBins::add(std::int64_t sample, std::int64_t bin) {
    for (std::size_t unit = 0; unit < units_.size(); ++unit) loads_[unit][bin] += units_[unit][sample];
    ++counts_[bin];
}

}  // namespace braid

// The loads of samples in each unit, as the assignment kernels read it. Reference: multimodal/balance/algorithms/pairwise_deferral.py

#pragma once

#include <cstdint>
#include <vector>

namespace braid {

// Per unit its loads, one per sample; finite and not negative, and so is their sum.
using UnitLoads = std::vector<const double*>;
using Samples = std::vector<std::int64_t>;

// The sum over the members, added from first to last.
double sum_in_order(const double* loads, const Samples& members);

// For each member, the largest share that it has in any unit's total over the members; 0 where it has no load.
std::vector<double> dominant_shares(const UnitLoads& units, const Samples& members);

// Positions 0, 1, ... sorted by descending key; equal keys stay in order.
Samples sorted_descending(const std::vector<double>& keys);

// Bins that samples are put into one by one, with their loads per unit.
class ShareBins {
public:
    ShareBins(const UnitLoads& units, std::vector<double> totals, std::int64_t num_bins);

    // The largest share of a unit's total that the sample leads to in the bin, over the units that the sample needs.
    double largest_share(std::int64_t sample, std::int64_t bin) const;
    void add(std::int64_t sample, std::int64_t bin);
    std::int64_t count(std::int64_t bin) const { return counts_[bin]; }

private:
    const UnitLoads& units_;
    std::vector<double> totals_;
    std::vector<std::vector<double>> loads_;
    std::vector<std::int64_t> counts_;
};

}  // namespace braid

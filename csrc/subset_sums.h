// The sums of subsets of some loads: a sorted list of true sums, instead of Entrain's table over rounded ones (4.5.2).

#pragma once

#include <cstdint>
#include <vector>

namespace braid {

// The reachable sums up to a limit; once there are more than `max_sums`, one per cell of limit / max_sums.
class SubsetSums {
public:
    // loads: positive and finite. O(loads x max_sums).
    SubsetSums(const std::vector<double>& loads, double limit, std::int64_t max_sums);

    // The subset whose sum is closest to the target, the smaller sum of two that are equally close.
    std::int64_t closest(double target) const;
    double sum_of(std::int64_t subset) const { return nodes_[subset].sum; }
    // The indices of a subset's loads, the last first.
    std::vector<std::int64_t> items_of(std::int64_t subset) const;

private:
    struct Node {
        double sum;
        std::int64_t before;
        std::int64_t item;
    };
    struct Reached {
        double sum;
        std::int64_t node;
        bool is_new;
    };

    void add(std::int64_t item, double load, double limit, std::int64_t max_sums);

    std::vector<Node> nodes_{{0.0, -1, -1}};
    std::vector<std::int64_t> sorted_{0};
    std::vector<Reached> merged_;
};

}  // namespace braid

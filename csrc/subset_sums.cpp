#include "subset_sums.h"

#include <algorithm>

namespace braid {

SubsetSums::SubsetSums(const std::vector<double>& loads, double limit, std::int64_t max_sums) {
    for (std::size_t item = 0; item < loads.size(); ++item) add(item, loads[item], limit, max_sums);
}

void SubsetSums::add(std::int64_t item, double load, double limit, std::int64_t max_sums) {
    merged_.clear();
    const auto keep = [&](const Reached& reached) {
        if (merged_.empty() || merged_.back().sum != reached.sum) merged_.push_back(reached);
    };
    auto with = sorted_.begin();
    const auto keep_new_below = [&](double bound) {
        for (; with != sorted_.end() && nodes_[*with].sum + load < bound && nodes_[*with].sum + load <= limit; ++with) {
            keep({nodes_[*with].sum + load, *with, true});
        }
    };
    for (std::int64_t node : sorted_) {
        keep_new_below(nodes_[node].sum);
        keep({nodes_[node].sum, node, false});
    }
    for (; with != sorted_.end() && nodes_[*with].sum + load <= limit; ++with) keep({nodes_[*with].sum + load, *with, true});

    const double width = limit / static_cast<double>(max_sums);
    const bool is_trimmed = static_cast<std::int64_t>(merged_.size()) > max_sums;
    std::int64_t last_cell = -1;
    sorted_.clear();
    for (const Reached& reached : merged_) {
        if (is_trimmed) {
            const auto cell = static_cast<std::int64_t>(reached.sum / width);
            if (cell == last_cell) continue;
            last_cell = cell;
        }
        if (!reached.is_new) {
            sorted_.push_back(reached.node);
            continue;
        }
        sorted_.push_back(static_cast<std::int64_t>(nodes_.size()));
        nodes_.push_back({reached.sum, reached.node, item});
    }
}

std::int64_t SubsetSums::closest(double target) const {
    const auto after = std::lower_bound(sorted_.begin(), sorted_.end(), target,
                                        [&](std::int64_t node, double value) { return nodes_[node].sum < value; });
    if (after == sorted_.end()) return sorted_.back();
    if (after != sorted_.begin() && target - nodes_[*(after - 1)].sum <= nodes_[*after].sum - target) return *(after - 1);
    return *after;
}

std::vector<std::int64_t> SubsetSums::items_of(std::int64_t subset) const {
    std::vector<std::int64_t> items;
    for (; subset > 0; subset = nodes_[subset].before) items.push_back(nodes_[subset].item);
    return items;
}

}  // namespace braid

#include "padded_partition.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>

namespace braid {

namespace {

constexpr int kCloseBits = 16;  // where the cut is no optimum anyway, its bound is searched to one part in 2^16
constexpr std::int64_t kNumBounds = 4;  // bounds tried between the lower bound and that of the best contiguous partition

struct Bin {
    std::int64_t cost = 0, count = 0, padded = 0;  // of the longest item
};

class PaddedPartition {
   public:
    PaddedPartition(const RankedItems& items, std::int64_t num_bins, std::int64_t max_items_per_bin)
        : items_(items), num_bins_(num_bins), limit_(std::min(max_items_per_bin, items.size())), prefix_(items.size() + 1) {
        for (std::int64_t rank = 0; rank < items.size(); ++rank) prefix_[rank + 1] = prefix_[rank] + items.additive[rank];
    }

    std::vector<std::int32_t> run() {
        const std::int64_t contiguous = least_contiguous_bound();
        std::vector<std::int32_t> best, candidate;
        std::int64_t best_cost = INT64_MAX;
        try_bound(contiguous, candidate, best, best_cost);
        if (prefix_.back() > 0) {
            const std::int64_t least = lower_bound(items_, num_bins_);
            for (std::int64_t step = kNumBounds - 1; step >= 0 && best_cost > least + least / kGoodEnough; --step) {
                const std::int64_t bound = step == 0 ? 0 : least + (contiguous - least) / kNumBounds * step;
                try_bound(bound, candidate, best, best_cost);
            }
        }
        split_until_none_is_empty(best);
        return best;
    }

   private:
    std::int64_t cost(std::int64_t begin, std::int64_t end) const {
        return prefix_[end] - prefix_[begin] + (end - begin) * items_.padded[begin];
    }

    // The end of the longest segment from `begin` that costs at most `bound` and fits a bin; `begin` if there is none.
    std::int64_t segment_end(std::int64_t begin, std::int64_t bound, std::int64_t guess) const {
        const std::int64_t last = std::min(items_.size(), begin + limit_);
        if (prefix_.back() == 0) {
            const std::int64_t padded = items_.padded[begin];
            return padded == 0 ? last : std::min(last, begin + bound / padded);
        }
        std::int64_t low = begin, high = last + 1;  // `low` fits, `high` does not; first closed in on from the guess
        for (std::int64_t probe = std::min(last, begin + guess), step = 1; probe > low && probe < high; step *= 2) {
            if (cost(begin, probe) <= bound) {
                low = probe;
                probe = std::min(last, probe + step);
            } else {
                high = probe;
                probe = std::max(begin, probe - step);
            }
        }
        while (high - low > 1) {
            const std::int64_t middle = low + (high - low) / 2;
            (cost(begin, middle) <= bound ? low : high) = middle;
        }
        return low;
    }

    bool fits(std::int64_t bound) const {
        std::int64_t begin = 0, size = 1;
        for (std::int64_t bin = 0; bin < num_bins_ && begin < items_.size(); ++bin) {
            const std::int64_t end = segment_end(begin, bound, size);
            if (end == begin) return false;
            size = end - begin;
            begin = end;
        }
        return begin == items_.size();
    }

    std::int64_t least_contiguous_bound() const {
        const std::int64_t even = (items_.size() + num_bins_ - 1) / num_bins_;
        std::int64_t low = cost(0, 1), high = low;
        for (std::int64_t begin = 0; begin < items_.size(); begin += even) {
            high = std::max(high, cost(begin, std::min(items_.size(), begin + even)));
        }
        const std::int64_t close = prefix_.back() > 0 ? high >> kCloseBits : 0;
        while (high - low > close) {
            const std::int64_t middle = low + (high - low) / 2;
            if (fits(middle)) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        return high;
    }

    // Fills bins with segments up to the bound (at least one item each), the rest goes where the result is cheapest.
    void try_bound(std::int64_t bound, std::vector<std::int32_t>& candidate, std::vector<std::int32_t>& best,
                   std::int64_t& best_cost) const {
        candidate.assign(items_.size(), 0);
        std::vector<Bin> bins(num_bins_);
        std::int64_t begin = 0, size = 1, costliest = 0;
        for (std::int64_t bin = 0; bin < num_bins_ && begin < items_.size(); ++bin) {
            const std::int64_t end = std::max(begin + 1, segment_end(begin, bound, size));
            size = end - begin;
            bins[bin] = {cost(begin, end), size, items_.padded[begin]};
            costliest = std::max(costliest, bins[bin].cost);
            std::fill(candidate.begin() + begin, candidate.begin() + end, static_cast<std::int32_t>(bin));
            begin = end;
        }
        if (!place_rest(begin, bins, candidate, costliest, best_cost)) return;
        best_cost = costliest;
        best.swap(candidate);
    }

    // Returns true if every bin stays cheaper than `limit`; stops at the first that does not.
    bool place_rest(std::int64_t rank, std::vector<Bin>& bins, std::vector<std::int32_t>& candidate, std::int64_t& costliest,
                    std::int64_t limit) const {
        using Entry = std::pair<std::int64_t, std::int64_t>;  // cost of the bin plus what padding adds per item; the bin
        std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> open;
        for (std::int64_t bin = 0; rank < items_.size() && bin < num_bins_; ++bin) {
            if (bins[bin].count < limit_) open.emplace(bins[bin].cost + bins[bin].padded, bin);
        }
        for (; rank < items_.size() && costliest < limit; ++rank) {
            const std::int64_t index = open.top().second;
            open.pop();
            Bin& bin = bins[index];
            bin.cost += bin.padded + items_.additive[rank];
            candidate[rank] = static_cast<std::int32_t>(index);
            costliest = std::max(costliest, bin.cost);
            if (++bin.count < limit_) open.emplace(bin.cost + bin.padded, index);
        }
        return costliest < limit;
    }

    // Halves the costliest bin of two or more items until no bin is empty: less padding, and the maximum does not rise.
    void split_until_none_is_empty(std::vector<std::int32_t>& bin_of_rank) const {
        std::vector<char> used(num_bins_);
        for (std::int32_t bin : bin_of_rank) used[bin] = 1;
        std::int64_t empty = std::find(used.begin(), used.end(), 0) - used.begin();
        if (empty == num_bins_) return;
        std::vector<std::vector<std::int64_t>> members(num_bins_);
        for (std::int64_t rank = 0; rank < items_.size(); ++rank) members[bin_of_rank[rank]].push_back(rank);
        std::priority_queue<std::pair<std::int64_t, std::int64_t>> divisible;  // cost; bin
        const auto offer = [&](std::int64_t bin) {
            if (members[bin].size() < 2) return;
            std::int64_t cost = static_cast<std::int64_t>(members[bin].size()) * items_.padded[members[bin][0]];
            for (std::int64_t rank : members[bin]) cost += items_.additive[rank];
            divisible.emplace(cost, bin);
        };
        for (std::int64_t bin = 0; bin < num_bins_; ++bin) offer(bin);
        for (; empty < num_bins_ && !divisible.empty(); ++empty) {
            if (!members[empty].empty()) continue;
            const std::int64_t bin = divisible.top().second;
            divisible.pop();
            const std::size_t half = members[bin].size() / 2;
            members[empty].assign(members[bin].begin() + half, members[bin].end());
            members[bin].resize(half);
            for (std::int64_t rank : members[empty]) bin_of_rank[rank] = static_cast<std::int32_t>(empty);
            offer(bin);
            offer(empty);
        }
    }

    const RankedItems& items_;
    const std::int64_t num_bins_, limit_;
    std::vector<std::int64_t> prefix_;
};

}  // namespace

std::vector<std::int32_t> partition_padded(const RankedItems& items, std::int64_t num_bins, std::int64_t max_items_per_bin) {
    return PaddedPartition(items, num_bins, max_items_per_bin).run();
}

}  // namespace braid

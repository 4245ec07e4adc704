#include "bounded_search.h"

#include <algorithm>
#include <utility>

namespace braid {

namespace {

using Ranks = std::vector<std::int64_t>;
using Choice = std::pair<std::int64_t, std::int32_t>;  // what a bin costs with the next item; the bin

struct Bin {
    std::int64_t cost = 0, count = 0, padding = 0;  // padding: of its longest item, what each further one costs at least
};

// Branch and bound: items go, costliest first, into the bin that is cheapest with them, then into the next cheapest.
class Division {
   public:
    Division(const RankedItems& items, std::int64_t max_items_per_bin, std::int64_t bound)
        : items_(items), limit_(max_items_per_bin), is_limited_(limit_ < items.size()), bound_(bound) {}

    // Divides `ranks`, ascending, over num_bins bins such that all cost less than `target`; returns whether that was found.
    // `num_steps` falls by the bins looked at, and below `last_step` nothing more is.
    bool run(const Ranks& ranks, std::int64_t num_bins, std::int64_t target, std::int64_t& num_steps, std::int64_t last_step) {
        ranks_ = &ranks;
        target_ = target;
        bins_.assign(num_bins, Bin{});
        order_.resize(ranks.size() * num_bins);
        placed_.resize(ranks.size());
        remaining_.assign(ranks.size() + 1, 0);
        for (std::size_t at = ranks.size(); at-- > 0;) remaining_[at] = remaining_[at + 1] + items_.cost(ranks[at]);
        best_.clear();
        place(0, 0, num_steps, last_step);
        return !best_.empty();
    }

    // The bin of each rank, in their order.
    const std::vector<std::int32_t>& best() const { return best_; }

   private:
    void place(std::size_t at, std::int64_t costliest, std::int64_t& num_steps, std::int64_t last_step) {
        if (at == ranks_->size()) {
            target_ = costliest;
            best_ = placed_;
            return;
        }
        const auto num_bins = static_cast<std::int64_t>(bins_.size());
        num_steps -= num_bins;
        if (!has_room(at)) return;
        const std::int64_t rank = (*ranks_)[at];
        Choice* const order = order_.data() + at * num_bins;
        std::int64_t num_open = 0;
        for (std::int64_t bin = 0; bin < num_bins; ++bin) {
            const std::int64_t after = cost_with(bins_[bin], rank);
            if (after >= target_ || bins_[bin].count >= limit_) continue;
            std::int64_t place = num_open;
            while (place > 0 && order[place - 1].first > after) --place;
            if (is_known(order, place, {after, static_cast<std::int32_t>(bin)})) continue;
            std::copy_backward(order + place, order + num_open, order + num_open + 1);
            order[place] = {after, static_cast<std::int32_t>(bin)};
            ++num_open;
        }
        for (std::int64_t each = 0; each < num_open; ++each) {
            const auto [after, bin] = order[each];
            if (std::max(after, costliest) >= target_ || target_ <= bound_ || num_steps <= last_step) return;
            const Bin before = bins_[bin];
            bins_[bin] = {after, before.count + 1, before.count > 0 ? before.padding : items_.padding(rank)};
            placed_[at] = bin;
            place(at + 1, std::max(costliest, after), num_steps, last_step);
            bins_[bin] = before;
        }
    }

    std::int64_t cost_with(const Bin& bin, std::int64_t rank) const {
        return bin.cost + items_.additive[rank] + (bin.count > 0 ? bin.padding : items_.padding(rank));
    }

    // Whether an earlier bin is in the same state, so that what follows would be the same; `place` is where the bin would go.
    bool is_known(const Choice* order, std::int64_t place, const Choice& choice) const {
        const Bin& bin = bins_[choice.second];
        for (; place > 0 && order[place - 1].first == choice.first; --place) {
            const Bin& earlier = bins_[order[place - 1].second];
            if (earlier.padding == bin.padding && (earlier.count == bin.count || !is_limited_)) return true;
        }
        return false;
    }

    // Whether what the bins may still cost is enough for the items left; a bin with less room than the cheapest item has none.
    bool has_room(std::size_t at) const {
        const std::int64_t cheapest = items_.cost(ranks_->back());
        std::int64_t room = 0;
        for (const Bin& bin : bins_)
            if (const std::int64_t left = target_ - 1 - bin.cost; left >= cheapest) room += left;
        return room >= remaining_[at];
    }

    const RankedItems& items_;
    const std::int64_t limit_;
    const bool is_limited_;
    const std::int64_t bound_;
    const Ranks* ranks_ = nullptr;
    std::int64_t target_ = 0;
    std::vector<Bin> bins_;
    std::vector<Choice> order_;            // per item, the bins that it may go to, cheapest first
    std::vector<std::int64_t> remaining_;  // the least that the items from here on cost
    std::vector<std::int32_t> placed_, best_;
};

class Search {
   public:
    Search(const RankedItems& items, const BinLimits& limits, std::vector<std::int32_t>& bin_of_rank)
        : items_(items),
          limits_(limits),
          division_(items, limits.max_items_per_bin, limits.bound),
          bin_of_rank_(bin_of_rank),
          members_(limits.num_bins),
          costs_(limits.num_bins, 0) {
        for (std::int64_t rank = 0; rank < items.size(); ++rank) members_[bin_of_rank[rank]].push_back(rank);
        for (std::int64_t bin = 0; bin < limits.num_bins; ++bin) price(bin);
    }

    void run(std::int64_t num_steps) {
        while (num_steps > 0 && costliest() > limits_.bound + limits_.bound / kGoodEnough) {
            if (!relieve_costliest(num_steps)) return;
        }
    }

   private:
    std::int64_t costliest() const { return *std::max_element(costs_.begin(), costs_.end()); }

    // Tries the costliest bin with each other, then with each two others, cheapest first, then all together.
    bool relieve_costliest(std::int64_t& num_steps) {
        std::vector<std::int64_t> others(costs_.size());
        for (std::size_t bin = 0; bin < costs_.size(); ++bin) others[bin] = static_cast<std::int64_t>(bin);
        std::stable_sort(others.begin(), others.end(), [&](std::int64_t a, std::int64_t b) { return costs_[a] < costs_[b]; });
        const std::int64_t worst = others.back();
        const std::size_t num_others = others.size() - 1;
        for (std::size_t one = 0; one < num_others; ++one)
            if (divide({others[one], worst}, num_steps, num_steps - kStepsPerGroup)) return true;
        for (std::size_t two = 1; two < num_others; ++two)
            for (std::size_t one = 0; one < two; ++one)
                if (divide({others[one], others[two], worst}, num_steps, num_steps - kStepsPerGroup)) return true;
        return divide(others, num_steps, 0);
    }

    bool divide(const std::vector<std::int64_t>& bins, std::int64_t& num_steps, std::int64_t last_step) {
        if (num_steps <= 0) return false;
        Ranks ranks;
        for (const std::int64_t bin : bins) ranks.insert(ranks.end(), members_[bin].begin(), members_[bin].end());
        std::sort(ranks.begin(), ranks.end());
        const auto count = static_cast<std::int64_t>(bins.size());
        if (!division_.run(ranks, count, costs_[bins.back()], num_steps, std::max<std::int64_t>(last_step, 0))) return false;
        for (const std::int64_t bin : bins) members_[bin].clear();
        for (std::size_t at = 0; at < ranks.size(); ++at) {
            const std::int64_t bin = bins[division_.best()[at]];
            members_[bin].push_back(ranks[at]);
            bin_of_rank_[ranks[at]] = static_cast<std::int32_t>(bin);
        }
        for (const std::int64_t bin : bins) price(bin);
        return true;
    }

    void price(std::int64_t bin) {
        costs_[bin] = 0;
        for (const std::int64_t rank : members_[bin]) costs_[bin] += items_.additive[rank] + items_.padding(members_[bin][0]);
    }

    static constexpr std::int64_t kStepsPerGroup = 1024;

    const RankedItems& items_;
    const BinLimits limits_;
    Division division_;
    std::vector<std::int32_t>& bin_of_rank_;
    std::vector<Ranks> members_;  // ascending
    std::vector<std::int64_t> costs_;
};

}  // namespace

void search_partition(const RankedItems& items, const BinLimits& limits, std::int64_t num_steps,
                      std::vector<std::int32_t>& bin_of_rank) {
    if (num_steps > 0) Search(items, limits, bin_of_rank).run(num_steps);
}

}  // namespace braid

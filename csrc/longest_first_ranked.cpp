#include "longest_first_ranked.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "radix_sort.h"

namespace braid {

namespace {

__extension__ typedef unsigned __int128 Wide;

// A key is a bin's load shifted left by `bin_bits`, plus the bin: it orders bins by load, equal loads by index.
template <typename Key>
class Placement {
   public:
    Placement(const RankedItems& items, std::int64_t num_bins, std::int64_t max_items_per_bin,
              std::vector<std::int32_t>& bin_of_rank)
        : items_(items),
          bin_bits_(bit_width(static_cast<std::uint64_t>(num_bins - 1))),
          limited_(max_items_per_bin < items.size()),
          room_(num_bins, max_items_per_bin),
          ready_(num_bins),
          key_of_bin_(num_bins, kNone),
          bin_of_rank_(bin_of_rank) {
        bin_of_rank_.resize(items.size());
        std::iota(ready_.begin(), ready_.end(), Key{0});
    }

    void run() {
        while (next_ < items_.size()) {
            const std::size_t num_ready = ready_.size();
            if (place_run() * 8 < num_ready) place_one_by_one(num_ready);
        }
    }

   private:
    static constexpr Key kNone = ~Key{0};

    std::size_t bin(Key key) const { return static_cast<std::size_t>(key & ((Key{1} << bin_bits_) - 1)); }

    // Puts the next item into the bin of `key`; returns the bin's new key, or kNone when it is full.
    Key place(Key key) {
        bin_of_rank_[next_] = static_cast<std::int32_t>(bin(key));
        key += static_cast<Key>(items_.additive[next_++]) << bin_bits_;
        return --room_[bin(key)] > 0 ? key : kNone;
    }

    // Places one item per bin, in ascending order of load, for as long as no bin that got one is the least loaded again:
    // as one by one would, with one linear sort in place of many steps of a heap. Returns how many.
    std::size_t place_run() {
        const std::size_t limit = std::min(ready_.size(), static_cast<std::size_t>(items_.size() - next_));
        const std::int64_t* costs = items_.additive.data() + next_;
        std::int32_t* bins = bin_of_rank_.data() + next_;
        std::size_t taken = 0;
        Key least = kNone, most = 0;
        for (; taken < limit && ready_[taken] < least; ++taken) {
            const Key key = ready_[taken] + (static_cast<Key>(costs[taken]) << bin_bits_);
            const std::size_t bin = this->bin(key);
            bins[taken] = static_cast<std::int32_t>(bin);
            if (limited_ && --room_[bin] <= 0) continue;
            key_of_bin_[bin] = key;
            least = std::min(least, key);
            most = std::max(most, key);
        }
        next_ += taken;
        sort_placed(taken, least, most);
        merge_placed(taken);
        return taken;
    }

    // Collects the keys in the order of bins, so that only the loads' distances from the least one are left to sort by.
    void sort_placed(std::size_t num_taken, Key least, Key most) {
        const Key base = least >> bin_bits_ << bin_bits_;
        placed_.resize(key_of_bin_.size());
        if (num_taken == key_of_bin_.size() && !limited_) {
            placed_.swap(key_of_bin_);
            std::fill(key_of_bin_.begin(), key_of_bin_.end(), kNone);
        } else {
            take_placed();
        }
        if (!placed_.empty()) radix_sort(placed_, spare_, base, bin_bits_, bit_width((most - base) >> bin_bits_));
    }

    void take_placed() {
        std::size_t num_placed = 0;
        for (Key& key : key_of_bin_) {
            placed_[num_placed] = key;
            num_placed += key != kNone;
            key = kNone;
        }
        placed_.resize(num_placed);
    }

    void merge_placed(std::size_t taken) {
        if (taken == ready_.size()) {
            ready_.swap(placed_);
            return;
        }
        merged_.resize(placed_.size() + ready_.size() - taken);
        std::merge(placed_.begin(), placed_.end(), ready_.begin() + taken, ready_.end(), merged_.begin());
        ready_.swap(merged_);
    }

    // The same through a binary heap, for many short items and few bins far below the others.
    void place_one_by_one(std::size_t num_items) {
        for (; num_items > 0 && next_ < items_.size(); --num_items) {
            const Key key = place(ready_.front());
            ready_.front() = key == kNone ? ready_.back() : key;
            if (key == kNone) ready_.pop_back();
            sift_down();
        }
        std::sort(ready_.begin(), ready_.end());
    }

    void sift_down() {
        const std::size_t size = ready_.size();
        if (size == 0) return;
        const Key key = ready_.front();
        std::size_t place = 0;
        for (std::size_t child = 1; child < size; child = 2 * place + 1) {
            if (child + 1 < size) child += ready_[child + 1] < ready_[child];
            if (key <= ready_[child]) break;
            ready_[place] = ready_[child];
            place = child;
        }
        ready_[place] = key;
    }

    const RankedItems& items_;
    const int bin_bits_;
    std::int64_t next_ = 0;
    const bool limited_;
    std::vector<std::int64_t> room_;
    std::vector<Key> ready_;  // ascending, hence also a heap; full bins are gone
    std::vector<Key> key_of_bin_, placed_, merged_, spare_;
    std::vector<std::int32_t>& bin_of_rank_;
};

}  // namespace

void place_longest_first(const RankedItems& items, std::int64_t num_bins, std::int64_t max_items_per_bin,
                         std::vector<std::int32_t>& bin_of_rank) {
    const std::int64_t total = std::accumulate(items.additive.begin(), items.additive.end(), std::int64_t{0});
    const int key_bits = bit_width(static_cast<std::uint64_t>(total)) + bit_width(static_cast<std::uint64_t>(num_bins));
    if (key_bits < 64) {
        Placement<std::uint64_t>(items, num_bins, max_items_per_bin, bin_of_rank).run();
    } else {
        Placement<Wide>(items, num_bins, max_items_per_bin, bin_of_rank).run();
    }
}

}  // namespace braid

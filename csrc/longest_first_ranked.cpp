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
          key_of_bin_(num_bins),
          bin_of_rank_(bin_of_rank) {
        bin_of_rank_.resize(items.size());
        std::iota(ready_.begin(), ready_.end(), Key{0});
        key_of_bin_ = ready_;
    }

    // Returns the load of the most loaded bin.
    std::int64_t run() {
        while (next_ < items_.size()) {
            const std::size_t num_ready = ready_.size();
            if (place_run() * 8 < num_ready) place_one_by_one(num_ready);
        }
        for (const Key key : key_of_bin_) most_of_full_ = std::max(most_of_full_, key == kNone ? 0 : load(key));
        return most_of_full_;
    }

   private:
    static constexpr Key kNone = ~Key{0};

    std::int64_t load(Key key) const { return static_cast<std::int64_t>(key >> bin_bits_); }
    std::size_t bin(Key key) const { return static_cast<std::size_t>(key & ((Key{1} << bin_bits_) - 1)); }

    // Puts the next item into the bin of `key`; returns the bin's new key, or kNone when it is full.
    Key place(Key key) {
        bin_of_rank_[next_] = static_cast<std::int32_t>(bin(key));
        key += static_cast<Key>(items_.additive[next_++]) << bin_bits_;
        if (--room_[bin(key)] > 0) return key;
        most_of_full_ = std::max(most_of_full_, load(key));
        return kNone;
    }

    // Places one item per bin, in ascending order of load, for as long as no bin that got one is the least loaded again:
    // as one by one would, with one linear sort in place of many steps of a heap. Returns how many.
    std::size_t place_run() {
        const std::size_t limit = std::min(ready_.size(), static_cast<std::size_t>(items_.size() - next_));
        const std::int64_t* const costs = items_.additive.data() + next_;
        std::int32_t* const bins = bin_of_rank_.data() + next_;
        Key *const ready = ready_.data(), *const key_of_bin = key_of_bin_.data();
        const int shift = bin_bits_;
        const Key mask = (Key{1} << shift) - 1;
        std::size_t taken = 0;
        Key least = kNone, most = 0;
        bool is_sorted = true;  // as after a run of equal items, of which large batches have many
        for (; taken < limit && ready[taken] < least; ++taken) {
            const Key key = ready[taken] + (static_cast<Key>(costs[taken]) << shift);
            const std::size_t bin = static_cast<std::size_t>(key & mask);
            bins[taken] = static_cast<std::int32_t>(bin);
            key_of_bin[bin] = ready[taken] = key;
            is_sorted &= key >= most;
            least = std::min(least, key);
            most = std::max(most, key);
        }
        if (taken < ready_.size()) most = std::max(most, ready_.back());
        next_ += taken;
        is_sorted &= taken == ready_.size();
        if (limited_) close_full_bins(taken);
        if (next_ < items_.size() && !is_sorted) sort_by_load(least, most);
        return taken;
    }

    void close_full_bins(std::size_t taken) {
        bool is_any_full = false;
        for (std::size_t index = 0; index < taken; ++index) {
            const Key key = ready_[index];
            if (--room_[bin(key)] > 0) continue;
            most_of_full_ = std::max(most_of_full_, load(key));
            key_of_bin_[bin(key)] = ready_[index] = kNone;
            is_any_full = true;
        }
        if (is_any_full) ready_.erase(std::remove(ready_.begin(), ready_.end(), kNone), ready_.end());
    }

    // Makes `ready_` from `key_of_bin_`: from the order of bins only loads are left to sort by, from the least one on.
    void sort_by_load(Key least, Key most) {
        const Key base = least >> bin_bits_ << bin_bits_;
        const int num_bits = bit_width((most - base) >> bin_bits_);
        if (num_bits <= kLargestDigitBits) return distribute_by_load(base, std::size_t{1} << num_bits);
        ready_.resize(key_of_bin_.size());
        std::size_t num_ready = 0;
        for (const Key key : key_of_bin_) {
            ready_[num_ready] = key;
            num_ready += key != kNone;
        }
        ready_.resize(num_ready);
        radix_sort(ready_, spare_, base, bin_bits_, num_bits);
    }

    // One pass of a radix sort. `ready_` holds the same keys, nearly in order, so two counters take turns: counting on the
    // same one again and again is slow.
    void distribute_by_load(Key base, std::size_t num_loads) {
        const int shift = bin_bits_;
        const auto distance = [base, shift](Key key) { return static_cast<std::size_t>((key - base) >> shift); };
        std::uint32_t starts[1 << kLargestDigitBits], others[1 << kLargestDigitBits];
        std::fill(starts, starts + num_loads, 0);
        std::fill(others, others + num_loads, 0);
        Key* const ready = ready_.data();
        const std::size_t half = ready_.size() / 2;
        for (std::size_t index = 0; index < half; ++index) {
            ++starts[distance(ready[index])];
            ++others[distance(ready[index + half])];
        }
        if (ready_.size() % 2) ++starts[distance(ready_.back())];
        std::uint32_t start = 0;
        for (std::size_t load = 0; load < num_loads; ++load) {
            const std::uint32_t count = starts[load] + others[load];
            starts[load] = start;
            start += count;
        }
        for (const Key key : key_of_bin_)
            if (key != kNone) ready[starts[distance(key)]++] = key;
    }

    // The same through a binary heap, for many short items and few bins far below the others.
    void place_one_by_one(std::size_t num_items) {
        for (; num_items > 0 && next_ < items_.size(); --num_items) {
            const Key key = place(ready_.front());
            key_of_bin_[bin(ready_.front())] = key;
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
    std::int64_t next_ = 0, most_of_full_ = 0;
    const bool limited_;
    std::vector<std::int64_t> room_;
    std::vector<Key> ready_;  // ascending, hence also a heap; full bins are gone
    std::vector<Key> key_of_bin_, spare_;
    std::vector<std::int32_t>& bin_of_rank_;
};

}  // namespace

std::int64_t place_longest_first(const RankedItems& items, std::int64_t num_bins, std::int64_t max_items_per_bin,
                                 std::vector<std::int32_t>& bin_of_rank) {
    // A bin without limit gets an item when it is the least loaded one, so its load then is at most the mean.
    std::int64_t most = std::accumulate(items.additive.begin(), items.additive.end(), std::int64_t{0});
    if (max_items_per_bin >= items.size()) most = std::min(most, most / num_bins + items.additive[0]);
    const int key_bits = bit_width(static_cast<std::uint64_t>(most)) + bit_width(static_cast<std::uint64_t>(num_bins));
    if (key_bits < 32) return Placement<std::uint32_t>(items, num_bins, max_items_per_bin, bin_of_rank).run();
    if (key_bits < 64) return Placement<std::uint64_t>(items, num_bins, max_items_per_bin, bin_of_rank).run();
    return Placement<Wide>(items, num_bins, max_items_per_bin, bin_of_rank).run();
}

}  // namespace braid

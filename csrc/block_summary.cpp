#include "block_summary.h"

#include <algorithm>
#include <map>
#include <utility>

namespace braid {

namespace {

constexpr std::int64_t kTextBit = 1;
constexpr std::int64_t kAcrossItemsBit = std::int64_t{1} << 62;
constexpr std::int64_t kModalityBits = kAcrossItemsBit - 1;

struct Interval {
    std::int64_t begin, end;
};
using Intervals = std::vector<Interval>;

void append(Intervals& intervals, std::int64_t begin, std::int64_t end) {
    if (!intervals.empty() && intervals.back().end == begin) {
        intervals.back().end = end;
    } else {
        intervals.push_back({begin, end});
    }
}

// The runs of one sample, and which of its keys its queries see.
class Sample {
  public:
    explicit Sample(const MaskRuns& runs) : runs_(runs) {}

    // Moves on to the sample that begins with a run.
    void open(std::int64_t first_run) {
        first_run_ = last_run_ = first_run;
        present_ = 0;
        const std::int64_t num_runs = runs_.bits.size;
        for (; last_run_ < num_runs && runs_.sample_ids[last_run_] == runs_.sample_ids[first_run]; ++last_run_) {
            present_ |= key_bits(last_run_);
        }
        items_.clear();
        seen_.clear();
    }

    std::int64_t last_run() const { return last_run_; }

    // Keys that a causal query at the beginning of a run sees before it; `all_before` where these are all, else a list.
    bool sees_all_before(std::int64_t run) const { return (runs_.bits[run] & present_) == present_; }
    std::int64_t begin() const { return runs_.starts[first_run_]; }
    const Intervals& seen_by_text(std::int64_t run) { return seen(runs_.bits[run] & kModalityBits); }

    // Keys that the queries of an item's run see.
    const Intervals& seen_by_item(std::int64_t run) {
        const std::int64_t own_bit = key_bits(run);
        return runs_.bits[run] & kAcrossItemsBit ? seen(own_bit) : of_item(runs_.item_ids[run], own_bit);
    }

  private:
    std::int64_t key_bits(std::int64_t run) const { return runs_.bits[run] < 0 ? kTextBit : runs_.bits[run] & kModalityBits; }

    // All keys of the sample that are one of `bits`.
    const Intervals& seen(std::int64_t bits) {
        const auto [place, is_new] = seen_.try_emplace(bits);
        if (is_new) {
            for (std::int64_t run = first_run_; run < last_run_; ++run) {
                if (key_bits(run) & bits) append(place->second, runs_.starts[run], runs_.starts[run + 1]);
            }
        }
        return place->second;
    }

    const Intervals& of_item(std::int32_t item, std::int64_t bit) {
        if (items_.empty()) {
            for (std::int64_t run = first_run_; run < last_run_; ++run) {
                if (runs_.bits[run] < 0) continue;
                append(items_[{runs_.item_ids[run], key_bits(run)}], runs_.starts[run], runs_.starts[run + 1]);
            }
        }
        return items_[{item, bit}];
    }

    const MaskRuns& runs_;
    std::int64_t first_run_ = 0, last_run_ = 0, present_ = 0;
    std::map<std::int64_t, Intervals> seen_;
    std::map<std::pair<std::int32_t, std::int64_t>, Intervals> items_;
};

// How many queries of one query block see each key, as steps of a function over the keys; where a causal run sees itself, the
// function only tells "none", "some" and "all" apart.
class StepsOfRow {
  public:
    // From here on, steps come in ascending order of their keys, until this is called again.
    void begin_run() { ascents_.push_back(steps_.size()); }

    void see(std::int64_t begin, std::int64_t end, std::int64_t num_queries) {
        steps_.push_back({begin, num_queries});
        steps_.push_back({end, -num_queries});
    }

    // Appends the strips of key blocks that any of `num_queries` sees, and forgets the row; returns their number of blocks.
    std::int64_t finish(std::int64_t num_queries, std::int64_t key_block_size, std::int64_t num_tokens,
                        std::vector<Strip>& strips) {
        sort_steps();
        const std::size_t first_strip = strips.size();
        std::int64_t open_block = -1, open_full_tokens = 0, num_seeing = 0;
        const auto close = [&] {
            if (open_block < 0) return;
            const std::int64_t size = std::min(key_block_size, num_tokens - open_block * key_block_size);
            add(strips, first_strip, open_block, open_block, open_full_tokens == size);
            open_block = -1;
        };
        for (std::size_t index = 0; index + 1 < steps_.size(); ++index) {
            num_seeing += steps_[index].second;
            const std::int64_t begin = steps_[index].first, end = steps_[index + 1].first;
            if (begin == end || num_seeing == 0) continue;
            const bool is_full = num_seeing == num_queries;
            const std::int64_t first = begin / key_block_size, last = (end - 1) / key_block_size;
            if (first != open_block) {
                close();
                open_block = first;
                open_full_tokens = 0;
            }
            if (is_full) open_full_tokens += std::min(end, (first + 1) * key_block_size) - begin;
            if (first == last) continue;
            close();
            if (first + 1 < last) add(strips, first_strip, first + 1, last - 1, is_full);
            open_block = last;
            open_full_tokens = is_full ? end - last * key_block_size : 0;
        }
        close();
        steps_.clear();
        ascents_.clear();
        return count_blocks(strips, first_strip);
    }

    static std::int64_t count_blocks(const std::vector<Strip>& strips, std::size_t first_strip) {
        std::int64_t num_blocks = 0;
        for (std::size_t strip = first_strip; strip < strips.size(); ++strip) {
            num_blocks += strips[strip].last - strips[strip].first + 1;
        }
        return num_blocks;
    }

  private:
    void sort_steps() {
        const auto is_before = [](const Step& a, const Step& b) { return a.first < b.first; };
        const auto at = [&](std::size_t index) { return steps_.begin() + static_cast<std::ptrdiff_t>(index); };
        if (ascents_.size() > kMostMerges) {
            std::sort(steps_.begin(), steps_.end(), is_before);
            return;
        }
        for (std::size_t each = 1; each < ascents_.size(); ++each) {
            const auto end = each + 1 < ascents_.size() ? at(ascents_[each + 1]) : steps_.end();
            std::inplace_merge(steps_.begin(), at(ascents_[each]), end, is_before);
        }
    }

    static void add(std::vector<Strip>& strips, std::size_t first_strip, std::int64_t first, std::int64_t last, bool is_full) {
        if (strips.size() > first_strip && strips.back().is_full == is_full && strips.back().last + 1 == first) {
            strips.back().last = static_cast<std::int32_t>(last);
        } else {
            strips.push_back({static_cast<std::int32_t>(first), static_cast<std::int32_t>(last), is_full});
        }
    }

    using Step = std::pair<std::int64_t, std::int64_t>;  // (key, change in the number of queries)
    static constexpr std::size_t kMostMerges = 4;

    std::vector<Step> steps_;
    std::vector<std::size_t> ascents_;  // where each run's steps begin
};

// The sum of min(i, num_queries) for i below `stop`.
std::int64_t count_attended(std::int64_t stop, std::int64_t num_queries) {
    const std::int64_t rising = std::min(stop, num_queries + 1);
    return rising * (rising - 1) / 2 + (stop - rising) * num_queries;
}

// Adds what tokens begin .. end - 1 of a run see; returns the number of visible pairs.
std::int64_t see_from_run(const MaskRuns& runs, std::int64_t run, std::int64_t begin, std::int64_t end, Sample& sample,
                          StepsOfRow& row) {
    const std::int64_t num_queries = end - begin;
    std::int64_t num_keys = 0;
    row.begin_run();
    const auto see = [&](std::int64_t from, std::int64_t to) {
        if (from >= to) return;
        row.see(from, to, num_queries);
        num_keys += to - from;
    };
    if (runs.bits[run] >= 0) {
        for (const Interval& keys : sample.seen_by_item(run)) see(keys.begin, keys.end);
        return num_queries * num_keys;
    }
    std::int64_t num_pairs = 0;
    const auto see_before = [&](std::int64_t from, std::int64_t to) {
        from = std::max(from, begin - runs.window + 1);
        to = std::min(to, begin);
        if (from >= to) return;
        const std::int64_t middle = std::clamp(end - runs.window, from, to);  // from here on seen by all queries
        if (from < middle) row.see(from, middle, 1);
        see(middle, to);
        num_pairs += count_attended(to - begin + runs.window, num_queries) - count_attended(from - begin + runs.window, num_queries);
    };
    if (sample.sees_all_before(run)) {
        see_before(sample.begin(), begin);
    } else {
        for (const Interval& keys : sample.seen_by_text(run)) {
            if (keys.begin >= begin) break;
            see_before(keys.begin, keys.end);
        }
    }
    const std::int64_t whole = begin + (runs.window >= num_queries ? 1 : 0);  // the keys of the run that all of it sees
    if (begin < whole) row.see(begin, whole, num_queries);
    if (whole < end) row.see(whole, end, 1);
    const std::int64_t shorter = std::min(num_queries, runs.window);
    return num_pairs + shorter * (shorter + 1) / 2 + (num_queries - shorter) * runs.window;
}

}  // namespace

std::vector<std::int64_t> find_mask_runs(View<std::int64_t> bits, View<std::int32_t> sample_ids, View<std::int32_t> item_ids) {
    std::vector<std::int64_t> starts;
    for (std::int64_t token = 0; token < bits.size; ++token) {
        if (token == 0 || bits[token] != bits[token - 1] || sample_ids[token] != sample_ids[token - 1] ||
            item_ids[token] != item_ids[token - 1]) {
            starts.push_back(token);
        }
    }
    starts.push_back(bits.size);
    return starts;
}

BlockStrips summarize_blocks(const MaskRuns& runs, std::int64_t query_block_size, std::int64_t key_block_size) {
    const std::int64_t num_tokens = runs.starts[runs.bits.size];
    BlockStrips summary;
    summary.row_starts.push_back(0);
    Sample sample(runs);
    StepsOfRow steps;
    const Intervals* keys_of_last = nullptr;  // what all queries of the last block saw, if that is one list
    std::int64_t run = 0, size_of_last = 0;
    for (std::int64_t block_begin = 0; block_begin < num_tokens; block_begin += query_block_size) {
        const std::int64_t block_end = std::min(block_begin + query_block_size, num_tokens), size = block_end - block_begin;
        const Intervals* keys_of_all = nullptr;
        if (run < sample.last_run() && runs.bits[run] >= 0 && block_end <= runs.starts[run + 1]) {
            keys_of_all = &sample.seen_by_item(run);
        }
        if (keys_of_all != nullptr && keys_of_all == keys_of_last && size == size_of_last) {
            summary.rows.push_back(summary.rows.back());
            summary.visible_pairs.push_back(summary.visible_pairs.back());
            const auto last_start = summary.row_starts.end() - 1;
            summary.row_starts.push_back(2 * *last_start - *(last_start - 1));
            if (block_end == runs.starts[run + 1]) ++run;
            continue;
        }
        std::int64_t num_pairs = 0;
        for (std::int64_t begin = block_begin; begin < block_end;) {
            if (run == sample.last_run()) sample.open(run);
            const std::int64_t end = std::min(runs.starts[run + 1], block_end);
            num_pairs += see_from_run(runs, run, begin, end, sample, steps);
            if (end == runs.starts[run + 1]) ++run;
            begin = end;
        }
        keys_of_last = keys_of_all;
        size_of_last = size;
        const auto first_strip = static_cast<std::int64_t>(summary.strips.size());
        const std::int64_t num_blocks = steps.finish(size, key_block_size, num_tokens, summary.strips);
        summary.rows.push_back({first_strip, static_cast<std::int64_t>(summary.strips.size())});
        summary.row_starts.push_back(summary.row_starts.back() + num_blocks);
        summary.visible_pairs.push_back(num_pairs);
    }
    return summary;
}

void expand_strips(const BlockStrips& strips, std::int32_t* key_blocks, bool* is_full) {
    for (const BlockStrips::Row& row : strips.rows) {
        for (std::int64_t each = row.first_strip; each < row.last_strip; ++each) {
            const Strip& strip = strips.strips[each];
            for (std::int32_t block = strip.first; block <= strip.last; ++block) {
                *key_blocks++ = block;
                *is_full++ = strip.is_full;
            }
        }
    }
}

}  // namespace braid

#include "map_stages.h"

#include <algorithm>
#include <limits>

namespace braid {
namespace {

using Ticks = std::int64_t;
constexpr Ticks kNever = std::numeric_limits<Ticks>::max() / 4;
constexpr std::int64_t kSlack = 16;  // share of the limit by which it grows where nothing is found

// The last stages of a pipeline, of which the first one begins at some piece.
struct Suffix {
    Ticks step, through;  // ticks of a step of these stages alone, and of one microbatch through them, there and back
    std::int64_t origin;  // its number among the origins
};

// The first stage of a suffix, and the origin of the suffix without it.
struct Origin {
    std::int64_t rest;
    std::int32_t end, size;
};

// Microbatches that a stage with `behind` stages after it keeps waiting: before its first backward, and after its last forward.
Ticks idle_ticks(Ticks through, std::int64_t behind, Ticks forward, Ticks backward, std::int64_t num_microbatches) {
    const Ticks ahead = std::min(behind, num_microbatches - 1);
    const Ticks before = std::max<Ticks>(0, through - ahead * forward), after = std::max<Ticks>(0, through - ahead * backward);
    return behind < num_microbatches - 1 ? before + after : std::max(before, after);
}

class StageMapper {
public:
    StageMapper(const StageTables& tables, std::int64_t most_gpus)
        : tables_(tables), pieces_(tables.num_pieces), width_(most_gpus + 1), is_listed_((pieces_ + 1) * width_) {
        bottleneck_ = relax(kNever, most_gpus, true);
        through_ = relax(kNever, most_gpus, false);
    }

    StageMapping map(std::int64_t num_gpus, std::int64_t num_microbatches) {
        const Ticks slowest = bottleneck_[pieces_ * width_ + num_gpus], through = through_[pieces_ * width_ + num_gpus];
        if (slowest >= kNever || !is_possible(num_gpus, num_microbatches)) return {};
        Ticks limit = std::max({slowest * num_microbatches, through, Ticks{1}});
        StageMapping found;
        while (found.ticks < 0) {
            limit += limit / kSlack + 1;
            found = search(num_gpus, num_microbatches, limit, false);
        }
        const StageMapping better = search(num_gpus, num_microbatches, found.ticks - 1, true);
        return better.ticks < 0 ? found : better;
    }

private:
    std::int64_t at(std::int64_t size, std::int64_t first, std::int64_t end) const {
        return (size * pieces_ + first) * (pieces_ + 1) + end;
    }

    // [pieces + 1, GPUs + 1]: of the best first stages that hold so many pieces on so many GPUs, one microbatch through all, or
    // through the slowest; no stage takes longer than `longest`. It knows nothing of microbatches in flight.
    std::vector<Ticks> relax(Ticks longest, std::int64_t most_gpus, bool is_slowest) const {
        std::vector<Ticks> best((pieces_ + 1) * width_, kNever);
        best[0] = 0;
        for (std::int64_t end = 1; end <= pieces_; ++end)
            for (std::int64_t size = 0; size < tables_.sizes.size; ++size)
                for (std::int64_t first = end - 1; first >= 0; --first) {
                    const std::int64_t entry = at(size, first, end), gpus = tables_.sizes[size];
                    const Ticks ticks = tables_.forward[entry] + tables_.backward[entry];
                    if (tables_.capacities[entry] < 1 || ticks > longest) break;
                    const Ticks* from = &best[first * width_];
                    Ticks* to = &best[end * width_];
                    for (std::int64_t used = gpus; used <= most_gpus; ++used) {
                        const Ticks before = from[used - gpus];
                        const Ticks with = is_slowest ? std::max(before, ticks) : before + ticks;
                        to[used] = std::min(to[used], before >= kNever ? kNever : with);
                    }
                }
        return best;
    }

    // True if some mapping fits the memory: which numbers of GPUs the last stages can have, by their number and first piece.
    bool is_possible(std::int64_t num_gpus, std::int64_t num_microbatches) const {
        const std::size_t words = num_gpus / 64 + 1;
        std::vector<std::uint64_t> held((pieces_ + 1) * words, 0), next;
        held[pieces_ * words] = 1;
        for (std::int64_t behind = 0; behind < pieces_; ++behind) {
            next.assign((pieces_ + 1) * words, 0);
            const std::int64_t in_flight = std::min(behind + 1, num_microbatches);
            for (std::int64_t end = 1; end <= pieces_; ++end) {
                const std::uint64_t* from = &held[end * words];
                if (std::all_of(from, from + words, [](std::uint64_t word) { return word == 0; })) continue;
                for (std::int64_t size = 0; size < tables_.sizes.size; ++size)
                    for (std::int64_t first = end - 1; first >= 0; --first) {
                        if (tables_.capacities[at(size, first, end)] < in_flight) break;
                        shift_into(from, &next[first * words], words, tables_.sizes[size]);
                    }
            }
            if (next[num_gpus / 64] >> (num_gpus % 64) & 1) return true;
            held.swap(next);
        }
        return false;
    }

    static void shift_into(const std::uint64_t* from, std::uint64_t* to, std::size_t words, std::int64_t bits) {
        const std::size_t whole = bits / 64, part = bits % 64;
        for (std::size_t word = words; word-- > whole;) {
            to[word] |= from[word - whole] << part;
            if (part && word > whole) to[word] |= from[word - whole - 1] >> (64 - part);
        }
    }

    // The best mapping whose step takes at most `limit`: suffixes of 1, 2, ... stages, of which for each first piece and number of
    // GPUs those are kept that no other beats in both its step and the ticks of a microbatch; or only that with the shortest step.
    StageMapping search(std::int64_t num_gpus, std::int64_t num_microbatches, Ticks limit, bool keeps_all) {
        const Ticks longest = limit / num_microbatches;
        const std::vector<Ticks> rest = relax(longest, num_gpus, false);
        origins_.assign(1, {-1, 0, 0});
        kept_.resize((pieces_ + 1) * width_);
        added_.resize((pieces_ + 1) * width_);
        std::vector<std::int64_t> states{pieces_ * width_}, next_states;
        kept_[states[0]].assign(1, {0, 0, 0});
        std::int64_t best = -1;
        Ticks best_step = -1;
        for (std::int64_t behind = 0; !states.empty(); ++behind) {
            const std::int64_t in_flight = std::min(behind + 1, num_microbatches);
            next_states.clear();
            for (const std::int64_t state : states) {
                const std::int64_t end = state / width_, used = state % width_;
                std::vector<Suffix>& suffixes = kept_[state];
                for (std::int64_t size = 0; size < tables_.sizes.size; ++size) {
                    const std::int64_t gpus = used + tables_.sizes[size];
                    if (gpus > num_gpus) continue;
                    for (std::int64_t first = end - 1; first >= 0; --first) {
                        const std::int64_t entry = at(size, first, end);
                        const Ticks forward = tables_.forward[entry], backward = tables_.backward[entry];
                        const Ticks ticks = forward + backward;
                        if (ticks > longest || tables_.capacities[entry] < in_flight) break;
                        const Ticks before = rest[first * width_ + num_gpus - gpus];
                        if (before >= kNever || suffixes.front().step + ticks + before > limit) continue;
                        const auto own = [&](const Suffix& suffix) {
                            return num_microbatches * ticks +
                                   idle_ticks(suffix.through, behind, forward, backward, num_microbatches);
                        };
                        // Where the new stage decides, the last suffix for which it does beats those before it.
                        std::size_t chosen = 0;
                        while (chosen + 1 < suffixes.size() && own(suffixes[chosen + 1]) >= suffixes[chosen + 1].step + ticks)
                            ++chosen;
                        const std::int64_t to = first * width_ + gpus;
                        for (; chosen < suffixes.size(); ++chosen) {
                            const Suffix& behind_it = suffixes[chosen];
                            if (behind_it.step + ticks + before > limit) break;
                            const Suffix suffix{std::max(behind_it.step + ticks, own(behind_it)), behind_it.through + ticks,
                                                static_cast<std::int64_t>(origins_.size())};
                            if (suffix.step + before > limit) continue;
                            if (first > 0 && !keep(added_[to], suffix, keeps_all)) continue;
                            origins_.push_back(
                                {behind_it.origin, static_cast<std::int32_t>(end), static_cast<std::int32_t>(size)});
                            if (first == 0) {
                                best = suffix.origin;
                                best_step = suffix.step;
                                limit = suffix.step - 1;
                            } else if (!is_listed_[to]) {
                                is_listed_[to] = 1;
                                next_states.push_back(to);
                            }
                        }
                    }
                }
                suffixes.clear();
            }
            for (const std::int64_t state : next_states) {
                kept_[state].swap(added_[state]);
                is_listed_[state] = 0;
            }
            states.swap(next_states);
        }
        return best < 0 ? StageMapping{} : trace(best, best_step);
    }

    // Adds a suffix to a row, in ascending order of steps and descending order of `through`; false where another beats it.
    static bool keep(std::vector<Suffix>& row, const Suffix& suffix, bool keeps_all) {
        if (!keeps_all && !row.empty()) {
            if (suffix.step >= row[0].step) return false;
            row[0] = suffix;
            return true;
        }
        std::size_t position = row.size();
        while (position > 0 && row[position - 1].step > suffix.step) --position;
        if (position > 0 && row[position - 1].through <= suffix.through) return false;
        std::size_t first = position, last = position;
        if (first > 0 && row[first - 1].step == suffix.step) --first;
        while (last < row.size() && row[last].through >= suffix.through) ++last;
        if (first == last) {
            row.insert(row.begin() + first, suffix);
        } else {
            row[first] = suffix;
            row.erase(row.begin() + first + 1, row.begin() + last);
        }
        return true;
    }

    StageMapping trace(std::int64_t origin, Ticks step) const {
        StageMapping mapping;
        mapping.ticks = step;
        for (; origins_[origin].rest >= 0; origin = origins_[origin].rest) {
            mapping.ends.push_back(origins_[origin].end);
            mapping.sizes.push_back(tables_.sizes[origins_[origin].size]);
        }
        return mapping;
    }

    const StageTables tables_;
    const std::int64_t pieces_, width_;
    std::vector<Ticks> bottleneck_, through_;
    std::vector<Origin> origins_;
    std::vector<std::vector<Suffix>> kept_, added_;
    std::vector<char> is_listed_;
};

}  // namespace

std::vector<StageMapping> map_stages(const StageTables& tables, View<std::int64_t> num_gpus,
                                     View<std::int64_t> num_microbatches) {
    std::int64_t most = 0;
    for (std::int64_t index = 0; index < num_gpus.size; ++index) most = std::max(most, num_gpus[index]);
    StageMapper mapper(tables, most);
    std::vector<StageMapping> mappings;
    for (std::int64_t index = 0; index < num_gpus.size; ++index)
        mappings.push_back(mapper.map(num_gpus[index], num_microbatches[index]));
    return mappings;
}

}  // namespace braid

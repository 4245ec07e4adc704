#include "cut_evenly.h"

#include <algorithm>
#include <queue>
#include <tuple>

namespace braid {
namespace {

struct Row {
    const std::int64_t* amounts;
    std::int64_t size;
};

// As few runs as keep every run within the limit; only their number where `starts` is null.
std::int64_t cut_at_limit(const Row& row, std::int64_t limit, std::vector<std::int64_t>* starts) {
    std::int64_t num_runs = 1, total = 0;
    if (starts) starts->assign(1, 0);
    for (std::int64_t index = 0; index < row.size; ++index) {
        if (total + row.amounts[index] > limit) {
            ++num_runs;
            if (starts) starts->push_back(index);
            total = 0;
        }
        total += row.amounts[index];
    }
    return num_runs;
}

// Halves the largest run that has more than one entry until there are `count` runs.
void split_further(const Row& row, std::int64_t count, std::vector<std::int64_t>& starts) {
    std::vector<std::int64_t> sums(row.size + 1, 0);
    for (std::int64_t index = 0; index < row.size; ++index) sums[index + 1] = sums[index] + row.amounts[index];
    using Run = std::tuple<std::int64_t, std::int64_t, std::int64_t>;  // sum, -first, last
    std::priority_queue<Run> runs;
    const auto add = [&](std::int64_t first, std::int64_t last) {
        if (last - first > 1) runs.emplace(sums[last] - sums[first], -first, last);
    };
    for (std::size_t index = 0; index < starts.size(); ++index)
        add(starts[index], index + 1 < starts.size() ? starts[index + 1] : row.size);
    while (static_cast<std::int64_t>(starts.size()) < count) {
        const auto [sum, negative, last] = runs.top();
        const std::int64_t first = -negative;
        runs.pop();
        std::int64_t half = first + 1;
        const auto larger = [&](std::int64_t cut) { return std::max(sums[cut] - sums[first], sums[last] - sums[cut]); };
        for (std::int64_t cut = first + 2; cut < last; ++cut)
            if (larger(cut) < larger(half)) half = cut;
        starts.push_back(half);
        add(first, half);
        add(half, last);
    }
    std::sort(starts.begin(), starts.end());
}

}  // namespace

std::vector<std::int64_t> cut_evenly(const std::int64_t* amounts, const std::int64_t* row_starts, const std::int64_t* counts,
                                     std::int64_t num_rows, std::vector<std::int64_t>& num_runs) {
    std::vector<std::int64_t> all, starts;
    for (std::int64_t index = 0; index < num_rows; ++index) {
        const Row row{amounts + row_starts[index], row_starts[index + 1] - row_starts[index]};
        const std::int64_t count = std::min(counts[index], row.size);
        num_runs.push_back(std::max<std::int64_t>(count, 0));
        if (count <= 0) continue;
        std::int64_t lowest = 0, highest = 0;
        for (std::int64_t entry = 0; entry < row.size; ++entry) {
            lowest = std::max(lowest, row.amounts[entry]);
            highest += row.amounts[entry];
        }
        lowest = std::max(lowest, (highest + count - 1) / count);
        while (lowest < highest) {
            const std::int64_t middle = lowest + (highest - lowest) / 2;
            if (cut_at_limit(row, middle, nullptr) <= count)
                highest = middle;
            else
                lowest = middle + 1;
        }
        cut_at_limit(row, lowest, &starts);
        split_further(row, count, starts);
        for (const std::int64_t start : starts) all.push_back(row_starts[index] + start);
    }
    return all;
}

}  // namespace braid

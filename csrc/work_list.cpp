#include "work_list.h"

#include <algorithm>

namespace braid {

namespace {

constexpr std::int64_t kDirect = -1;
constexpr std::size_t kItemSize = 5;

// Sorts items by length, longest first, by counting; equal lengths keep their order.
std::vector<std::int32_t> longest_first(const std::vector<std::int32_t>& items) {
    const auto length = [&](std::size_t item) { return items[item + 3] - items[item + 1]; };
    std::int32_t longest = 0;
    for (std::size_t item = 0; item < items.size(); item += kItemSize) longest = std::max(longest, length(item));
    // Where the items of each length begin; longer ones come before.
    std::vector<std::size_t> next(static_cast<std::size_t>(longest) + 2, 0);
    for (std::size_t item = 0; item < items.size(); item += kItemSize) next[longest - length(item) + 1] += kItemSize;
    for (std::size_t index = 1; index < next.size(); ++index) next[index] += next[index - 1];
    std::vector<std::int32_t> sorted(items.size());
    for (std::size_t item = 0; item < items.size(); item += kItemSize) {
        std::size_t& place = next[longest - length(item)];
        std::copy_n(items.begin() + item, kItemSize, sorted.begin() + place);
        place += kItemSize;
    }
    return sorted;
}

}  // namespace

void order_blocks(View<std::int64_t> row_starts, View<std::int32_t> blocks, View<bool> is_full, std::int64_t num_whole_rows,
                  std::int64_t num_whole_columns, std::int32_t* full_ends, std::int32_t* ordered) {
    for (std::int64_t row = 0; row + 1 < row_starts.size; ++row) {
        const std::int64_t begin = row_starts[row], end = row_starts[row + 1];
        const auto needs_no_mask = [&](std::int64_t entry) {
            return is_full[entry] && row < num_whole_rows && blocks[entry] < num_whole_columns;
        };
        std::int64_t full = begin, partial = begin;
        for (std::int64_t entry = begin; entry < end; ++entry) partial += needs_no_mask(entry);
        full_ends[row] = static_cast<std::int32_t>(partial);
        for (std::int64_t entry = begin; entry < end; ++entry) ordered[needs_no_mask(entry) ? full++ : partial++] = blocks[entry];
    }
}

WorkList plan_work_list(View<std::int32_t> row_starts, View<std::int32_t> full_ends, std::int64_t limit) {
    WorkList work;
    for (std::int64_t row = 0; row < full_ends.size; ++row) {
        const std::int64_t begin = row_starts[row], length = row_starts[row + 1] - begin;
        const std::int64_t parts = limit ? std::max<std::int64_t>(1, (length + limit - 1) / limit) : 1;
        const bool is_split = parts > 1;
        for (std::int64_t part = 0; part < parts; ++part) {
            const std::int64_t first = begin + length * part / parts, end = begin + length * (part + 1) / parts;
            const std::int64_t full_end = std::clamp<std::int64_t>(full_ends[row], first, end);
            for (const std::int64_t value : {row, first, full_end, end, is_split ? work.num_slots + part : kDirect}) {
                work.items.push_back(static_cast<std::int32_t>(value));
            }
        }
        if (is_split) {
            for (const std::int64_t value : {row, work.num_slots, parts}) {
                work.split_rows.push_back(static_cast<std::int32_t>(value));
            }
            work.num_slots += parts;
        }
    }
    if (limit) work.items = longest_first(work.items);
    return work;
}

}  // namespace braid

#include "group_rows.h"

#include <algorithm>
#include <vector>

namespace braid {

void group_rows(const std::int64_t* owners, const std::int64_t* values, std::int64_t num_values, std::int64_t num_rows,
                std::int64_t* starts, std::int64_t* grouped) {
    std::fill(starts, starts + num_rows + 1, 0);
    for (std::int64_t index = 0; index < num_values; ++index) ++starts[owners[index] + 1];
    for (std::int64_t row = 0; row < num_rows; ++row) starts[row + 1] += starts[row];
    std::vector<std::int64_t> next(starts, starts + num_rows);
    for (std::int64_t index = 0; index < num_values; ++index) grouped[next[owners[index]]++] = values[index];
}

}  // namespace braid

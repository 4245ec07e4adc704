#pragma once

#include <cstdint>

namespace braid {

// Groups values by their owners, in the order in which they stand: a counting sort.
// owners: [num_values] from 0 to num_rows - 1; starts: [num_rows + 1] and grouped: [num_values], filled.
void group_rows(const std::int64_t* owners, const std::int64_t* values, std::int64_t num_values, std::int64_t num_rows,
                std::int64_t* starts, std::int64_t* grouped);

}  // namespace braid

#pragma once

#include <cstdint>
#include <vector>

namespace braid {

// Cuts every row of amounts into at most `counts[row]` runs whose largest sum is the least possible, none of them empty; as
// cut_evenly_reference in multimodal/balance/algorithms/cut_evenly.py.
// row_starts: [num_rows + 1] into `amounts`, which are not negative. Returns the starts of all runs, and appends to `num_runs` how
// many each row has.
std::vector<std::int64_t> cut_evenly(const std::int64_t* amounts, const std::int64_t* row_starts, const std::int64_t* counts,
                                     std::int64_t num_rows, std::vector<std::int64_t>& num_runs);

}  // namespace braid

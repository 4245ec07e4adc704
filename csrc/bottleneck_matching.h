// Least largest bottleneck (Entrain 4.5.2), then least total cost (shortest augmenting paths).

#pragma once

#include <cstdint>
#include <vector>

namespace braid {

using Matrix = std::vector<std::vector<double>>;

// The column of every row; at least as many columns as rows, entries finite. Of equally good columns the first is taken.
// O(rows^2 x columns x log(entries)).
std::vector<std::int64_t> match_bottleneck(const Matrix& bottlenecks, const Matrix& costs);

}  // namespace braid

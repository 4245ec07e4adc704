// Stable sort of fewer than 2^32 unsigned keys by a range of their bits.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace braid {

constexpr int kLargestDigitBits = 11;  // 2,048 counters fit the first-level cache beside the keys

template <typename Key>
int bit_width(Key value) {
    int bits = 0;
    for (; value != 0; value >>= 1) ++bits;
    return bits;
}

// Sorts keys ascending by bits [low_bit, low_bit + num_bits) of their distance from `least`; equal ones keep their order. `spare`
// is scratch. O(n num_bits / 11).
template <typename Key>
void radix_sort(std::vector<Key>& keys, std::vector<Key>& spare, Key least, int low_bit, int num_bits) {
    if (num_bits == 0) return;
    const int num_passes = (num_bits + kLargestDigitBits - 1) / kLargestDigitBits;
    const int digit_bits = (num_bits + num_passes - 1) / num_passes;
    const std::size_t mask = (std::size_t{1} << digit_bits) - 1;
    std::uint32_t starts[1 << kLargestDigitBits];
    spare.resize(keys.size());
    for (int pass = 0; pass < num_passes; ++pass) {
        const int shift = low_bit + pass * digit_bits;
        std::fill(starts, starts + mask + 1, 0);
        for (const Key& key : keys) ++starts[static_cast<std::size_t>((key - least) >> shift) & mask];
        std::uint32_t start = 0;
        for (std::size_t digit = 0; digit <= mask; ++digit) {
            const std::uint32_t count = starts[digit];
            starts[digit] = start;
            start += count;
        }
        for (const Key& key : keys) spare[starts[static_cast<std::size_t>((key - least) >> shift) & mask]++] = key;
        keys.swap(spare);
    }
}

}  // namespace braid

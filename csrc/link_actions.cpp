#include "link_actions.h"

#include <numeric>

namespace braid {

Links link_actions(const PiecesToLink& in) {
    const std::int64_t num_actions = in.listed.size;
    std::vector<std::int64_t> position(in.need_starts.size - 1, -1);
    for (std::int64_t action = 0; action < num_actions; ++action) position[in.listed[action]] = action;
    const auto is_released = [&](std::int64_t forward, std::int64_t user) {
        return (in.flags[forward] & kIsForward) && ((in.flags[user] & kIsGradient) || !(in.flags[forward] & kHasGradient));
    };
    // Calls `need(first, then)` for every need and `order(first, then)` for every other pair, in the order of those told.
    const auto each_pair = [&](const auto& need, const auto& order) {
        for (std::int64_t then = 0; then < num_actions; ++then) {
            const std::int64_t piece = in.listed[then];
            for (std::int64_t at = in.need_starts[piece]; at < in.need_starts[piece + 1]; ++at) need(position[in.needs[at]], then);
            if ((in.flags[then] & kIsForward) && in.microbatches[then] > 0) order(position[piece - 1], then);
        }
        for (std::int64_t pair = 0; pair < in.before.size; ++pair) order(position[in.before[pair]], position[in.after[pair]]);
    };
    Links links;
    links.follower_starts.assign(num_actions + 1, 0);
    links.release_starts.assign(num_actions + 1, 0);
    const auto count = [&](std::int64_t first, std::int64_t then) {
        links.is_complete = links.is_complete && first >= 0 && then >= 0;
        if (links.is_complete) ++links.follower_starts[first + 1];
    };
    each_pair(
        [&](std::int64_t first, std::int64_t then) {
            count(first, then);
            if (links.is_complete && is_released(first, then)) ++links.release_starts[then + 1];
        },
        count);
    if (!links.is_complete) return links;
    for (auto* starts : {&links.follower_starts, &links.release_starts})
        std::partial_sum(starts->begin(), starts->end(), starts->begin());
    links.followers.resize(links.follower_starts.back());
    links.releases.reserve(links.release_starts.back());
    std::vector<std::int64_t> next(links.follower_starts.begin(), links.follower_starts.end() - 1);
    const auto tell = [&](std::int64_t first, std::int64_t then) { links.followers[next[first]++] = then; };
    each_pair(
        [&](std::int64_t first, std::int64_t then) {
            tell(first, then);
            if (is_released(first, then)) links.releases.push_back(first);
        },
        tell);
    return links;
}

}  // namespace braid

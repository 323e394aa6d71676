// Values in blocks, and threads that share the blocks out.

#pragma once

#include <algorithm>
#include <cstddef>
#include <thread>
#include <vector>

#include "default_arithmetic.hpp"

namespace paceline {

// Values that are encoded in blocks.
struct Blocks {
    std::size_t count;
    std::size_t block_size;
};

namespace {

// Fewer values are encoded before a second thread has begun.
constexpr std::size_t worth_a_thread = std::size_t{1} << 18;

template <class Each>
void for_blocks(Blocks blocks, std::size_t first, std::size_t end, const Each& each) {
    const DefaultArithmetic arithmetic;
    for (std::size_t block = first; block < end; ++block) {
        const std::size_t begin = block * blocks.block_size;
        each(block, begin, std::min(blocks.block_size, blocks.count - begin));
    }
}

// Call each(thread, block, first value, number of values) for all blocks.
template <class Each>
void share_out(Blocks blocks, std::size_t num_threads, const Each& each) {
    const std::size_t num_blocks = (blocks.count + blocks.block_size - 1) / blocks.block_size;
    const std::size_t most = std::max<std::size_t>(1, blocks.count / worth_a_thread);
    const std::size_t used = std::clamp<std::size_t>(num_threads, 1, most);
    const auto part = [&](std::size_t thread) {
        for_blocks(blocks, num_blocks * thread / used, num_blocks * (thread + 1) / used,
                   [&](auto... place) { each(thread, place...); });
    };
    std::vector<std::jthread> others;
    for (std::size_t thread = 1; thread < used; ++thread) others.emplace_back(part, thread);
    part(0);
}

}  // namespace
}  // namespace paceline

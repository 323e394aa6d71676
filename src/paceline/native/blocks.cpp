#include "blocks.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

#include "default_arithmetic.hpp"

namespace paceline {
namespace {

template <class Each>
void for_blocks(Blocks blocks, std::size_t first, std::size_t end, const Each& each) {
    const DefaultArithmetic arithmetic;
    for (std::size_t block = first; block < end; ++block) {
        const std::size_t begin = block * blocks.block_size;
        each(block, begin, std::min(blocks.block_size, blocks.count - begin));
    }
}

// Call each(block, first value, number of values) for all blocks; return the sum of the results.
template <class Each>
std::size_t share_out(Blocks blocks, std::size_t num_threads, const Each& each) {
    const std::size_t most = std::max<std::size_t>(1, blocks.count / worth_a_thread);
    const std::size_t used = std::clamp<std::size_t>(num_threads, 1, most);
    std::vector<std::size_t> sums(used);
    const auto part = [&](std::size_t thread) {
        std::size_t sum = 0;
        for_blocks(blocks, blocks.num() * thread / used, blocks.num() * (thread + 1) / used,
                   [&](auto... place) { sum += each(place...); });
        sums[thread] = sum;
    };
    {
        std::vector<std::jthread> others;
        for (std::size_t thread = 1; thread < used; ++thread) others.emplace_back(part, thread);
        part(0);
    }
    return std::accumulate(sums.begin(), sums.end(), std::size_t{0});
}

const CodecKernels<Codebook>& kernels_for(const Kernels& kernels, const Codebook&) {
    return kernels.eight_bit;
}
const CodecKernels<FourBitTable>& kernels_for(const Kernels& kernels, const FourBitTable&) {
    return kernels.four_bit;
}

}  // namespace

std::size_t cast(const Kernels& kernels, DType dtype, const float* values, std::size_t count,
                 std::uint16_t* rounded, std::size_t num_threads) {
    constexpr std::size_t values_per_call = std::size_t{1} << 13;
    const CastKernel kernel = kernels.cast[static_cast<std::size_t>(dtype)];
    if (kernel == nullptr) throw std::invalid_argument("dtype must be float16 or bfloat16");
    return share_out({count, values_per_call}, num_threads,
                     [&](std::size_t, std::size_t begin, std::size_t size) {
                         return kernel(values + begin, size, rounded + begin);
                     });
}

template <class Table>
std::size_t encode(const Kernels& kernels, const Table& table, Blocks blocks, const float* values,
                   float* scales, bool finds_scales, std::uint8_t* codes,
                   std::size_t num_threads) {
    const auto kernel = kernels_for(kernels, table).encode;
    return share_out(blocks, num_threads, [&](std::size_t block, std::size_t begin,
                                              std::size_t count) {
        std::size_t num_nonfinite = 0;
        const float largest = kernels.absmax(values + begin, count, num_nonfinite);
        if (finds_scales) scales[block] = largest;
        kernel(table, values + begin, scales[block], count, codes + begin / Table::values_per_byte);
        return num_nonfinite;
    });
}

template <class Table>
void decode(const Kernels& kernels, const Table& table, Blocks blocks, const std::uint8_t* codes,
            const float* scales, float* values, bool adds, std::size_t num_threads) {
    const auto& chosen = kernels_for(kernels, table);
    const auto kernel = adds ? chosen.add : chosen.decode;
    share_out(blocks, num_threads, [&](std::size_t block, std::size_t begin, std::size_t count) {
        kernel(table, codes + begin / Table::values_per_byte, scales[block], count, values + begin);
        return std::size_t{0};
    });
}

template std::size_t encode(const Kernels&, const Codebook&, Blocks, const float*, float*, bool,
                            std::uint8_t*, std::size_t);
template std::size_t encode(const Kernels&, const FourBitTable&, Blocks, const float*, float*, bool,
                            std::uint8_t*, std::size_t);
template void decode(const Kernels&, const Codebook&, Blocks, const std::uint8_t*, const float*,
                     float*, bool, std::size_t);
template void decode(const Kernels&, const FourBitTable&, Blocks, const std::uint8_t*, const float*,
                     float*, bool, std::size_t);

}  // namespace paceline

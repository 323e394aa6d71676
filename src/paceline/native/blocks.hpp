// Cast, encode and decode many values in several threads, block by block.

#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.hpp"

namespace paceline {

// `count` values in blocks of `block_size`; codes of each block but the last fill whole bytes.
struct Blocks {
    std::size_t count;
    std::size_t block_size;

    std::size_t num() const { return (count + block_size - 1) / block_size; }
};

// Number of values per thread; fewer values are encoded faster than a thread is started.
constexpr std::size_t worth_a_thread = std::size_t{1} << 18;

// Round values to float16 or bfloat16, as CastKernel. Other types: throws std::invalid_argument.
std::size_t cast(const Kernels& kernels, DType dtype, const float* values, std::size_t count,
                 std::uint16_t* rounded, std::size_t num_threads);

// Encode values, and return the number of non-finite values. If `finds_scales`, write the largest
// magnitude of each block to `scales`; if not, use the scales that `scales` contains.
template <class Table>
std::size_t encode(const Kernels& kernels, const Table& table, Blocks blocks, const float* values,
                   float* scales, bool finds_scales, std::uint8_t* codes, std::size_t num_threads);

// Decode codes: overwrite `values`, or add to `values` if `adds`.
template <class Table>
void decode(const Kernels& kernels, const Table& table, Blocks blocks, const std::uint8_t* codes,
            const float* scales, float* values, bool adds, std::size_t num_threads);

}  // namespace paceline

// Kernels on many values: blocks of them, which several threads share out.

#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.hpp"

namespace paceline {

// Values that are encoded in blocks. All but the last have a whole number of bytes.
struct Blocks {
    std::size_t count;
    std::size_t block_size;

    std::size_t num() const { return (count + block_size - 1) / block_size; }
};

// Fewer values are encoded before a second thread has begun.
constexpr std::size_t worth_a_thread = std::size_t{1} << 18;

// Round values to float16 or bfloat16; see CastKernel. Throws std::invalid_argument for another
// type.
std::size_t cast(const Kernels& kernels, DType dtype, const float* values, std::size_t count,
                 std::uint16_t* rounded, std::size_t num_threads);

// Return how many values are not finite. A block's scale is what stands in `scales`, or what is
// written there: its largest magnitude.
template <class Table>
std::size_t encode(const Kernels& kernels, const Table& table, Blocks blocks, const float* values,
                   float* scales, bool finds_scales, std::uint8_t* codes, std::size_t num_threads);

// Write, or add, the values of codes.
template <class Table>
void decode(const Kernels& kernels, const Table& table, Blocks blocks, const std::uint8_t* codes,
            const float* scales, float* values, bool adds, std::size_t num_threads);

}  // namespace paceline

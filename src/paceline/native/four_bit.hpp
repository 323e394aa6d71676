// Four bits a value, two values a byte, by a table of eight magnitudes; codecs/four_bit.py specifies
// every bit.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "sum.hpp"

namespace paceline {

constexpr std::size_t num_four_bit_magnitudes = 8;

struct FourBitTable {
    // thresholds[i] lies between magnitudes[i] and the next. Throws std::invalid_argument unless
    // there are eight magnitudes and seven thresholds, which ascend from above zero.
    FourBitTable(const std::vector<float>& magnitudes, const std::vector<float>& thresholds);

    std::array<float, num_four_bit_magnitudes> magnitudes;
    std::array<std::uint32_t, num_four_bit_magnitudes - 1> thresholds;  // their bits
};

// Kernels for the values of one block. Values 2i and 2i + 1 are in the lower and the upper half of
// byte i; the upper half that an odd number of values leaves over is zero.
struct FourBitKernels {
    void (*encode)(const FourBitTable& table, const float* values, float scale, std::size_t count,
                   std::uint8_t* codes);
    void (*decode)(const FourBitTable& table, const std::uint8_t* codes, float scale,
                   std::size_t count, float* values);
    // Add what `decode` gives to `total`.
    void (*add)(const FourBitTable& table, const std::uint8_t* codes, float scale,
                std::size_t count, float* total);
};

struct Blocks;

// Return how many values are not finite; write each block's largest finite magnitude to `scales`.
// A block has an even number of values, but for the last one. Throws std::invalid_argument if this
// processor does not have the instruction set.
std::size_t encode_four_bit(InstructionSet set, const FourBitTable& table, Blocks blocks,
                            const float* values, float* scales, std::uint8_t* codes,
                            std::size_t num_threads);
void decode_four_bit(InstructionSet set, const FourBitTable& table, Blocks blocks,
                     const std::uint8_t* codes, const float* scales, float* values, bool adds,
                     std::size_t num_threads);

}  // namespace paceline

// Eight bits a value by a table of 128 magnitudes; codecs/blockwise.py specifies every bit.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "sum.hpp"

namespace paceline {

constexpr std::size_t num_magnitudes = 128;

// A table, prepared for finding the nearest magnitude with one load and one comparison: the upper
// 16 bits of a float32 choose an entry, and no more than one threshold has the same upper bits.
struct Codebook {
    // Magnitudes and thresholds ascend; thresholds[i] lies between magnitudes[i] and the next.
    // Throws std::invalid_argument if they do not, or if two thresholds share their upper bits.
    Codebook(const std::vector<float>& magnitudes, const std::vector<float>& thresholds);

    std::uint32_t first, last;  // upper bits of the first and the last entry
    // How many thresholds are below, and the lower bits of the one in its midst.
    std::vector<std::uint32_t> entries;
    std::array<float, num_magnitudes> magnitudes;
    // The bits of the thresholds as a search tree, level by level: 1, 2, 4 ... 64 of them. Where
    // there are fewer thresholds, the last places hold what no float reaches.
    std::array<std::uint32_t, num_magnitudes> tree;
};

struct CodecKernels {
    // Return the largest finite magnitude; add to `num_nonfinite` how many are not finite.
    float (*absmax)(const float* values, std::size_t count, std::size_t& num_nonfinite);
    void (*encode)(const Codebook& book, const float* values, float scale, std::size_t count,
                   std::uint8_t* codes);
    void (*decode)(const Codebook& book, const std::uint8_t* codes, float scale, std::size_t count,
                   float* values);
    // Add what `decode` gives to `total`.
    void (*add)(const Codebook& book, const std::uint8_t* codes, float scale, std::size_t count,
                float* total);
};

// The kernels for an instruction set, or nullptr if this processor or build does not have it.
const CodecKernels* codec_kernels_of(InstructionSet set);

struct Blocks;

// Return how many values are not finite. A block's scale is what stands in `scales`, or what is
// written there: its largest magnitude.
std::size_t encode(const CodecKernels& kernels, const Codebook& book, Blocks blocks,
                   const float* values, float* scales, bool finds_scales, std::uint8_t* codes,
                   std::size_t num_threads);
void decode(const CodecKernels& kernels, const Codebook& book, Blocks blocks,
            const std::uint8_t* codes, const float* scales, float* values, bool adds,
            std::size_t num_threads);

}  // namespace paceline

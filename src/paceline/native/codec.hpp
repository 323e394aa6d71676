// Float32 rounded to 16-bit types, and codes of eight and of four bits by tables of magnitudes.
// codecs/codec.py and codecs/quantization.py specify every bit.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace paceline {

// Round values to nearest even; write zero for those that are not finite in the type, and return
// how many they are.
using CastKernel = std::size_t (*)(const float* values, std::size_t count, std::uint16_t* rounded);

// Return the largest finite magnitude; add to `num_nonfinite` how many are not finite.
using AbsmaxKernel = float (*)(const float* values, std::size_t count, std::size_t& num_nonfinite);

constexpr std::size_t num_magnitudes = 128;
constexpr std::size_t num_four_bit_magnitudes = 8;

// A table of eight bits, prepared for finding the nearest magnitude with one load and one
// comparison: the upper 16 bits of a float32 choose an entry, and no more than one threshold has
// the same upper bits.
struct Codebook {
    static constexpr std::size_t values_per_byte = 1;

    // Magnitudes and thresholds ascend; thresholds[i] lies between magnitudes[i] and the next.
    // Throws std::invalid_argument if they do not, or if two thresholds share their upper bits.
    Codebook(const std::vector<float>& magnitudes, const std::vector<float>& thresholds);

    std::uint32_t first, last;  // upper bits of the first and the last entry
    // How many thresholds are below, and the lower bits of the one in its midst.
    std::vector<std::uint32_t> entries;
    std::array<float, 2 * num_magnitudes> values;  // of all codes, the negative ones last
    // The bits of the thresholds as a search tree, level by level: 1, 2, 4 ... 64 of them. Where
    // there are fewer thresholds, the last places hold what no float reaches.
    std::array<std::uint32_t, num_magnitudes> tree;
};

// A table of four bits. Values 2i and 2i + 1 are in the lower and the upper half of byte i; the
// upper half that an odd number of values leaves over is zero.
struct FourBitTable {
    static constexpr std::size_t values_per_byte = 2;

    // As for a Codebook, of eight magnitudes.
    FourBitTable(const std::vector<float>& magnitudes, const std::vector<float>& thresholds);

    std::array<float, num_four_bit_magnitudes> magnitudes;
    std::array<std::int32_t, num_four_bit_magnitudes - 1> thresholds;  // their bits
};

// Kernels for the values of one block.
template <class Table>
struct CodecKernels {
    void (*encode)(const Table& table, const float* values, float scale, std::size_t count,
                   std::uint8_t* codes);
    void (*decode)(const Table& table, const std::uint8_t* codes, float scale, std::size_t count,
                   float* values);
    // Add what `decode` gives to `total`.
    void (*add)(const Table& table, const std::uint8_t* codes, float scale, std::size_t count,
                float* total);
};

}  // namespace paceline

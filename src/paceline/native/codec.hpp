// Rounding of float32 to 16-bit types, and 8-bit and 4-bit codes by tables of magnitudes.
// codecs/codec.py and codecs/quantization.py specify every bit of the results.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace paceline {

// Round values to nearest even. Write zero for values that are not finite after rounding, and
// return the number of such values.
using CastKernel = std::size_t (*)(const float* values, std::size_t count, std::uint16_t* rounded);

// Return the largest finite magnitude; add the number of non-finite values to `num_nonfinite`.
using AbsmaxKernel = float (*)(const float* values, std::size_t count, std::size_t& num_nonfinite);

constexpr std::size_t num_magnitudes = 128;
constexpr std::size_t num_four_bit_magnitudes = 8;

// The table of an 8-bit type, in which one load and one comparison find the nearest magnitude. The
// upper 16 bits of a float32 select an entry; at most one threshold has the same upper 16 bits.
struct Codebook {
    static constexpr std::size_t values_per_byte = 1;

    // Magnitudes and thresholds must ascend; thresholds[i] is between magnitudes[i] and
    // magnitudes[i + 1]. Throws std::invalid_argument for thresholds that do not ascend, or that
    // have the same upper 16 bits.
    Codebook(const std::vector<float>& magnitudes, const std::vector<float>& thresholds);

    std::uint32_t first, last;  // upper 16 bits of the first and the last entry
    // Upper 16 bits: number of thresholds in earlier entries. Lower 16: the entry's, or 0xffff.
    std::vector<std::uint32_t> entries;
    std::array<float, 2 * num_magnitudes> values;  // values of all codes, negative values last
    // Bits of the thresholds as a search tree, level by level: 1, 2, 4, ..., 64 thresholds. Missing
    // thresholds are 0x7fffffff, which is larger than any quotient.
    std::array<std::uint32_t, num_magnitudes> tree;
};

// The table of a 4-bit type. The codes of values 2i and 2i + 1 are in the lower and upper half of
// byte i. For an odd number of values, the upper half of the last byte is zero.
struct FourBitTable {
    static constexpr std::size_t values_per_byte = 2;

    // The same requirements as for a Codebook, with eight magnitudes and seven thresholds.
    FourBitTable(const std::vector<float>& magnitudes, const std::vector<float>& thresholds);

    std::array<float, num_four_bit_magnitudes> magnitudes;
    std::array<std::int32_t, num_four_bit_magnitudes - 1> thresholds;  // as bits
};

// Kernels for the values of one block.
template <class Table>
struct CodecKernels {
    void (*encode)(const Table& table, const float* values, float scale, std::size_t count,
                   std::uint8_t* codes);
    void (*decode)(const Table& table, const std::uint8_t* codes, float scale, std::size_t count,
                   float* values);
    // Add the values that `decode` would write to `total`.
    void (*add)(const Table& table, const std::uint8_t* codes, float scale, std::size_t count,
                float* total);
};

}  // namespace paceline

// One byte at a time: the portable 4-bit kernels, and the ends that vectors leave over.

#pragma once

#include <cstring>

#include "four_bit.hpp"
#include "float_bits.hpp"

namespace paceline {
namespace {

constexpr std::uint32_t sign_bit = 0x80000000u;
constexpr std::uint32_t infinity_bits = 0x7f800000u;

// The code of a value: how many thresholds its quotient is above, and 8 if it is negative.
std::uint32_t code_of(const FourBitTable& table, float value, float scale) {
    const std::uint32_t all = bits_of(value);
    const std::uint32_t magnitude = all & ~sign_bit;
    if (magnitude >= infinity_bits) return 0;
    const std::uint32_t quotient = bits_of(float_of(magnitude) / scale);
    std::uint32_t index = 0;
    for (const std::uint32_t threshold : table.thresholds) index += quotient > threshold;
    return index > 0 ? index | (all >> 31) << 3 : 0u;
}

void encode_plain(const FourBitTable& table, const float* values, float scale, std::size_t count,
                  std::uint8_t* codes) {
    if (!(scale > 0)) {
        std::memset(codes, 0, (count + 1) / 2);
        return;
    }
    for (std::size_t i = 0; i < count; i += 2) {
        const std::uint32_t next = i + 1 < count ? code_of(table, values[i + 1], scale) : 0u;
        codes[i / 2] = static_cast<std::uint8_t>(code_of(table, values[i], scale) | next << 4);
    }
}

// The values of the sixteen codes of a block.
struct Meanings {
    float of[2 * num_four_bit_magnitudes];

    Meanings(const FourBitTable& table, float scale) {
        for (std::size_t i = 0; i < num_four_bit_magnitudes; ++i) {
            of[i] = table.magnitudes[i] * scale;
            of[num_four_bit_magnitudes + i] = -table.magnitudes[i] * scale;
        }
    }
};

void decode_plain(const FourBitTable& table, const std::uint8_t* codes, float scale,
                  std::size_t count, float* values) {
    const Meanings meanings(table, scale);
    for (std::size_t i = 0; i < count; ++i) {
        values[i] = meanings.of[codes[i / 2] >> i % 2 * 4 & 15u];
    }
}

void add_plain(const FourBitTable& table, const std::uint8_t* codes, float scale,
               std::size_t count, float* total) {
    const Meanings meanings(table, scale);
    for (std::size_t i = 0; i < count; ++i) {
        total[i] += meanings.of[codes[i / 2] >> i % 2 * 4 & 15u];
    }
}

}  // namespace
}  // namespace paceline

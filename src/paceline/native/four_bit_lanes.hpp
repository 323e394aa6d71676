// Kernels of 4-bit codes, two codes per byte, for vectors of any width.

#pragma once

#include "codec_lanes.hpp"

namespace paceline {
namespace {
namespace lanes {

void encode(const FourBitTable& table, const float* values, float scale, std::size_t count,
            std::uint8_t* codes) {
    if (!(scale > 0)) {
        std::memset(codes, 0, (count + 1) / 2);
        return;
    }
    Integers at[num_four_bit_magnitudes - 1];
    for (std::size_t i = 0; i < num_four_bit_magnitudes - 1; ++i) {
        at[i] = Integers{} + table.thresholds[i];
    }
    for_vectors<width>(count, [&](std::size_t i, auto n) {
        const auto all = load<Integers>(values + i, n);
        const Integers quotient = quotients(all, scale);
        // Count the thresholds below the quotient by bisection; add the sign to a nonzero code.
        const Integers bit2 = quotient > at[3];
        const Integers bit1 = quotient > (bit2 ? at[5] : at[1]);
        const Integers bit0 = quotient > (bit1 ? (bit2 ? at[6] : at[2]) : (bit2 ? at[4] : at[0]));
        Integers code = as<Integers>(as<Words>(all) >> 28 & 8u) & (quotient > at[0]);
        code |= (bit2 & 4) | (bit1 & 2) | (bit0 & 1);
        // Move the second code of each pair to the four bits above the first code.
        const auto pairs = as<Pairs>(code);
        store(codes + i / 2, (n + 1) / 2, bytes_of(pairs | pairs >> 28));
    });
}

// The values of the sixteen codes, for the scale of a block.
struct Meanings {
    float of[2 * num_four_bit_magnitudes];

    Meanings(const FourBitTable& table, float scale) {
        for (std::size_t i = 0; i < num_four_bit_magnitudes; ++i) {
            of[i] = table.magnitudes[i] * scale;
            of[num_four_bit_magnitudes + i] = -table.magnitudes[i] * scale;
        }
    }

    // Return the value of each code; a code is in the lowest four bits of its element.
    Floats at(Integers codes) const {
#if defined(__AVX512F__)
        return as<Floats>(_mm512_permutexvar_ps(as<__m512i>(codes), _mm512_loadu_ps(of)));
#elif defined(__AVX2__)
        const __m256 magnitude = _mm256_permutevar8x32_ps(_mm256_loadu_ps(of), as<__m256i>(codes));
        return as<Floats>(as<Integers>(magnitude) ^ (codes << 28 & ~no_sign));
#else
        const Integers places = codes & 15;
        Floats found;
        for (std::size_t i = 0; i < width; ++i) found[i] = of[places[i]];
        return found;
#endif
    }
};

template <bool adds>
void decode(const FourBitTable& table, const std::uint8_t* codes, float scale, std::size_t count,
            float* values) {
    const Meanings meanings(table, scale);
    for_vectors<width>(count, [&](std::size_t i, auto n) {
        const Floats value = meanings.at(four_bits(load<PairBytes>(codes + i / 2, (n + 1) / 2)));
        store(values + i, n, adds ? load<Floats>(values + i, n) + value : value);
    });
}

}  // namespace lanes
}  // namespace
}  // namespace paceline

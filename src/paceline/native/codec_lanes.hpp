// Kernels of 8-bit codes for vectors of any width, and functions that 4-bit codes also use.

#pragma once

#include "codec.hpp"
#include "formats.hpp"

namespace paceline {
namespace {
namespace lanes {

// Return the bits of the largest magnitude. `only_finite`: skip and count non-finite values.
template <bool only_finite>
std::int32_t largest_of(const float* values, std::size_t count, std::size_t& num_nonfinite) {
    Integers largest{}, counts{};
    for_vectors<width>(count, [&](std::size_t i, auto n) {
        Integers magnitude = load<Integers>(values + i, n) & no_sign;
        if constexpr (only_finite) {
            const Integers is_lost = magnitude > largest_finite;
            counts -= is_lost;
            magnitude &= ~is_lost;
        }
        largest = magnitude > largest ? magnitude : largest;
    });
    num_nonfinite += total(counts);
    std::int32_t most = 0;
    for (std::size_t i = 0; i < width; ++i) most = largest[i] > most ? largest[i] : most;
    return most;
}

inline float absmax(const float* values, std::size_t count, std::size_t& num_nonfinite) {
    const std::int32_t most = largest_of<false>(values, count, num_nonfinite);
    // Read the block a second time only if it has a non-finite value, which is rare.
    return as<float>(most <= largest_finite ? most
                                            : largest_of<true>(values, count, num_nonfinite));
}

// Return the bits of magnitude / scale as integers, which have the same order as the quotients;
// zero for non-finite values.
Integers quotients(Integers values, float scale) {
    const Integers magnitude = values & no_sign;
    return as<Integers>(as<Floats>(magnitude) / scale) & ~(magnitude > largest_finite);
}

// Set bit `place` of nonzero indices to the sign of the value.
Integers with_sign(Integers indices, Integers values, int place) {
    const auto sign = as<Integers>(as<Words>(values) >> 31 << place);
    return indices == 0 ? indices : indices | sign;
}

// Load the elements of a table at indices `places`. The empty asm statement prevents a gather
// instruction, which is slower than single loads on most processors.
template <std::size_t count>
void look_up(const std::uint32_t* table, const std::uint32_t* places, std::uint32_t* found) {
    for (std::size_t i = 0; i < count; i += 4) {
        for (std::size_t j = i; j < i + 4; ++j) {
            std::uint32_t one = table[places[j]];
            asm("" : "+r"(one));
            found[j] = one;
        }
    }
}

void encode(const Codebook& book, const float* values, float scale, std::size_t count,
            std::uint8_t* codes) {
    if (!(scale > 0)) {
        std::memset(codes, 0, count);
        return;
    }
    constexpr std::size_t num_together = 64;
    alignas(vector_nbytes) std::uint32_t bits[num_together], places[num_together] = {},
        entries[num_together];
    const auto first = static_cast<std::int32_t>(book.first);
    const Integers last = static_cast<std::int32_t>(book.last - book.first) + Integers{};
    for_vectors<num_together>(count, [&](std::size_t begin, auto size) {
        for_vectors<width>(size, [&](std::size_t i, auto n) {
            const Integers quotient = quotients(load<Integers>(values + begin + i, n), scale);
            const Integers place = (quotient >> 16) - first, above = place > 0 ? place : Integers{};
            store(bits + i, Whole<width>{}, quotient);
            store(places + i, Whole<width>{}, above < last ? above : last);
        });
        look_up<num_together>(book.entries.data(), places, entries);
        for_vectors<width>(size, [&](std::size_t i, auto n) {
            const auto quotient = load<Integers>(bits + i, Whole<width>{});
            const auto entry = load<Integers>(entries + i, Whole<width>{});
            const Integers index = (entry >> 16) - ((quotient & 0xffff) > (entry & 0xffff));
            const auto all = load<Integers>(values + begin + i, n);
            store(codes + begin + i, n, bytes_of(as<Words>(with_sign(index, all, 7))));
        });
    });
}

// Decode codes: overwrite `values`, or add to `values` if `adds`.
template <bool adds>
void decode(const Codebook& book, const std::uint8_t* codes, float scale, std::size_t count,
            float* values) {
    for_vectors<width>(count, [&](std::size_t i, auto n) {
        std::uint8_t own[width] = {};
        std::memcpy(own, codes + i, n);
        Floats value;
        for (std::size_t j = 0; j < width; ++j) value[j] = book.values[own[j]];
        value *= scale;
        store(values + i, n, adds ? load<Floats>(values + i, n) + value : value);
    });
}

}  // namespace lanes
}  // namespace
}  // namespace paceline

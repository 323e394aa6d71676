// One value at a time: the portable kernels, and the ends that vectors leave over.

#pragma once

#include "codec.hpp"

#include <algorithm>
#include <cstring>

#include "float_bits.hpp"

namespace paceline {
namespace {

constexpr std::uint32_t sign_bit = 0x80000000u;
constexpr std::uint32_t infinity_bits = 0x7f800000u;
constexpr std::uint32_t lower_half = 0xffffu;

float absmax_plain(const float* values, std::size_t count, std::size_t& num_nonfinite) {
    std::uint32_t largest = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t magnitude = bits_of(values[i]) & ~sign_bit;
        const bool finite = magnitude < infinity_bits;
        num_nonfinite += !finite;
        largest = std::max(largest, finite ? magnitude : 0u);
    }
    return float_of(largest);
}

std::uint8_t encode_one(const Codebook& book, float value, float scale) {
    const std::uint32_t all = bits_of(value);
    const std::uint32_t magnitude = all & ~sign_bit;
    const bool counts = magnitude < infinity_bits && scale > 0;
    const std::uint32_t quotient = counts ? bits_of(float_of(magnitude) / scale) : 0u;
    const std::uint32_t place = std::clamp(quotient >> 16, book.first, book.last) - book.first;
    const std::uint32_t entry = book.entries[place];
    const std::uint32_t index = (entry >> 16) + ((quotient & lower_half) > (entry & lower_half));
    const std::uint32_t sign = index > 0 ? all >> 31 : 0u;
    return static_cast<std::uint8_t>(sign << 7 | index);
}

void encode_plain(const Codebook& book, const float* values, float scale, std::size_t count,
                  std::uint8_t* codes) {
    for (std::size_t i = 0; i < count; ++i) codes[i] = encode_one(book, values[i], scale);
}

float decode_one(const Codebook& book, std::uint8_t code, float scale) {
    const float magnitude = book.magnitudes[code % num_magnitudes];
    return (code < num_magnitudes ? magnitude : -magnitude) * scale;
}

void decode_plain(const Codebook& book, const std::uint8_t* codes, float scale, std::size_t count,
                  float* values) {
    for (std::size_t i = 0; i < count; ++i) values[i] = decode_one(book, codes[i], scale);
}

void add_plain(const Codebook& book, const std::uint8_t* codes, float scale, std::size_t count,
               float* total) {
    for (std::size_t i = 0; i < count; ++i) total[i] += decode_one(book, codes[i], scale);
}

}  // namespace
}  // namespace paceline

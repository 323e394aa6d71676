// One value at a time: the portable casts, and the ends that vectors leave over.

#pragma once

#include "cast.hpp"

#include "sum_lanes.hpp"

namespace paceline {
namespace {

// The bits of the smallest magnitude that rounds to infinity: everything from there on, infinities
// and NaNs too, is not finite in the type.
template <class Format>
constexpr std::uint32_t first_nonfinite = 0;
template <>
constexpr std::uint32_t first_nonfinite<Float16> = 0x477ff000u;  // 65,520
template <>
constexpr std::uint32_t first_nonfinite<BFloat16> = 0x7f7f8000u;

template <class Format>
std::size_t cast_plain(const float* values, std::size_t count, std::uint16_t* rounded) {
    std::size_t num_nonfinite = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const bool finite = (bits_of(values[i]) & 0x7fffffffu) < first_nonfinite<Format>;
        num_nonfinite += !finite;
        rounded[i] = finite ? Format::narrow(values[i]) : std::uint16_t{0};
    }
    return num_nonfinite;
}

}  // namespace
}  // namespace paceline

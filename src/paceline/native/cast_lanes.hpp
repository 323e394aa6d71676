// Casts to 16-bit types, for vectors of any width; codec.hpp describes the kernels.

#pragma once

#include "formats.hpp"

namespace paceline {
namespace {
namespace lanes {

template <class Format>
std::size_t cast(const float* values, std::size_t count, std::uint16_t* rounded) {
    Integers num_lost{};
    for_vectors<width>(count, [&](std::size_t i, auto n) {
        const auto all = load<Integers>(values + i, n);
        const Integers is_lost = (all & no_sign) > Format::largest;
        num_lost -= is_lost;
        store(rounded + i, n, Format::narrow_finite(as<Floats>(all & ~is_lost)));
    });
    return total(num_lost);
}

}  // namespace lanes
}  // namespace
}  // namespace paceline

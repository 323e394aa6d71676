// The bits of a float32, and back. With internal linkage, as all that is compiled for several
// instruction sets.

#pragma once

#include <cstdint>
#include <cstring>

namespace paceline {
namespace {

std::uint32_t bits_of(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

float float_of(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

}  // namespace
}  // namespace paceline

// Float32 rounded to 16-bit types, as codec `Cast` of codecs/codec.py specifies.

#pragma once

#include <cstddef>
#include <cstdint>

#include "sum.hpp"

namespace paceline {

// Round values to nearest even; write zero for those that are not finite in the type, and return
// how many they are.
using CastKernel = std::size_t (*)(const float* values, std::size_t count, std::uint16_t* rounded);

// Round values to float16 or bfloat16 in several threads. Throws std::invalid_argument for another
// type, or if this processor does not have the instruction set.
std::size_t cast(InstructionSet set, DType dtype, const float* values, std::size_t count,
                 std::uint16_t* rounded, std::size_t num_threads);

}  // namespace paceline

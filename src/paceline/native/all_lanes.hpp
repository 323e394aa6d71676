// All kernels, compiled for the instruction set of the file that includes this one.

#pragma once

#include "cast_lanes.hpp"
#include "dense_lanes.hpp"
#include "four_bit_lanes.hpp"
#include "kernels.hpp"
#include "sum_lanes.hpp"

namespace paceline {
namespace {

constexpr Kernels all_kernels = {
    {sum_all<Float32>, sum_all<Float64>, sum_all<BFloat16>, sum_all<Float16>},
    copy_all,
    {nullptr, nullptr, lanes::cast<BFloat16>, lanes::cast<Float16>},
    lanes::absmax,
    {lanes::encode, lanes::decode<false>, lanes::decode<true>},
    {lanes::encode, lanes::decode<false>, lanes::decode<true>},
    dense_kernels,
};

}  // namespace
}  // namespace paceline

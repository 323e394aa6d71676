// All kernels that are compiled for several instruction sets, and the choice of the set.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "codec.hpp"
#include "dense.hpp"

namespace paceline {

enum class DType : std::uint32_t { float32, float64, bfloat16, float16 };

constexpr std::size_t size_of(DType dtype) {
    constexpr std::size_t sizes[] = {4, 8, 2, 2};
    return sizes[static_cast<std::size_t>(dtype)];
}

// result[i] = (((sources[0][i] + sources[1][i]) + sources[2][i]) + ...) * scale for i < count.
//
// 16-bit values are added as float32, and the result is rounded once, to nearest even. `streaming`:
// store past the caches. Results are bit-identical in all instruction sets, except for NaNs.
using SumKernel = void (*)(const void* const* sources, std::size_t num_sources, double scale,
                           void* result, std::size_t count, bool streaming);

// Copy memory with stores that bypass the caches.
using CopyKernel = void (*)(void* target, const void* source, std::size_t nbytes);

struct Kernels {
    SumKernel sum[4];  // indexed by DType
    CopyKernel copy;
    CastKernel cast[4];  // indexed by DType; nullptr for types that do not have 16 bits
    AbsmaxKernel absmax;
    CodecKernels<Codebook> eight_bit;
    CodecKernels<FourBitTable> four_bit;
    DenseKernels dense;
};

// The instruction sets that this processor and this build have, narrowest first, with their kernels.
const std::vector<std::pair<std::string, const Kernels*>>& usable_kernels();

// The kernels for the instruction set `name`, or for the widest set of this processor if `name` is
// "fastest". Throws std::invalid_argument if this processor does not have the set.
const Kernels& kernels_named(const std::string& name);

// The fastest kernels that this processor can run.
const Kernels& fastest_kernels();

// Sum as SumKernel, always with default rounding and with denormals, so that the result does not
// depend on the calling thread's settings.
void sum(const Kernels& kernels, DType dtype, const void* const* sources, std::size_t num_sources,
         double scale, void* result, std::size_t count, bool streaming);

// Copy memory; bypass the caches if `nbytes` exceeds `cache_nbytes`.
void copy(const Kernels& kernels, void* target, const void* source, std::size_t nbytes);

// The size of a core's L2 cache in bytes; larger data should be stored past the caches.
std::size_t cache_nbytes();

}  // namespace paceline

// All kernels that are compiled for several instruction sets, and the choice between these.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

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
// 16-bit values are added as float32 and rounded once, to nearest even. `streaming` stores past the
// caches. Every instruction set gives the same bits, but for those of a NaN.
using SumKernel = void (*)(const void* const* sources, std::size_t num_sources, double scale,
                           void* result, std::size_t count, bool streaming);

// Copy past the caches.
using CopyKernel = void (*)(void* target, const void* source, std::size_t nbytes);

struct Kernels {
    SumKernel sum[4];  // by DType
    CopyKernel copy;
    CastKernel cast[4];  // by DType; nullptr for those that are not 16-bit
    AbsmaxKernel absmax;
    CodecKernels<Codebook> eight_bit;
    CodecKernels<FourBitTable> four_bit;
    DenseKernels dense;
};

enum class InstructionSet { portable, avx2, avx512 };

// The kernels for an instruction set, or nullptr if this processor or build does not have it.
const Kernels* kernels_of(InstructionSet set);

// The kernels for the set of that name, or for the widest that this processor has if the name is
// "fastest". Throws std::invalid_argument if it does not have it.
const Kernels& kernels_named(const std::string& name);

// The fastest kernels that this processor can run.
const Kernels& fastest_kernels();

// Sum with the default rounding and with denormals, whatever the calling thread has set: the bits
// must not depend on who sums.
void sum(const Kernels& kernels, DType dtype, const void* const* sources, std::size_t num_sources,
         double scale, void* result, std::size_t count, bool streaming);

// Copy; past the caches if that pays.
void copy(const Kernels& kernels, void* target, const void* source, std::size_t nbytes);

// The bytes that one core's own cache holds; what is larger is better stored past it.
std::size_t cache_nbytes();

}  // namespace paceline

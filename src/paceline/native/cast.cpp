// The choice of casts for this processor, and their threads.

#include "cast_plain.hpp"

#include <numeric>
#include <stdexcept>

#include "blocks.hpp"

namespace paceline {

#if defined(PACELINE_X86_KERNELS)
extern const CastKernel avx2_cast_float16;
extern const CastKernel avx2_cast_bfloat16;
#endif

namespace {

constexpr std::size_t values_per_call = std::size_t{1} << 13;

CastKernel kernel_for(InstructionSet set, DType dtype) {
    if (kernels_of(set) == nullptr) {
        throw std::invalid_argument("this processor has no such instruction set");
    }
    if (dtype != DType::float16 && dtype != DType::bfloat16) {
        throw std::invalid_argument("float32 is cast to float16 or bfloat16");
    }
    const bool is_float16 = dtype == DType::float16;
#if defined(PACELINE_X86_KERNELS)
    // Memory sets the pace: wider vectors would not be faster.
    if (set != InstructionSet::portable) return is_float16 ? avx2_cast_float16 : avx2_cast_bfloat16;
#endif
    return is_float16 ? cast_plain<Float16> : cast_plain<BFloat16>;
}

}  // namespace

std::size_t cast(InstructionSet set, DType dtype, const float* values, std::size_t count,
                 std::uint16_t* rounded, std::size_t num_threads) {
    const CastKernel kernel = kernel_for(set, dtype);
    std::vector<std::size_t> nonfinite(std::max<std::size_t>(1, num_threads));
    share_out({count, values_per_call}, num_threads,
              [&](std::size_t thread, std::size_t, std::size_t begin, std::size_t size) {
                  nonfinite[thread] += kernel(values + begin, size, rounded + begin);
              });
    return std::accumulate(nonfinite.begin(), nonfinite.end(), std::size_t{0});
}

}  // namespace paceline

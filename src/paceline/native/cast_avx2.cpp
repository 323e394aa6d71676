// Eight values at a time, rounded to 16-bit types.

#include <immintrin.h>

#include "cast_plain.hpp"

namespace paceline {
namespace {

constexpr std::size_t width = 8;

__m256i set(std::uint32_t value) { return _mm256_set1_epi32(static_cast<int>(value)); }

template <class Format>
struct Rounding;

template <>
struct Rounding<Float16> {
    static __m128i of(__m256i finite) {
        return _mm256_cvtps_ph(_mm256_castsi256_ps(finite), _MM_FROUND_TO_NEAREST_INT);
    }
};

template <>
struct Rounding<BFloat16> {
    static __m128i of(__m256i finite) {
        const __m256i is_odd = _mm256_and_si256(_mm256_srli_epi32(finite, 16), set(1));
        const __m256i up = _mm256_add_epi32(_mm256_add_epi32(finite, set(0x7fff)), is_odd);
        const __m256i upper = _mm256_srli_epi32(up, 16);
        const __m256i packed = _mm256_packus_epi32(upper, upper);  // each half twice
        return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0b1000));
    }
};

template <class Format>
std::size_t cast_all(const float* values, std::size_t count, std::uint16_t* rounded) {
    std::size_t num_nonfinite = 0, i = 0;
    for (; i + width <= count; i += width) {
        const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + i));
        const __m256i magnitude = _mm256_and_si256(all, set(0x7fffffffu));
        const __m256i finite = _mm256_cmpgt_epi32(set(first_nonfinite<Format>), magnitude);
        const int mask = _mm256_movemask_ps(_mm256_castsi256_ps(finite));
        num_nonfinite += width - static_cast<std::size_t>(_mm_popcnt_u32(mask));
        const __m128i found = Rounding<Format>::of(_mm256_and_si256(all, finite));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(rounded + i), found);
    }
    return num_nonfinite + cast_plain<Format>(values + i, count - i, rounded + i);
}

}  // namespace

extern const CastKernel avx2_cast_float16;
extern const CastKernel avx2_cast_bfloat16;
const CastKernel avx2_cast_float16 = cast_all<Float16>;
const CastKernel avx2_cast_bfloat16 = cast_all<BFloat16>;

}  // namespace paceline

// Sums with AVX2 and F16C; compiled for these.

#include <immintrin.h>

#include "sum_lanes.hpp"

namespace paceline {
namespace {

struct FloatLanes {
    using Vector = __m256;
    static constexpr std::size_t width = 8;
    static Vector broadcast(double value) { return _mm256_set1_ps(static_cast<float>(value)); }
    static Vector add(Vector left, Vector right) { return _mm256_add_ps(left, right); }
    static Vector multiply(Vector left, Vector right) { return _mm256_mul_ps(left, right); }
    static void fence() { _mm_sfence(); }
};

struct Float32Lanes : FloatLanes {
    using Element = float;
    static Vector load(const float* from) { return _mm256_loadu_ps(from); }
    static void store(float* to, Vector vector) { _mm256_storeu_ps(to, vector); }
    static void stream(float* to, Vector vector) { _mm256_stream_ps(to, vector); }
};

struct Float64Lanes {
    using Element = double;
    using Vector = __m256d;
    static constexpr std::size_t width = 4;
    static Vector broadcast(double value) { return _mm256_set1_pd(value); }
    static Vector load(const double* from) { return _mm256_loadu_pd(from); }
    static Vector add(Vector left, Vector right) { return _mm256_add_pd(left, right); }
    static Vector multiply(Vector left, Vector right) { return _mm256_mul_pd(left, right); }
    static void store(double* to, Vector vector) { _mm256_storeu_pd(to, vector); }
    static void stream(double* to, Vector vector) { _mm256_stream_pd(to, vector); }
    static void fence() { _mm_sfence(); }
};

struct HalfLanes : FloatLanes {
    using Element = std::uint16_t;
    static __m128i load_bits(const Element* from) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    }
    static void store_bits(Element* to, __m128i bits) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bits);
    }
    static void stream_bits(Element* to, __m128i bits) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(to), bits);
    }
};

struct BFloat16Lanes : HalfLanes {
    static Vector load(const Element* from) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_bits(from)), 16));
    }
    // As BFloat16::narrow in sum_lanes.hpp.
    static __m128i narrow(Vector vector) {
        const __m256i bits = _mm256_castps_si256(vector);
        const __m256i upper = _mm256_srli_epi32(bits, 16);
        const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
        const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
        const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
        const __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
        const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(vector, vector, _CMP_UNORD_Q));
        const __m256i chosen = _mm256_blendv_epi8(rounded, quiet, is_nan);
        return _mm_packus_epi32(_mm256_castsi256_si128(chosen),
                                _mm256_extracti128_si256(chosen, 1));
    }
    static void store(Element* to, Vector vector) { store_bits(to, narrow(vector)); }
    static void stream(Element* to, Vector vector) { stream_bits(to, narrow(vector)); }
};

struct Float16Lanes : HalfLanes {
    static Vector load(const Element* from) { return _mm256_cvtph_ps(load_bits(from)); }
    static __m128i narrow(Vector vector) {
        return _mm256_cvtps_ph(vector, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    }
    static void store(Element* to, Vector vector) { store_bits(to, narrow(vector)); }
    static void stream(Element* to, Vector vector) { stream_bits(to, narrow(vector)); }
};

}  // namespace

extern const Kernels avx2_kernels;
const Kernels avx2_kernels = {
    {&sum_all<Float32Lanes, PlainLanes<Plain<float>, 1>>,
     &sum_all<Float64Lanes, PlainLanes<Plain<double>, 1>>,
     &sum_all<BFloat16Lanes, PlainLanes<BFloat16, 1>>,
     &sum_all<Float16Lanes, PlainLanes<Float16, 1>>},
    &copy_streaming<Float64Lanes>,
};

}  // namespace paceline

// Sums with AVX-512F; compiled for it.

#include <immintrin.h>

#include "sum_lanes.hpp"

namespace paceline {
namespace {

struct FloatLanes {
    using Vector = __m512;
    static constexpr std::size_t width = 16;
    static Vector broadcast(double value) { return _mm512_set1_ps(static_cast<float>(value)); }
    static Vector add(Vector left, Vector right) { return _mm512_add_ps(left, right); }
    static Vector multiply(Vector left, Vector right) { return _mm512_mul_ps(left, right); }
    static void fence() { _mm_sfence(); }
};

struct Float32Lanes : FloatLanes {
    using Element = float;
    static Vector load(const float* from) { return _mm512_loadu_ps(from); }
    static void store(float* to, Vector vector) { _mm512_storeu_ps(to, vector); }
    static void stream(float* to, Vector vector) { _mm512_stream_ps(to, vector); }
};

struct Float64Lanes {
    using Element = double;
    using Vector = __m512d;
    static constexpr std::size_t width = 8;
    static Vector broadcast(double value) { return _mm512_set1_pd(value); }
    static Vector load(const double* from) { return _mm512_loadu_pd(from); }
    static Vector add(Vector left, Vector right) { return _mm512_add_pd(left, right); }
    static Vector multiply(Vector left, Vector right) { return _mm512_mul_pd(left, right); }
    static void store(double* to, Vector vector) { _mm512_storeu_pd(to, vector); }
    static void stream(double* to, Vector vector) { _mm512_stream_pd(to, vector); }
    static void fence() { _mm_sfence(); }
};

struct HalfLanes : FloatLanes {
    using Element = std::uint16_t;
    static __m256i load_bits(const Element* from) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    }
    static void store_bits(Element* to, __m256i bits) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bits);
    }
    static void stream_bits(Element* to, __m256i bits) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to), bits);
    }
};

struct BFloat16Lanes : HalfLanes {
    static Vector load(const Element* from) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_bits(from)), 16));
    }
    // As BFloat16::narrow in sum_lanes.hpp. The processor's own conversion drops denormals.
    static __m256i narrow(Vector vector) {
        const __m512i bits = _mm512_castps_si512(vector);
        const __m512i upper = _mm512_srli_epi32(bits, 16);
        const __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
        const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
        const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
        const __m512i quiet = _mm512_or_si512(upper, _mm512_set1_epi32(0x40));
        const __mmask16 is_nan = _mm512_cmp_ps_mask(vector, vector, _CMP_UNORD_Q);
        return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, is_nan, quiet));
    }
    static void store(Element* to, Vector vector) { store_bits(to, narrow(vector)); }
    static void stream(Element* to, Vector vector) { stream_bits(to, narrow(vector)); }
};

struct Float16Lanes : HalfLanes {
    static Vector load(const Element* from) { return _mm512_cvtph_ps(load_bits(from)); }
    static __m256i narrow(Vector vector) {
        return _mm512_cvtps_ph(vector, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    }
    static void store(Element* to, Vector vector) { store_bits(to, narrow(vector)); }
    static void stream(Element* to, Vector vector) { stream_bits(to, narrow(vector)); }
};

}  // namespace

extern const Kernels avx512_kernels;
const Kernels avx512_kernels = {
    {&sum_all<Float32Lanes, PlainLanes<Plain<float>, 1>>,
     &sum_all<Float64Lanes, PlainLanes<Plain<double>, 1>>,
     &sum_all<BFloat16Lanes, PlainLanes<BFloat16, 1>>,
     &sum_all<Float16Lanes, PlainLanes<Float16, 1>>},
    &copy_streaming<Float64Lanes>,
};

}  // namespace paceline

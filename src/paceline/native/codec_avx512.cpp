// 8-bit codes with AVX-512: encode and decode sixteen values at a time.

#include <immintrin.h>

#include "codec_lanes.hpp"

namespace paceline {
namespace {


// The thresholds in registers. Searching them is faster than a gather instruction, which many
// processors execute as single loads.
struct Thresholds {
    __m512i level[5], five[2], six[4];

    explicit Thresholds(const Codebook& book) {
        const std::uint32_t* tree = book.tree.data();
        for (int i = 0; i < 5; ++i) level[i] = _mm512_loadu_si512(tree + (1 << i) - 1);
        for (int i = 0; i < 2; ++i) five[i] = _mm512_loadu_si512(tree + 31 + i * width);
        for (int i = 0; i < 4; ++i) six[i] = _mm512_loadu_si512(tree + 63 + i * width);
    }

    // Return the number of thresholds below each value; determine its bits from the highest on.
    __m512i below(__m512i values) const {
        __m512i found = _mm512_setzero_si512();
        for (int i = 0; i < 5; ++i) {
            found = next(found, values, _mm512_permutexvar_epi32(found, level[i]));
        }
        found = next(found, values, _mm512_permutex2var_epi32(five[0], found, five[1]));
        const __mmask16 bit5 = _mm512_test_epi32_mask(found, _mm512_set1_epi32(32));
        const __m512i low = _mm512_permutex2var_epi32(six[0], found, six[1]);
        const __m512i high = _mm512_permutex2var_epi32(six[2], found, six[3]);
        return next(found, values, _mm512_mask_blend_epi32(bit5, low, high));
    }

    // Append one bit to `found`: the sign of thresholds - values.
    static __m512i next(__m512i found, __m512i values, __m512i thresholds) {
        return _mm512_shldi_epi32(found, _mm512_sub_epi32(thresholds, values), 1);
    }
};

void encode(const Codebook& book, const float* values, float scale, std::size_t count,
            std::uint8_t* codes) {
    if (!(scale > 0)) {
        std::memset(codes, 0, count);
        return;
    }
    const Thresholds thresholds(book);
    const __m512i largest = _mm512_set1_epi32(largest_finite);
    const __m512i without_sign = _mm512_set1_epi32(no_sign);
    const __m512i sign = _mm512_set1_epi32(~no_sign);
    const __m512i negative = _mm512_set1_epi32(num_magnitudes);
    const __m512 divisor = _mm512_set1_ps(scale);
    std::size_t i = 0;
    for (; i + width <= count; i += width) {
        const __m512i all = _mm512_loadu_si512(values + i);
        const __m512i magnitude = _mm512_and_si512(all, without_sign);
        const __mmask16 finite = _mm512_cmple_epi32_mask(magnitude, largest);
        const __m512 quotient = _mm512_maskz_div_ps(finite, _mm512_castsi512_ps(magnitude), divisor);
        const __m512i index = thresholds.below(_mm512_castps_si512(quotient));
        const __mmask16 nonzero = _mm512_test_epi32_mask(index, index);
        const __mmask16 signs = _mm512_mask_test_epi32_mask(nonzero, all, sign);
        const __m512i code = _mm512_mask_or_epi32(index, signs, index, negative);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), _mm512_cvtepi32_epi8(code));
    }
    lanes::encode(book, values + i, scale, count - i, codes + i);
}

// The magnitudes in registers: four pairs of registers; bits 5 and 6 of a code select a pair.
struct Magnitudes {
    __m512 pair[4][2];

    explicit Magnitudes(const Codebook& book) {
        for (int i = 0; i < 8; ++i) {
            pair[i / 2][i % 2] = _mm512_loadu_ps(book.values.data() + i * width);
        }
    }

    __m512 of(const std::uint8_t* codes) const {
        const __m512i code =
            _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
        const __mmask16 bit5 = _mm512_test_epi32_mask(code, _mm512_set1_epi32(32));
        const __mmask16 bit6 = _mm512_test_epi32_mask(code, _mm512_set1_epi32(64));
        __m512 found[4];
        for (int i = 0; i < 4; ++i) {
            found[i] = _mm512_permutex2var_ps(pair[i][0], code, pair[i][1]);
        }
        const __m512 small = _mm512_mask_blend_ps(bit5, found[0], found[1]);
        const __m512 large = _mm512_mask_blend_ps(bit5, found[2], found[3]);
        const __m512i magnitude = _mm512_castps_si512(_mm512_mask_blend_ps(bit6, small, large));
        const __m512i sign = _mm512_slli_epi32(_mm512_srli_epi32(code, 7), 31);
        return _mm512_castsi512_ps(_mm512_or_si512(magnitude, sign));
    }
};

// Write, or add, the values of codes.
template <bool adds>
void decode(const Codebook& book, const std::uint8_t* codes, float scale, std::size_t count,
            float* values) {
    const Magnitudes magnitudes(book);
    const __m512 factor = _mm512_set1_ps(scale);
    std::size_t i = 0;
    for (; i + width <= count; i += width) {
        __m512 value = _mm512_mul_ps(magnitudes.of(codes + i), factor);
        if constexpr (adds) value = _mm512_add_ps(_mm512_loadu_ps(values + i), value);
        _mm512_storeu_ps(values + i, value);
    }
    lanes::decode<adds>(book, codes + i, scale, count - i, values + i);
}

}  // namespace

extern const CodecKernels<Codebook> avx512_codec_kernels;
const CodecKernels<Codebook> avx512_codec_kernels = {encode, decode<false>, decode<true>};

}  // namespace paceline

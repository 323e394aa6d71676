// 4-bit codes of sixteen values at a time.

#include <immintrin.h>

#include "four_bit_plain.hpp"

namespace paceline {
namespace {

constexpr std::size_t width = 16;

__m512i set(std::uint32_t value) { return _mm512_set1_epi32(static_cast<int>(value)); }

// The codes of sixteen quotients, by bisection. Their bits, as integers, ascend as they do.
struct Thresholds {
    __m512i at[num_four_bit_magnitudes - 1];

    explicit Thresholds(const FourBitTable& table) {
        for (std::size_t i = 0; i < table.thresholds.size(); ++i) at[i] = set(table.thresholds[i]);
    }

    __m512i codes(__m512i quotients, __mmask16 negative) const {
        const __mmask16 bit2 = _mm512_cmpgt_epi32_mask(quotients, at[3]);
        const __m512i quarter = _mm512_mask_blend_epi32(bit2, at[1], at[5]);
        const __mmask16 bit1 = _mm512_cmpgt_epi32_mask(quotients, quarter);
        const __m512i low = _mm512_mask_blend_epi32(bit2, at[0], at[4]);
        const __m512i high = _mm512_mask_blend_epi32(bit2, at[2], at[6]);
        const __mmask16 bit0 =
            _mm512_cmpgt_epi32_mask(quotients, _mm512_mask_blend_epi32(bit1, low, high));
        const __mmask16 sign = negative & (bit2 | bit1 | bit0);
        __m512i found = _mm512_maskz_mov_epi32(bit2, set(4));
        found = _mm512_mask_or_epi32(found, bit1, found, set(2));
        found = _mm512_mask_or_epi32(found, bit0, found, set(1));
        return _mm512_mask_or_epi32(found, sign, found, set(8));
    }
};

void encode(const FourBitTable& table, const float* values, float scale, std::size_t count,
            std::uint8_t* codes) {
    if (!(scale > 0)) {
        std::memset(codes, 0, (count + 1) / 2);
        return;
    }
    const Thresholds thresholds(table);
    const __m512 divisor = _mm512_set1_ps(scale);
    std::size_t i = 0;
    for (; i + width <= count; i += width) {
        const __m512i all = _mm512_loadu_si512(values + i);
        const __m512i magnitude = _mm512_and_si512(all, set(~sign_bit));
        const __mmask16 finite = _mm512_cmplt_epi32_mask(magnitude, set(infinity_bits));
        const __m512 quotient = _mm512_maskz_div_ps(finite, _mm512_castsi512_ps(magnitude), divisor);
        const __mmask16 negative = _mm512_test_epi32_mask(all, set(sign_bit));
        const __m512i found = thresholds.codes(_mm512_castps_si512(quotient), negative);
        // Of each pair the second code comes to stand above the first.
        const __m512i pairs = _mm512_or_si512(found, _mm512_srli_epi64(found, 28));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(codes + i / 2), _mm512_cvtepi64_epi8(pairs));
    }
    encode_plain(table, values + i, scale, count - i, codes + i / 2);
}

// The values of sixteen codes in a row; `meanings` those of all codes.
__m512 values_of(const std::uint8_t* codes, __m512 meanings) {
    const __m512i pairs =
        _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
    // The second code of a pair comes to stand in the upper lane; only the lowest four bits count.
    const __m512i apart = _mm512_or_si512(pairs, _mm512_slli_epi64(pairs, 28));
    return _mm512_permutexvar_ps(apart, meanings);
}

void decode(const FourBitTable& table, const std::uint8_t* codes, float scale, std::size_t count,
            float* values) {
    const __m512 meanings = _mm512_loadu_ps(Meanings(table, scale).of);
    std::size_t i = 0;
    for (; i + width <= count; i += width) {
        _mm512_storeu_ps(values + i, values_of(codes + i / 2, meanings));
    }
    decode_plain(table, codes + i / 2, scale, count - i, values + i);
}

void add(const FourBitTable& table, const std::uint8_t* codes, float scale, std::size_t count,
         float* total) {
    const __m512 meanings = _mm512_loadu_ps(Meanings(table, scale).of);
    std::size_t i = 0;
    for (; i + width <= count; i += width) {
        const __m512 value = values_of(codes + i / 2, meanings);
        _mm512_storeu_ps(total + i, _mm512_add_ps(_mm512_loadu_ps(total + i), value));
    }
    add_plain(table, codes + i / 2, scale, count - i, total + i);
}

}  // namespace

extern const FourBitKernels avx512_four_bit_kernels;
const FourBitKernels avx512_four_bit_kernels = {encode, decode, add};

}  // namespace paceline

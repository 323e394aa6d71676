// 4-bit codes: 32 values at a time to encode, eight to decode.

#include <immintrin.h>

#include "four_bit_plain.hpp"

namespace paceline {
namespace {

constexpr std::size_t width = 8, group = 32;

__m256i set(std::uint32_t value) { return _mm256_set1_epi32(static_cast<int>(value)); }

__m256i blend(__m256i one, __m256i other, __m256i chosen) {
    return _mm256_blendv_epi8(one, other, chosen);
}

// The codes of eight values, as 32-bit integers, by bisection. The bits of quotients, as integers,
// ascend as these do.
struct Thresholds {
    __m256i at[num_four_bit_magnitudes - 1];
    __m256 divisor;

    Thresholds(const FourBitTable& table, float scale) : divisor(_mm256_set1_ps(scale)) {
        for (std::size_t i = 0; i < table.thresholds.size(); ++i) at[i] = set(table.thresholds[i]);
    }

    __m256i codes(const float* values) const {
        const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
        const __m256i magnitude = _mm256_and_si256(all, set(~sign_bit));
        const __m256i finite = _mm256_cmpgt_epi32(set(infinity_bits), magnitude);
        const __m256 divided = _mm256_div_ps(_mm256_castsi256_ps(magnitude), divisor);
        const __m256i quotient = _mm256_and_si256(_mm256_castps_si256(divided), finite);
        const __m256i bit2 = _mm256_cmpgt_epi32(quotient, at[3]);
        const __m256i bit1 = _mm256_cmpgt_epi32(quotient, blend(at[1], at[5], bit2));
        const __m256i low = blend(at[0], at[4], bit2), high = blend(at[2], at[6], bit2);
        const __m256i bit0 = _mm256_cmpgt_epi32(quotient, blend(low, high, bit1));
        const __m256i index = _mm256_or_si256(
            _mm256_and_si256(bit2, set(4)),
            _mm256_or_si256(_mm256_and_si256(bit1, set(2)), _mm256_and_si256(bit0, set(1))));
        const __m256i is_zero = _mm256_cmpeq_epi32(index, _mm256_setzero_si256());
        const __m256i sign = _mm256_srli_epi32(_mm256_and_si256(all, set(sign_bit)), 28);
        return _mm256_or_si256(index, _mm256_andnot_si256(is_zero, sign));
    }
};

void encode(const FourBitTable& table, const float* values, float scale, std::size_t count,
            std::uint8_t* codes) {
    if (!(scale > 0)) {
        std::memset(codes, 0, (count + 1) / 2);
        return;
    }
    const Thresholds thresholds(table, scale);
    // Packing takes turns between the halves of vectors: this puts groups of four in order again.
    const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i pair_weights = _mm256_set1_epi16(0x1001);  // 1 and 16
    std::size_t i = 0;
    for (; i + group <= count; i += group) {
        const float* from = values + i;
        const __m256i words[2] = {
            _mm256_packs_epi32(thresholds.codes(from), thresholds.codes(from + width)),
            _mm256_packs_epi32(thresholds.codes(from + 2 * width),
                               thresholds.codes(from + 3 * width))};
        const __m256i bytes =
            _mm256_permutevar8x32_epi32(_mm256_packus_epi16(words[0], words[1]), in_order);
        const __m256i pairs = _mm256_maddubs_epi16(bytes, pair_weights);
        const __m256i packed = _mm256_packus_epi16(pairs, pairs);
        const __m256i joined = _mm256_permute4x64_epi64(packed, 0b1000);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i / 2),
                         _mm256_castsi256_si128(joined));
    }
    encode_plain(table, values + i, scale, count - i, codes + i / 2);
}

// The values of eight codes in a row; `meanings` those of the codes that are not negative.
__m256 values_of(const std::uint8_t* codes, __m256 meanings) {
    std::uint32_t word;
    std::memcpy(&word, codes, sizeof word);
    const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    const __m256i code = _mm256_srlv_epi32(set(word), shifts);  // only the lowest four bits count
    const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(code, 28), set(sign_bit));
    return _mm256_xor_ps(_mm256_permutevar8x32_ps(meanings, code), _mm256_castsi256_ps(sign));
}

void decode(const FourBitTable& table, const std::uint8_t* codes, float scale, std::size_t count,
            float* values) {
    const __m256 meanings = _mm256_loadu_ps(Meanings(table, scale).of);
    std::size_t i = 0;
    for (; i + width <= count; i += width) {
        _mm256_storeu_ps(values + i, values_of(codes + i / 2, meanings));
    }
    decode_plain(table, codes + i / 2, scale, count - i, values + i);
}

void add(const FourBitTable& table, const std::uint8_t* codes, float scale, std::size_t count,
         float* total) {
    const __m256 meanings = _mm256_loadu_ps(Meanings(table, scale).of);
    std::size_t i = 0;
    for (; i + width <= count; i += width) {
        const __m256 value = values_of(codes + i / 2, meanings);
        _mm256_storeu_ps(total + i, _mm256_add_ps(_mm256_loadu_ps(total + i), value));
    }
    add_plain(table, codes + i / 2, scale, count - i, total + i);
}

}  // namespace

extern const FourBitKernels avx2_four_bit_kernels;
const FourBitKernels avx2_four_bit_kernels = {encode, decode, add};

}  // namespace paceline

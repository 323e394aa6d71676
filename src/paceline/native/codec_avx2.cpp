// Encoding and decoding eight values at a time.

#include <immintrin.h>

#include "codec_plain.hpp"

namespace paceline {
namespace {

constexpr std::size_t width = 8;

__m256i set(std::uint32_t value) { return _mm256_set1_epi32(static_cast<int>(value)); }

__m256i load(const float* values) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
}

float absmax(const float* values, std::size_t count, std::size_t& num_nonfinite) {
    __m256i largest = _mm256_setzero_si256();
    std::size_t i = 0;
    for (; i + width <= count; i += width) {
        const __m256i magnitude = _mm256_and_si256(load(values + i), set(~sign_bit));
        const __m256i finite = _mm256_cmpgt_epi32(set(infinity_bits), magnitude);
        const int mask = _mm256_movemask_ps(_mm256_castsi256_ps(finite));
        num_nonfinite += width - static_cast<std::size_t>(_mm_popcnt_u32(mask));
        largest = _mm256_max_epi32(largest, _mm256_and_si256(magnitude, finite));
    }
    alignas(32) std::uint32_t lanes[width];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), largest);
    const std::uint32_t most = *std::max_element(lanes, lanes + width);
    return std::max(absmax_plain(values + i, count - i, num_nonfinite), float_of(most));
}

// The codes of eight values, as 32-bit integers.
__m256i codes_of(const Codebook& book, __m256i all, __m256 divisor) {
    const __m256i magnitude = _mm256_and_si256(all, set(~sign_bit));
    const __m256i finite = _mm256_cmpgt_epi32(set(infinity_bits), magnitude);
    const __m256 divided = _mm256_div_ps(_mm256_castsi256_ps(magnitude), divisor);
    const __m256i quotient = _mm256_and_si256(_mm256_castps_si256(divided), finite);
    const __m256i upper = _mm256_srli_epi32(quotient, 16);
    const __m256i clamped =
        _mm256_min_epi32(_mm256_max_epi32(upper, set(book.first)), set(book.last));
    const __m256i entry =
        _mm256_i32gather_epi32(reinterpret_cast<const int*>(book.entries.data()),
                               _mm256_sub_epi32(clamped, set(book.first)), 4);
    const __m256i above = _mm256_cmpgt_epi32(_mm256_and_si256(quotient, set(lower_half)),
                                             _mm256_and_si256(entry, set(lower_half)));
    const __m256i index = _mm256_sub_epi32(_mm256_srli_epi32(entry, 16), above);
    const __m256i is_zero = _mm256_cmpeq_epi32(index, _mm256_setzero_si256());
    const __m256i sign = _mm256_srli_epi32(_mm256_and_si256(all, set(sign_bit)), 24);
    return _mm256_or_si256(index, _mm256_andnot_si256(is_zero, sign));
}

void encode(const Codebook& book, const float* values, float scale, std::size_t count,
            std::uint8_t* codes) {
    if (!(scale > 0)) {
        std::memset(codes, 0, count);
        return;
    }
    const __m256 divisor = _mm256_set1_ps(scale);
    const __m128i lowest_bytes = _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                               -1, -1);
    std::size_t i = 0;
    for (; i + width <= count; i += width) {
        const __m256i found = codes_of(book, load(values + i), divisor);
        const __m128i low = _mm_shuffle_epi8(_mm256_castsi256_si128(found), lowest_bytes);
        const __m128i high = _mm_shuffle_epi8(_mm256_extracti128_si256(found, 1), lowest_bytes);
        _mm_storel_epi64(reinterpret_cast<__m128i*>(codes + i), _mm_unpacklo_epi32(low, high));
    }
    encode_plain(book, values + i, scale, count - i, codes + i);
}

__m256 values_of(const Codebook& book, const std::uint8_t* codes, __m256 factor) {
    const __m256i code =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
    const __m256 magnitude =
        _mm256_i32gather_ps(book.magnitudes.data(), _mm256_and_si256(code, set(127)), 4);
    const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(code, 7), 31);
    return _mm256_mul_ps(_mm256_or_ps(magnitude, _mm256_castsi256_ps(sign)), factor);
}

void decode(const Codebook& book, const std::uint8_t* codes, float scale, std::size_t count,
            float* values) {
    const __m256 factor = _mm256_set1_ps(scale);
    std::size_t i = 0;
    for (; i + width <= count; i += width) {
        _mm256_storeu_ps(values + i, values_of(book, codes + i, factor));
    }
    decode_plain(book, codes + i, scale, count - i, values + i);
}

void add(const Codebook& book, const std::uint8_t* codes, float scale, std::size_t count,
         float* total) {
    const __m256 factor = _mm256_set1_ps(scale);
    std::size_t i = 0;
    for (; i + width <= count; i += width) {
        const __m256 value = values_of(book, codes + i, factor);
        _mm256_storeu_ps(total + i, _mm256_add_ps(_mm256_loadu_ps(total + i), value));
    }
    add_plain(book, codes + i, scale, count - i, total + i);
}

}  // namespace

extern const CodecKernels avx2_codec_kernels;
const CodecKernels avx2_codec_kernels = {absmax, encode, decode, add};

}  // namespace paceline

// Encoding and decoding sixteen values at a time.

#include <immintrin.h>

#include "codec_plain.hpp"

namespace paceline {
namespace {

constexpr std::size_t width = 16;

float absmax(const float* values, std::size_t count, std::size_t& num_nonfinite) {
    const __m512i infinity = _mm512_set1_epi32(static_cast<int>(infinity_bits));
    const __m512i no_sign = _mm512_set1_epi32(static_cast<int>(~sign_bit));
    __m512i largest = _mm512_setzero_si512();
    std::size_t i = 0;
    for (; i + width <= count; i += width) {
        const __m512i magnitude = _mm512_and_si512(_mm512_loadu_si512(values + i), no_sign);
        const __mmask16 finite = _mm512_cmplt_epi32_mask(magnitude, infinity);
        num_nonfinite += width - static_cast<std::size_t>(_mm_popcnt_u32(finite));
        largest = _mm512_mask_max_epi32(largest, finite, largest, magnitude);
    }
    const float rest = absmax_plain(values + i, count - i, num_nonfinite);
    return std::max(rest, value_of(static_cast<std::uint32_t>(_mm512_reduce_max_epi32(largest))));
}

void encode(const Codebook& book, const float* values, float scale, std::size_t count,
            std::uint8_t* codes) {
    if (!(scale > 0)) {
        std::memset(codes, 0, count);
        return;
    }
    const __m512i infinity = _mm512_set1_epi32(static_cast<int>(infinity_bits));
    const __m512i no_sign = _mm512_set1_epi32(static_cast<int>(~sign_bit));
    const __m512i sign = _mm512_set1_epi32(static_cast<int>(sign_bit));
    const __m512i low = _mm512_set1_epi32(static_cast<int>(lower_half));
    const __m512i first = _mm512_set1_epi32(static_cast<int>(book.first));
    const __m512i last = _mm512_set1_epi32(static_cast<int>(book.last));
    const __m512i negative = _mm512_set1_epi32(128);
    const __m512i one = _mm512_set1_epi32(1);
    const __m512 divisor = _mm512_set1_ps(scale);
    std::size_t i = 0;
    for (; i + width <= count; i += width) {
        const __m512i all = _mm512_loadu_si512(values + i);
        const __m512i magnitude = _mm512_and_si512(all, no_sign);
        const __mmask16 finite = _mm512_cmplt_epi32_mask(magnitude, infinity);
        const __m512i quotient = _mm512_castps_si512(
            _mm512_maskz_div_ps(finite, _mm512_castsi512_ps(magnitude), divisor));
        const __m512i upper = _mm512_srli_epi32(quotient, 16);
        const __m512i clamped = _mm512_min_epi32(_mm512_max_epi32(upper, first), last);
        const __m512i entry = _mm512_i32gather_epi32(_mm512_sub_epi32(clamped, first),
                                                     book.entries.data(), 4);
        const __mmask16 above = _mm512_cmpgt_epi32_mask(_mm512_and_si512(quotient, low),
                                                        _mm512_and_si512(entry, low));
        const __m512i below = _mm512_srli_epi32(entry, 16);
        const __m512i index = _mm512_mask_add_epi32(below, above, below, one);
        const __mmask16 signs = _mm512_test_epi32_mask(all, sign) & _mm512_test_epi32_mask(index, index);
        const __m512i code = _mm512_mask_or_epi32(index, signs, index, negative);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), _mm512_cvtepi32_epi8(code));
    }
    encode_plain(book, values + i, scale, count - i, codes + i);
}

// The magnitudes in registers: four pairs of them, of which a code's bits 5 and 6 choose one.
struct Magnitudes {
    __m512 pair[4][2];

    explicit Magnitudes(const Codebook& book) {
        for (int i = 0; i < 8; ++i) {
            pair[i / 2][i % 2] = _mm512_loadu_ps(book.magnitudes.data() + i * width);
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

void decode(const Codebook& book, const std::uint8_t* codes, float scale, std::size_t count,
            float* values) {
    const Magnitudes magnitudes(book);
    const __m512 factor = _mm512_set1_ps(scale);
    std::size_t i = 0;
    for (; i + width <= count; i += width) {
        _mm512_storeu_ps(values + i, _mm512_mul_ps(magnitudes.of(codes + i), factor));
    }
    decode_plain(book, codes + i, scale, count - i, values + i);
}

void add(const Codebook& book, const std::uint8_t* codes, float scale, std::size_t count,
         float* total) {
    const Magnitudes magnitudes(book);
    const __m512 factor = _mm512_set1_ps(scale);
    std::size_t i = 0;
    for (; i + width <= count; i += width) {
        const __m512 value = _mm512_mul_ps(magnitudes.of(codes + i), factor);
        _mm512_storeu_ps(total + i, _mm512_add_ps(_mm512_loadu_ps(total + i), value));
    }
    add_plain(book, codes + i, scale, count - i, total + i);
}

}  // namespace

extern const CodecKernels avx512_codec_kernels;
const CodecKernels avx512_codec_kernels = {absmax, encode, decode, add};

}  // namespace paceline

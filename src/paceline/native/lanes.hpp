// Vectors of the width of the instruction set for which the including file is compiled.
//
// GCC's vector extensions compile the same source for SSE2, NEON, AVX2 and AVX-512. All functions
// have internal linkage, and call no templates of the standard library. Otherwise the linker could
// use a function with wide instructions in code for all processors.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace paceline {
namespace {

#if defined(__AVX512F__)
constexpr std::size_t vector_nbytes = 64;
#elif defined(__AVX2__)
constexpr std::size_t vector_nbytes = 32;
#else
constexpr std::size_t vector_nbytes = 16;
#endif
constexpr std::size_t width = vector_nbytes / sizeof(float);

using Floats = float __attribute__((vector_size(vector_nbytes)));
using Doubles = double __attribute__((vector_size(vector_nbytes)));
using Integers = std::int32_t __attribute__((vector_size(vector_nbytes)));  // also masks: 0 or -1
using Words = std::uint32_t __attribute__((vector_size(vector_nbytes)));
using Pairs = std::uint64_t __attribute__((vector_size(vector_nbytes)));
// Vectors with as many elements as `Floats`.
using Halves = std::uint16_t __attribute__((vector_size(vector_nbytes / 2)));
using Bytes = std::uint8_t __attribute__((vector_size(vector_nbytes / 4)));
// A vector with half as many elements as `Floats`.
using PairBytes = std::uint8_t __attribute__((vector_size(vector_nbytes / 8)));

constexpr std::int32_t no_sign = 0x7fffffff;
constexpr std::int32_t largest_finite = 0x7f7fffff;

// Return the same bits as another type.
template <class To, class From>
To as(From from) {
    return __builtin_bit_cast(To, from);
}

// A number of elements `n` that is known at compile time: a whole vector.
template <std::size_t count>
struct Whole {
    constexpr operator std::size_t() const { return count; }
};

// Divide `count` elements into vectors, and call each(i, n) for each vector: i is its first
// element, n its number of elements. The last vector may be incomplete.
template <std::size_t per_vector, class Each>
void for_vectors(std::size_t count, const Each& each) {
    std::size_t i = 0;
    for (; i + per_vector <= count; i += per_vector) each(i, Whole<per_vector>{});
    if (i < count) each(i, count - i);
}

// Load `n` elements from memory into a vector; the other elements are zero.
template <class Vector, class Element, class Count>
Vector load(const Element* from, Count n) {
    Vector vector{};
    std::memcpy(&vector, from, n * sizeof(Element));
    return vector;
}

template <class Element, class Count, class Vector>
void store(Element* to, Count n, Vector vector) {
    std::memcpy(to, &vector, n * sizeof(Element));
}

// Functions that GCC's vector extensions lack, or compile to slow code. `widened`, `halves_of` and
// `bytes_of` convert unsigned elements between sizes; the values must fit into the smaller type.
// `bytes_of(Pairs)` keeps the lowest byte of each element. `four_bits` writes each half of a byte
// to the lowest four bits of an element. If `streams`, `stream` stores past the caches, to an
// address that is a multiple of the vector's size. Call `fence` after such stores, which are weakly
// ordered: other threads must see them before they see a counter.
#if defined(__AVX512F__)
constexpr bool streams = true;
inline void stream(void* to, Words from) {
    _mm512_stream_si512(static_cast<__m512i*>(to), as<__m512i>(from));
}
inline void stream(void* to, Halves from) {
    _mm256_stream_si256(static_cast<__m256i*>(to), as<__m256i>(from));
}
inline Words widened(Halves from) { return as<Words>(_mm512_cvtepu16_epi32(as<__m256i>(from))); }
inline Words widened(Bytes from) { return as<Words>(_mm512_cvtepu8_epi32(as<__m128i>(from))); }
inline Integers four_bits(PairBytes from) {
    const __m128i bytes = _mm_cvtsi64_si128(as<std::int64_t>(from));
    const auto pairs = as<Pairs>(_mm512_cvtepu8_epi64(bytes));
    return as<Integers>(pairs | pairs << 28);
}
inline Halves halves_of(Words from) { return as<Halves>(_mm512_cvtepi32_epi16(as<__m512i>(from))); }
inline Bytes bytes_of(Words from) { return as<Bytes>(_mm512_cvtepi32_epi8(as<__m512i>(from))); }
inline PairBytes bytes_of(Pairs from) {
    return as<PairBytes>(_mm_cvtsi128_si64(_mm512_cvtepi64_epi8(as<__m512i>(from))));
}
#elif defined(__AVX2__)
constexpr bool streams = true;
inline void stream(void* to, Words from) {
    _mm256_stream_si256(static_cast<__m256i*>(to), as<__m256i>(from));
}
inline void stream(void* to, Halves from) {
    _mm_stream_si128(static_cast<__m128i*>(to), as<__m128i>(from));
}
inline Words widened(Halves from) { return as<Words>(_mm256_cvtepu16_epi32(as<__m128i>(from))); }
inline Words widened(Bytes from) {
    return as<Words>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(as<std::int64_t>(from))));
}
inline Integers four_bits(PairBytes from) {
    const Words all = as<std::uint32_t>(from) + Words{};
    return as<Integers>(all >> Words{0, 4, 8, 12, 16, 20, 24, 28});
}
inline Halves halves_of(Words from) {
    const auto all = as<__m256i>(from);
    const __m128i low = _mm256_castsi256_si128(all), high = _mm256_extracti128_si256(all, 1);
    return as<Halves>(_mm_packus_epi32(low, high));
}
inline Bytes bytes_of(Words from) {
    const auto halves = as<__m128i>(halves_of(from));
    return as<Bytes>(_mm_cvtsi128_si64(_mm_packus_epi16(halves, halves)));
}
inline PairBytes bytes_of(Pairs from) {
    const __m256i two = _mm256_shuffle_epi8(as<__m256i>(from), _mm256_set1_epi16(0x0800));
    const __m128i low = _mm256_castsi256_si128(two), high = _mm256_extracti128_si256(two, 1);
    return as<PairBytes>(_mm_cvtsi128_si32(_mm_unpacklo_epi16(low, high)));
}
#else
constexpr bool streams = false;
template <class Vector>
void stream(void*, Vector) {}
#if defined(__SSE2__)  // SSE2 can only pack signed numbers
inline Words widened(Halves from) {
    const auto all = _mm_cvtsi64_si128(as<std::int64_t>(from));
    return as<Words>(_mm_unpacklo_epi16(all, _mm_setzero_si128()));
}
inline Halves halves_of(Words from) {
    const auto all = as<__m128i>(as<Integers>(from << 16) >> 16);
    return as<Halves>(_mm_cvtsi128_si64(_mm_packs_epi32(all, all)));
}
#else
inline Words widened(Halves from) { return __builtin_convertvector(from, Words); }
inline Halves halves_of(Words from) { return __builtin_convertvector(from, Halves); }
#endif
inline Words widened(Bytes from) { return widened(__builtin_convertvector(from, Halves)); }
inline Integers four_bits(PairBytes from) {
    const auto pairs = __builtin_convertvector(from, Pairs);
    return as<Integers>(pairs | pairs << 28);
}
inline Bytes bytes_of(Words from) { return __builtin_convertvector(halves_of(from), Bytes); }
inline PairBytes bytes_of(Pairs from) { return __builtin_convertvector(from, PairBytes); }
#endif

inline void fence() {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

// Return the sum of a vector's elements.
inline std::size_t total(Integers counts) {
    std::size_t sum = 0;
    for (std::size_t i = 0; i < width; ++i) sum += static_cast<std::size_t>(counts[i]);
    return sum;
}

}  // namespace
}  // namespace paceline

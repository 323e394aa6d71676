// Formats of values: vectors as stored in memory (Stored), and as added (Vector).

#pragma once

#include "lanes.hpp"

namespace paceline {
namespace {

template <class Vector_, class Element_>
struct Plain {
    using Element = Element_;
    using Scalar = Element_;
    using Stored = Vector_;
    using Vector = Vector_;
    using Bits = Words;
    static Vector widen(Stored values) { return values; }
    static Stored narrow(Vector values) { return values; }
};
using Float32 = Plain<Floats, float>;
using Float64 = Plain<Doubles, double>;

// A 16-bit type: values are added as float32, and the sum is rounded to nearest even.
struct Half {
    using Element = std::uint16_t;
    using Scalar = float;
    using Stored = Halves;
    using Vector = Floats;
    using Bits = Halves;
};

// bfloat16: the upper 16 bits of a float32.
struct BFloat16 : Half {
    // Bits of the largest float32 that rounds to a finite bfloat16.
    static constexpr std::int32_t largest = 0x7f7f7fff;

    static Floats widen(Halves values) {
        return as<Floats>(widened(values) << 16);
    }
    // Truncate a NaN, because rounding could make it zero; NaNs from operations are quiet.
    static Halves narrow(Floats values) { return rounded(values, values == values); }
    static Halves narrow_finite(Floats values) { return rounded(values, ~Integers{}); }

private:
    static Halves rounded(Floats values, Integers where) {
        const auto bits = as<Words>(values);
        const Words half = where ? 0x7fffu + (bits >> 16 & 1u) : Words{};
        return halves_of((bits + half) >> 16);
    }
};

// IEEE 754 binary16: 5 bits of exponent, 10 of mantissa.
struct Float16 : Half {
    static constexpr std::int32_t largest = 0x477fefff;  // bits of the largest float32 below 65,520

#if defined(__AVX512F__)
    static Floats widen(Halves values) { return as<Floats>(_mm512_cvtph_ps(as<__m256i>(values))); }
    static Halves narrow(Floats values) {
        return as<Halves>(_mm512_cvtps_ph(as<__m512>(values), _MM_FROUND_TO_NEAREST_INT));
    }
#elif defined(__AVX2__)
    static Floats widen(Halves values) { return as<Floats>(_mm256_cvtph_ps(as<__m128i>(values))); }
    static Halves narrow(Floats values) {
        return as<Halves>(_mm256_cvtps_ph(as<__m256>(values), _MM_FROUND_TO_NEAREST_INT));
    }
#else
    static Floats widen(Halves values) {
        const auto bits = as<Integers>(widened(values));
        const Integers sign = (bits & 0x8000) << 16, rest = bits & 0x7fff;
        // Read as float32, the exponent is too small by 112. Multiplying by 2^112 corrects this,
        // and normalises denormal numbers.
        const auto finite = as<Integers>(as<Floats>(rest << 13) * 0x1p112f);
        const Integers quiet = (rest > 0x7c00) & 0x400000;
        const Integers other = 0x7f800000 | (rest & 0x3ff) << 13 | quiet;  // infinities and NaNs
        return as<Floats>(sign | (rest < 0x7c00 ? finite : other));
    }
    static Halves narrow(Floats values) {
        const auto bits = as<Integers>(values);
        const Integers sign = bits >> 16 & 0x8000, rest = bits & no_sign;
        const Integers normal = (rest - (112 << 23) + 0xfff + (rest >> 13 & 1)) >> 13;
        // Below 2^-14, the result is a multiple of 2^-24; adding 0.5 in float32 rounds to that.
        const Integers small = as<Integers>(as<Floats>(rest) + 0.5f) - as<std::int32_t>(0.5f);
        const Integers other = 0x7c00 | ((rest > 0x7f800000) & (0x200 | (rest >> 13 & 0x3ff)));
        const Integers finite = rest < 0x38800000 ? small : normal;
        return halves_of(as<Words>(sign | (rest < 0x47800000 ? finite : other)));
    }
#endif
    static Halves narrow_finite(Floats values) { return narrow(values); }
};

}  // namespace
}  // namespace paceline

// The one loop of all sums, for vectors of any width; see sum.hpp for what it computes.
//
// Included by one file for each instruction set, which is compiled for that set. Everything here has
// internal linkage, or the linker could put wide instructions into a function that all share.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "float_bits.hpp"
#include "sum.hpp"

namespace paceline {
namespace {

template <class Element_>
struct Plain {
    using Element = Element_;
    using Sum = Element_;
    static Sum widen(Element value) { return value; }
    static Element narrow(Sum value) { return value; }
};

// The upper half of a float32.
struct BFloat16 {
    using Element = std::uint16_t;
    using Sum = float;
    static float widen(Element value) { return float_of(std::uint32_t{value} << 16); }
    static Element narrow(float value) {
        const std::uint32_t bits = bits_of(value);
        // Rounding could carry a NaN over into an infinity.
        const std::uint32_t quiet = (bits >> 16) | 0x40u;
        const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        return static_cast<Element>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
    }
};

// IEEE 754 binary16: 5 bits of exponent, 10 of mantissa.
struct Float16 {
    using Element = std::uint16_t;
    using Sum = float;
    static float widen(Element value) {
        const std::uint32_t sign = std::uint32_t{value & 0x8000u} << 16;
        const std::uint32_t rest = value & 0x7fffu;
        if (rest >= 0x7c00u) {  // infinities, and NaNs, which become quiet
            return float_of(sign | 0x7f800000u | (rest & 0x3ffu) << 13 |
                            (rest > 0x7c00u ? 0x400000u : 0u));
        }
        // Read as a float32, the exponent is too small by 112: a multiplication also normalises.
        return float_of(sign | bits_of(float_of(rest << 13) * float_of((127u + 112u) << 23)));
    }
    static Element narrow(float value) {
        const std::uint32_t bits = bits_of(value);
        const std::uint32_t sign = bits >> 16 & 0x8000u;
        const std::uint32_t rest = bits & 0x7fffffffu;
        std::uint32_t result;
        if (rest > 0x7f800000u) {
            result = 0x7e00u | (rest >> 13 & 0x3ffu);
        } else if (rest >= 0x47800000u) {  // from 2^16 on
            result = 0x7c00u;
        } else if (rest < 0x38800000u) {  // below 2^-14: in steps of 2^-24, to which 0.5 rounds
            result = bits_of(float_of(rest) + 0.5f) - bits_of(0.5f);
        } else {
            result = (rest - (112u << 23) + 0xfffu + (rest >> 13 & 1u)) >> 13;
        }
        return static_cast<Element>(sign | result);
    }
};

// Vectors that the compiler makes of plain loops.
template <class Format, std::size_t width_>
struct PlainLanes {
    using Element = typename Format::Element;
    using Sum = typename Format::Sum;
    static constexpr std::size_t width = width_;
    struct Vector {
        Sum lane[width];
    };
    static Vector broadcast(double value) {
        Vector vector;
        for (auto& lane : vector.lane) lane = static_cast<Sum>(value);
        return vector;
    }
    static Vector load(const Element* from) {
        Vector vector;
        for (std::size_t i = 0; i < width; ++i) vector.lane[i] = Format::widen(from[i]);
        return vector;
    }
    static Vector add(Vector left, Vector right) {
        for (std::size_t i = 0; i < width; ++i) left.lane[i] += right.lane[i];
        return left;
    }
    static Vector multiply(Vector left, Vector right) {
        for (std::size_t i = 0; i < width; ++i) left.lane[i] *= right.lane[i];
        return left;
    }
    static void store(Element* to, Vector vector) {
        for (std::size_t i = 0; i < width; ++i) to[i] = Format::narrow(vector.lane[i]);
    }
    static void stream(Element* to, Vector vector) { store(to, vector); }
    static void fence() {}
};

// Sum the elements from `first` on, as many whole groups of `unroll` vectors as end before `end`;
// return where the rest begins.
template <class Lanes, std::size_t unroll, bool streaming>
std::size_t sum_groups(const void* const* sources, std::size_t num_sources, double scale,
                       void* result, std::size_t first, std::size_t end) {
    using Element = typename Lanes::Element;
    constexpr std::size_t group = unroll * Lanes::width;
    const auto factor = Lanes::broadcast(scale);
    for (; first + group <= end; first += group) {
        typename Lanes::Vector sums[unroll];
        const Element* from = static_cast<const Element*>(sources[0]) + first;
        for (std::size_t k = 0; k < unroll; ++k) sums[k] = Lanes::load(from + k * Lanes::width);
        for (std::size_t source = 1; source < num_sources; ++source) {
            from = static_cast<const Element*>(sources[source]) + first;
            for (std::size_t k = 0; k < unroll; ++k) {
                sums[k] = Lanes::add(sums[k], Lanes::load(from + k * Lanes::width));
            }
        }
        Element* to = static_cast<Element*>(result) + first;
        for (std::size_t k = 0; k < unroll; ++k) {
            const auto scaled = Lanes::multiply(sums[k], factor);
            if constexpr (streaming) {
                Lanes::stream(to + k * Lanes::width, scaled);
            } else {
                Lanes::store(to + k * Lanes::width, scaled);
            }
        }
    }
    return first;
}

constexpr std::size_t line_nbytes = 64;

// The number of elements before the first one that begins a cache line; 0 if none ever does.
std::size_t before_line(const void* address, std::size_t element_nbytes, std::size_t count) {
    const std::size_t past = reinterpret_cast<std::uintptr_t>(address) % line_nbytes;
    if (past % element_nbytes != 0) return 0;
    const std::size_t missing = past == 0 ? 0 : (line_nbytes - past) / element_nbytes;
    return missing < count ? missing : count;
}

template <class Lanes, class Single>
void sum_all(const void* const* sources, std::size_t num_sources, double scale, void* result,
             std::size_t count, bool streaming) {
    constexpr std::size_t unroll = 4;
    const std::size_t head = before_line(result, sizeof(typename Lanes::Element), count);
    std::size_t next =
        sum_groups<Single, 1, false>(sources, num_sources, scale, result, 0, head);
    const void* aligned = static_cast<const typename Lanes::Element*>(result) + next;
    if (streaming && reinterpret_cast<std::uintptr_t>(aligned) % line_nbytes == 0) {
        next = sum_groups<Lanes, unroll, true>(sources, num_sources, scale, result, next, count);
        Lanes::fence();  // streaming stores are weakly ordered: others read after our counter
    } else {
        next = sum_groups<Lanes, unroll, false>(sources, num_sources, scale, result, next, count);
    }
    next = sum_groups<Lanes, 1, false>(sources, num_sources, scale, result, next, count);
    sum_groups<Single, 1, false>(sources, num_sources, scale, result, next, count);
}

// Lanes of doubles carry any 8 bytes.
template <class Lanes>
void copy_streaming(void* target, const void* source, std::size_t nbytes) {
    constexpr std::size_t unroll = 4;
    constexpr std::size_t step = unroll * Lanes::width * sizeof(double);
    auto* to = static_cast<char*>(target);
    const auto* from = static_cast<const char*>(source);
    const std::size_t head = before_line(target, 1, nbytes);
    std::memcpy(to, from, head);
    std::size_t next = head;
    for (; next + step <= nbytes; next += step) {
        typename Lanes::Vector vectors[unroll];
        for (std::size_t k = 0; k < unroll; ++k) {
            vectors[k] = Lanes::load(
                reinterpret_cast<const double*>(from + next) + k * Lanes::width);
        }
        for (std::size_t k = 0; k < unroll; ++k) {
            Lanes::stream(reinterpret_cast<double*>(to + next) + k * Lanes::width, vectors[k]);
        }
    }
    Lanes::fence();
    std::memcpy(to + next, from + next, nbytes - next);
}

}  // namespace
}  // namespace paceline

// The loops of sums (for all formats) and copies; kernels.hpp describes SumKernel and CopyKernel.

#pragma once

#include "formats.hpp"

namespace paceline {
namespace {

constexpr std::size_t unroll = 4;
constexpr std::size_t line_nbytes = 64;

// Sum `num_vectors` vectors of `n` elements each, from element `first` on.
template <class Format, std::size_t num_vectors, bool streaming, class Count>
void sum_vectors(const void* const* sources, std::size_t num_sources, typename Format::Scalar scale,
                 void* result, std::size_t first, Count n) {
    using Element = typename Format::Element;
    using Stored = typename Format::Stored;
    constexpr std::size_t step = sizeof(Stored) / sizeof(Element);
    typename Format::Vector sums[num_vectors];
    const auto* from = static_cast<const Element*>(sources[0]) + first;
    for (std::size_t k = 0; k < num_vectors; ++k) {
        sums[k] = Format::widen(load<Stored>(from + k * step, n));
    }
    for (std::size_t source = 1; source < num_sources; ++source) {
        from = static_cast<const Element*>(sources[source]) + first;
        for (std::size_t k = 0; k < num_vectors; ++k) {
            sums[k] += Format::widen(load<Stored>(from + k * step, n));
        }
    }
    auto* to = static_cast<Element*>(result) + first;
    for (std::size_t k = 0; k < num_vectors; ++k) {
        const Stored scaled = Format::narrow(sums[k] * scale);
        if constexpr (streaming) {
            stream(to + k * step, as<typename Format::Bits>(scaled));
        } else {
            store(to + k * step, n, scaled);
        }
    }
}

// Return the number of elements before the first that begins a cache line; 0 if none can.
std::size_t before_line(const void* address, std::size_t element_nbytes, std::size_t count) {
    const std::size_t past = reinterpret_cast<std::uintptr_t>(address) % line_nbytes;
    if (past % element_nbytes != 0) return 0;
    const std::size_t missing = past == 0 ? 0 : (line_nbytes - past) / element_nbytes;
    return missing < count ? missing : count;
}

// Sum whole groups of `unroll` vectors from element `first` on; return the first one not summed.
template <class Format, bool streaming>
std::size_t sum_groups(const void* const* sources, std::size_t num_sources,
                       typename Format::Scalar scale, void* result, std::size_t first,
                       std::size_t end) {
    constexpr Whole<sizeof(typename Format::Stored) / sizeof(typename Format::Element)> step;
    for (; first + unroll * step <= end; first += unroll * step) {
        sum_vectors<Format, unroll, streaming>(sources, num_sources, scale, result, first, step);
    }
    if constexpr (streaming) fence();
    return first;
}

template <class Format>
void sum_all(const void* const* sources, std::size_t num_sources, double double_scale,
             void* result, std::size_t count, bool streaming) {
    using Element = typename Format::Element;
    constexpr std::size_t step = sizeof(typename Format::Stored) / sizeof(Element);
    const auto scale = static_cast<typename Format::Scalar>(double_scale);
    const auto sum_ends = [=](std::size_t first, std::size_t end) {
        for_vectors<step>(end - first, [=](std::size_t i, auto n) {
            sum_vectors<Format, 1, false>(sources, num_sources, scale, result, first + i, n);
        });
    };
    std::size_t next = before_line(result, sizeof(Element), count);
    sum_ends(0, next);
    const auto address = reinterpret_cast<std::uintptr_t>(static_cast<Element*>(result) + next);
    const bool past_caches = streams && streaming && address % line_nbytes == 0;
    const auto groups = past_caches ? sum_groups<Format, streams> : sum_groups<Format, false>;
    next = groups(sources, num_sources, scale, result, next, count);
    sum_ends(next, count);
}

void copy_all(void* target, const void* source, std::size_t nbytes) {
    constexpr std::size_t step = unroll * vector_nbytes;
    auto* to = static_cast<char*>(target);
    const auto* from = static_cast<const char*>(source);
    std::size_t next = streams ? before_line(target, 1, nbytes) : 0;
    std::memcpy(to, from, next);
    for (; streams && next + step <= nbytes; next += step) {
        Words vectors[unroll];
        std::memcpy(vectors, from + next, step);
        for (std::size_t k = 0; k < unroll; ++k) stream(to + next + k * vector_nbytes, vectors[k]);
    }
    fence();
    std::memcpy(to + next, from + next, nbytes - next);
}

}  // namespace
}  // namespace paceline

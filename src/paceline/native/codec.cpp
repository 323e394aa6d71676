// The choice of codec kernels for this processor, and the portable kernels.

#include "codec_plain.hpp"

#include <numeric>
#include <stdexcept>

#include "blocks.hpp"

namespace paceline {

#if defined(PACELINE_X86_KERNELS)
extern const CodecKernels avx2_codec_kernels;
extern const CodecKernels avx512_codec_kernels;
#endif

namespace {

constexpr CodecKernels portable_codec_kernels = {absmax_plain, encode_plain, decode_plain,
                                                 add_plain};

}  // namespace

Codebook::Codebook(const std::vector<float>& magnitudes_, const std::vector<float>& thresholds) {
    const bool fits = !magnitudes_.empty() && magnitudes_.size() <= num_magnitudes &&
                      thresholds.size() + 1 == magnitudes_.size();
    if (!fits || thresholds.empty() || !(thresholds[0] > 0)) {
        throw std::invalid_argument("a table has 2 to 128 magnitudes, and a threshold between two");
    }
    magnitudes.fill(0);
    std::copy(magnitudes_.begin(), magnitudes_.end(), magnitudes.begin());
    first = (bits_of(thresholds.front()) >> 16) - 1;
    last = (bits_of(thresholds.back()) >> 16) + 1;
    std::uint32_t below = 0;
    for (std::uint32_t upper = first; upper <= last; ++upper) {
        const bool has_one = below < thresholds.size() && bits_of(thresholds[below]) >> 16 == upper;
        entries.push_back(below << 16 | (has_one ? bits_of(thresholds[below]) & lower_half : lower_half));
        below += has_one;
    }
    if (below != thresholds.size()) {
        throw std::invalid_argument("two thresholds are too close, or do not ascend");
    }
    tree.fill(~sign_bit);
    std::size_t place = 0;
    for (std::size_t half = num_magnitudes / 2; half > 0; half /= 2) {
        for (std::size_t i = half - 1; i < num_magnitudes - 1; i += 2 * half, ++place) {
            if (i < thresholds.size()) tree[place] = bits_of(thresholds[i]);
        }
    }
}

const CodecKernels* codec_kernels_of(InstructionSet set) {
    if (kernels_of(set) == nullptr) return nullptr;
#if defined(PACELINE_X86_KERNELS)
    if (set == InstructionSet::avx2) return &avx2_codec_kernels;
    if (set == InstructionSet::avx512) {
        const bool shifts_pairs = __builtin_cpu_supports("avx512vbmi2");
        return shifts_pairs ? &avx512_codec_kernels : &avx2_codec_kernels;
    }
#endif
    return &portable_codec_kernels;
}

std::size_t encode(const CodecKernels& kernels, const Codebook& book, Blocks blocks,
                   const float* values, float* scales, bool finds_scales, std::uint8_t* codes,
                   std::size_t num_threads) {
    std::vector<std::size_t> nonfinite(std::max<std::size_t>(1, num_threads));
    share_out(blocks, num_threads, [&](std::size_t thread, std::size_t block, std::size_t begin,
                                       std::size_t count) {
        const float largest = kernels.absmax(values + begin, count, nonfinite[thread]);
        if (finds_scales) scales[block] = largest;
        kernels.encode(book, values + begin, scales[block], count, codes + begin);
    });
    return std::accumulate(nonfinite.begin(), nonfinite.end(), std::size_t{0});
}

void decode(const CodecKernels& kernels, const Codebook& book, Blocks blocks,
            const std::uint8_t* codes, const float* scales, float* values, bool adds,
            std::size_t num_threads) {
    const auto kernel = adds ? kernels.add : kernels.decode;
    share_out(blocks, num_threads, [&](std::size_t, std::size_t block, std::size_t begin,
                                       std::size_t count) {
        kernel(book, codes + begin, scales[block], count, values + begin);
    });
}

}  // namespace paceline

// The choice of 4-bit kernels for this processor, and the portable kernels.

#include "four_bit_plain.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "blocks.hpp"
#include "codec.hpp"

namespace paceline {

#if defined(PACELINE_X86_KERNELS)
extern const FourBitKernels avx2_four_bit_kernels;
extern const FourBitKernels avx512_four_bit_kernels;
#endif

namespace {

constexpr FourBitKernels portable_four_bit_kernels = {encode_plain, decode_plain, add_plain};

const FourBitKernels& kernels_for(InstructionSet set) {
    if (kernels_of(set) == nullptr) {
        throw std::invalid_argument("this processor has no such instruction set");
    }
#if defined(PACELINE_X86_KERNELS)
    if (set == InstructionSet::avx2) return avx2_four_bit_kernels;
    if (set == InstructionSet::avx512) return avx512_four_bit_kernels;
#endif
    return portable_four_bit_kernels;
}

}  // namespace

FourBitTable::FourBitTable(const std::vector<float>& magnitudes_,
                           const std::vector<float>& thresholds_) {
    const bool fits = magnitudes_.size() == magnitudes.size() &&
                      thresholds_.size() == thresholds.size() && thresholds_.front() > 0 &&
                      std::is_sorted(thresholds_.begin(), thresholds_.end());
    if (!fits) {
        throw std::invalid_argument("a table has 8 magnitudes, and a threshold between two");
    }
    std::copy(magnitudes_.begin(), magnitudes_.end(), magnitudes.begin());
    std::transform(thresholds_.begin(), thresholds_.end(), thresholds.begin(), bits_of);
}

std::size_t encode_four_bit(InstructionSet set, const FourBitTable& table, Blocks blocks,
                            const float* values, float* scales, std::uint8_t* codes,
                            std::size_t num_threads) {
    const FourBitKernels& kernels = kernels_for(set);
    const auto absmax = codec_kernels_of(set)->absmax;
    std::vector<std::size_t> nonfinite(std::max<std::size_t>(1, num_threads));
    share_out(blocks, num_threads, [&](std::size_t thread, std::size_t block, std::size_t begin,
                                       std::size_t count) {
        scales[block] = absmax(values + begin, count, nonfinite[thread]);
        kernels.encode(table, values + begin, scales[block], count, codes + begin / 2);
    });
    return std::accumulate(nonfinite.begin(), nonfinite.end(), std::size_t{0});
}

void decode_four_bit(InstructionSet set, const FourBitTable& table, Blocks blocks,
                     const std::uint8_t* codes, const float* scales, float* values, bool adds,
                     std::size_t num_threads) {
    const FourBitKernels& kernels = kernels_for(set);
    const auto kernel = adds ? kernels.add : kernels.decode;
    share_out(blocks, num_threads, [&](std::size_t, std::size_t block, std::size_t begin,
                                       std::size_t count) {
        kernel(table, codes + begin / 2, scales[block], count, values + begin);
    });
}

}  // namespace paceline

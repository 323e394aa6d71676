// Build the tables in the form in which the encoding kernels search them.

#include "codec.hpp"

#include <algorithm>
#include <bit>
#include <stdexcept>

namespace paceline {

Codebook::Codebook(const std::vector<float>& magnitudes, const std::vector<float>& thresholds) {
    const bool fits = !magnitudes.empty() && magnitudes.size() <= num_magnitudes &&
                      thresholds.size() + 1 == magnitudes.size();
    if (!fits || thresholds.empty() || !(thresholds[0] > 0)) {
        throw std::invalid_argument(
            "must have 2 to 128 magnitudes, and one positive threshold fewer than magnitudes");
    }
    values.fill(0);
    std::copy(magnitudes.begin(), magnitudes.end(), values.begin());
    std::transform(values.begin(), values.begin() + num_magnitudes, values.begin() + num_magnitudes,
                   [](float magnitude) { return -magnitude; });
    std::vector<std::uint32_t> bits;
    for (const float one : thresholds) bits.push_back(std::bit_cast<std::uint32_t>(one));
    first = (bits.front() >> 16) - 1;
    last = (bits.back() >> 16) + 1;
    std::uint32_t below = 0;
    for (std::uint32_t upper = first; upper <= last; ++upper) {
        const bool has_one = below < bits.size() && bits[below] >> 16 == upper;
        entries.push_back(below << 16 | (has_one ? bits[below] & 0xffffu : 0xffffu));
        below += has_one;
    }
    if (below != bits.size()) {
        throw std::invalid_argument("thresholds must ascend, and differ in their upper 16 bits");
    }
    tree.fill(0x7fffffff);
    std::size_t place = 0;
    for (std::size_t half = num_magnitudes / 2; half > 0; half /= 2) {
        for (std::size_t i = half - 1; i < num_magnitudes - 1; i += 2 * half, ++place) {
            if (i < bits.size()) tree[place] = bits[i];
        }
    }
}

FourBitTable::FourBitTable(const std::vector<float>& magnitudes_,
                           const std::vector<float>& thresholds_) {
    const bool fits = magnitudes_.size() == magnitudes.size() &&
                      thresholds_.size() == thresholds.size() && thresholds_.front() > 0 &&
                      std::is_sorted(thresholds_.begin(), thresholds_.end());
    if (!fits) {
        throw std::invalid_argument("must have 8 magnitudes, and 7 positive, ascending thresholds");
    }
    std::copy(magnitudes_.begin(), magnitudes_.end(), magnitudes.begin());
    std::transform(thresholds_.begin(), thresholds_.end(), thresholds.begin(),
                   [](float threshold) { return std::bit_cast<std::int32_t>(threshold); });
}

}  // namespace paceline

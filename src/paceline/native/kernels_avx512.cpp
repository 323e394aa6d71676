// All kernels for AVX-512F.

#include "all_lanes.hpp"

namespace paceline {

extern const Kernels avx512_kernels;
const Kernels avx512_kernels = all_kernels;

}  // namespace paceline

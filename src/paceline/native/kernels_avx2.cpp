// All kernels for AVX2 and F16C.

#include "all_lanes.hpp"

namespace paceline {

extern const Kernels avx2_kernels;
const Kernels avx2_kernels = all_kernels;

}  // namespace paceline

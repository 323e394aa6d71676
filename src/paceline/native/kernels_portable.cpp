// All kernels for the instructions that every processor of its kind has, SSE2 or NEON.

#include "all_lanes.hpp"

namespace paceline {

extern const Kernels portable_kernels;
const Kernels portable_kernels = all_kernels;

}  // namespace paceline

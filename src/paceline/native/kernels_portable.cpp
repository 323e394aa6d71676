// All kernels for the instructions that every 64-bit x86 (SSE2) or ARM (NEON) processor has.

#include "all_lanes.hpp"

namespace paceline {

extern const Kernels portable_kernels;
const Kernels portable_kernels = all_kernels;

}  // namespace paceline

// The kernels of fully-connected layers for AVX-512.

#include "dense_plain.hpp"

namespace paceline {

extern const DenseKernels dense_avx512;
const DenseKernels dense_avx512 = dense_kernels;

}  // namespace paceline

// The kernels of fully-connected layers for AVX2.

#include "dense_plain.hpp"

namespace paceline {

extern const DenseKernels dense_avx2;
const DenseKernels dense_avx2 = dense_kernels;

}  // namespace paceline

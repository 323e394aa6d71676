// Choose the kernels that this processor can run.

#include "kernels.hpp"

#include <cstring>
#include <stdexcept>

#include <unistd.h>

#include "default_arithmetic.hpp"

namespace paceline {

extern const Kernels portable_kernels;
#if defined(PACELINE_X86_KERNELS)
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
extern const CodecKernels<Codebook> avx512_codec_kernels;

namespace {

// Use the AVX-512 kernels of 8-bit codes only with AVX512_VBMI2; otherwise use the AVX2 kernels.
Kernels with_codes(Kernels kernels) {
    const bool shifts_pairs = __builtin_cpu_supports("avx512vbmi2");
    kernels.eight_bit = shifts_pairs ? avx512_codec_kernels : avx2_kernels.eight_bit;
    return kernels;
}

}  // namespace
#endif

const std::vector<std::pair<std::string, const Kernels*>>& usable_kernels() {
    static const auto usable = [] {
        std::vector<std::pair<std::string, const Kernels*>> found{{"portable", &portable_kernels}};
#if defined(PACELINE_X86_KERNELS)
        __builtin_cpu_init();
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
            found.emplace_back("avx2", &avx2_kernels);
            if (__builtin_cpu_supports("avx512f")) {
                static const Kernels kernels = with_codes(avx512_kernels);
                found.emplace_back("avx512", &kernels);
            }
        }
#endif
        return found;
    }();
    return usable;
}

const Kernels& kernels_named(const std::string& name) {
    if (name == "fastest") return fastest_kernels();
    for (const auto& [known, kernels] : usable_kernels()) {
        if (name == known) return *kernels;
    }
    throw std::invalid_argument("this processor does not have the instruction set " + name);
}

const Kernels& fastest_kernels() {
    static const Kernels& fastest = *usable_kernels().back().second;
    return fastest;
}

void sum(const Kernels& kernels, DType dtype, const void* const* sources, std::size_t num_sources,
         double scale, void* result, std::size_t count, bool streaming) {
    const DefaultArithmetic arithmetic;
    const SumKernel kernel = kernels.sum[static_cast<std::size_t>(dtype)];
    kernel(sources, num_sources, scale, result, count, streaming);
}

void copy(const Kernels& kernels, void* target, const void* source, std::size_t nbytes) {
    if (nbytes > cache_nbytes()) {
        kernels.copy(target, source, nbytes);
    } else {
        std::memcpy(target, source, nbytes);
    }
}

std::size_t cache_nbytes() {
    static const std::size_t nbytes = [] {
        constexpr std::size_t typical = std::size_t{1} << 20;
#if defined(_SC_LEVEL2_CACHE_SIZE)
        const long found = sysconf(_SC_LEVEL2_CACHE_SIZE);
        if (found > 0) return static_cast<std::size_t>(found);
#endif
        return typical;
    }();
    return nbytes;
}

}  // namespace paceline

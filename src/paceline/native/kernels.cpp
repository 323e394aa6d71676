// Choose the kernels that this processor can run.

#include "kernels.hpp"

#include <cstring>
#include <stdexcept>
#include <utility>

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

const Kernels* kernels_of(InstructionSet set) {
    if (set == InstructionSet::portable) return &portable_kernels;
#if defined(PACELINE_X86_KERNELS)
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    if (set == InstructionSet::avx2 && has_avx2) return &avx2_kernels;
    if (set == InstructionSet::avx512 && has_avx2 && __builtin_cpu_supports("avx512f")) {
        static const Kernels kernels = with_codes(avx512_kernels);
        return &kernels;
    }
#endif
    return nullptr;
}

const Kernels& kernels_named(const std::string& name) {
    using Set = InstructionSet;
    const std::pair<const char*, Set> sets[] = {
        {"avx512", Set::avx512}, {"avx2", Set::avx2}, {"portable", Set::portable}};
    for (const auto& [known, set] : sets) {
        const Kernels* kernels = kernels_of(set);
        if ((name == known || name == "fastest") && kernels != nullptr) return *kernels;
    }
    throw std::invalid_argument("this processor does not have the instruction set " + name);
}

const Kernels& fastest_kernels() {
    static const Kernels& fastest = kernels_named("fastest");
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

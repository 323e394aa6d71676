// Which kernels this processor runs, and the portable ones.

#include "sum.hpp"

#include <cstring>
#include <stdexcept>
#include <utility>

#include <unistd.h>

#include "default_arithmetic.hpp"
#include "sum_lanes.hpp"

namespace paceline {

#if defined(PACELINE_X86_KERNELS)
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
#endif

namespace {

void copy_portable(void* target, const void* source, std::size_t nbytes) {
    std::memcpy(target, source, nbytes);
}

template <class Format>
constexpr SumKernel portable = &sum_all<PlainLanes<Format, 16>, PlainLanes<Format, 1>>;

constexpr Kernels portable_kernels = {
    {portable<Plain<float>>, portable<Plain<double>>, portable<BFloat16>, portable<Float16>},
    copy_portable,
};

}  // namespace

const Kernels* kernels_of(InstructionSet set) {
    if (set == InstructionSet::portable) return &portable_kernels;
#if defined(PACELINE_X86_KERNELS)
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    if (set == InstructionSet::avx2 && has_avx2) return &avx2_kernels;
    if (set == InstructionSet::avx512 && has_avx2 && __builtin_cpu_supports("avx512f")) {
        return &avx512_kernels;
    }
#endif
    return nullptr;
}

InstructionSet instruction_set_named(const std::string& name) {
    using Set = InstructionSet;
    const std::pair<const char*, Set> sets[] = {
        {"avx512", Set::avx512}, {"avx2", Set::avx2}, {"portable", Set::portable}};
    for (const auto& [known, set] : sets) {
        if ((name == known || name == "fastest") && kernels_of(set) != nullptr) return set;
    }
    throw std::invalid_argument("this processor has no such instruction set");
}

const Kernels& fastest_kernels() {
    static const Kernels& fastest = *kernels_of(instruction_set_named("fastest"));
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

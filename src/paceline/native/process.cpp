// Functions that Python's standard library lacks: end with the parent, list instruction sets.

#include <cerrno>
#include <csignal>
#include <string>
#include <system_error>
#include <vector>

#include <sys/prctl.h>
#include <unistd.h>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;

namespace {

// Let the kernel end a worker, because a launcher that is killed by SIGKILL cannot do so.
void die_with_parent(int parent_pid) {
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) {
        throw std::system_error(errno, std::generic_category(), "prctl(PR_SET_PDEATHSIG)");
    }
    // If the parent ended before prctl was called, the kernel sends no signal.
    if (getppid() != parent_pid) {
        raise(SIGKILL);
    }
}

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
#if defined(PACELINE_X86_KERNELS)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) names.emplace_back("avx2");
    if (__builtin_cpu_supports("fma")) names.emplace_back("fma");
    if (__builtin_cpu_supports("avx512f")) names.emplace_back("avx512f");
    if (__builtin_cpu_supports("avx512bw")) names.emplace_back("avx512bw");
#endif
    return names;
}

}  // namespace

void bind_process(nb::module_& m) {
    m.def("die_with_parent", &die_with_parent, nb::arg("parent_pid"),
          "Ask the kernel to kill this process with SIGKILL when its parent ends.");
    m.def("instruction_sets", &instruction_sets,
          "Return the instruction sets of this processor that kernels may use, narrowest first.");
}

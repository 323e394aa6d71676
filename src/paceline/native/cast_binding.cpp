// Casts to 16-bit types, for Python.

#include <cstdint>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include "cast.hpp"

namespace nb = nanobind;

namespace {

using namespace paceline;

template <class T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::size_t cast_into(const Array<std::uint8_t>& rounded, const Array<float>& values, DType dtype,
                      std::size_t num_threads, const std::string& instruction_set) {
    const bool is_aligned = reinterpret_cast<std::uintptr_t>(rounded.data()) % 2 == 0;
    if (rounded.size() != 2 * values.size() || !is_aligned) {
        throw nb::value_error("two aligned bytes are needed for each value");
    }
    const InstructionSet set = instruction_set_named(instruction_set);
    const nb::gil_scoped_release released;
    auto* target = reinterpret_cast<std::uint16_t*>(rounded.data());
    return cast(set, dtype, values.data(), values.size(), target, num_threads);
}

}  // namespace

void bind_cast(nb::module_& m) {
    m.def("cast_into", &cast_into, nb::arg("rounded"), nb::arg("values"), nb::arg("dtype"),
          nb::arg("num_threads"), nb::arg("instruction_set") = "fastest",
          "Round float32 values to a 16-bit type, and return how many are not finite in it.");
}

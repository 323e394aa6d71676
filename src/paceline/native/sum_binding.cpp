// Python bindings of sums of arrays, and the names of instruction sets.

#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "kernels.hpp"

namespace nb = nanobind;

namespace {

using paceline::DType;
using Array = nb::ndarray<nb::pytorch, nb::device::cpu, nb::c_contig>;

DType dtype_of(const Array& array) {
    if (array.dtype() == nb::dtype<float>()) return DType::float32;
    if (array.dtype() == nb::dtype<double>()) return DType::float64;
    const auto code = static_cast<nb::dlpack::dtype_code>(array.dtype().code);
    if (array.dtype().bits == 16 && code == nb::dlpack::dtype_code::Bfloat) return DType::bfloat16;
    if (array.dtype().bits == 16 && code == nb::dlpack::dtype_code::Float) return DType::float16;
    throw nb::type_error("result and sources must be float32, float64, bfloat16 or float16");
}

void sum_into(const Array& result, const std::vector<Array>& sources, double scale,
              const std::string& instruction_set, bool streaming) {
    const paceline::Kernels& kernels = paceline::kernels_named(instruction_set);
    const DType dtype = dtype_of(result);
    if (sources.empty()) throw nb::value_error("sources must not be empty");
    std::vector<const void*> addresses;
    for (const Array& source : sources) {
        if (dtype_of(source) != dtype || source.size() != result.size()) {
            throw nb::value_error("sources must have the type and size of result");
        }
        addresses.push_back(source.data());
    }
    const nb::gil_scoped_release released;
    paceline::sum(kernels, dtype, addresses.data(), addresses.size(), scale, result.data(),
                  result.size(), streaming);
}

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
    for (const auto& [name, kernels] : paceline::usable_kernels()) names.push_back(name);
    return names;
}

}  // namespace

void bind_sum(nb::module_& m) {
    nb::enum_<DType>(m, "DType")
        .value("FLOAT32", DType::float32)
        .value("FLOAT64", DType::float64)
        .value("BFLOAT16", DType::bfloat16)
        .value("FLOAT16", DType::float16);
    m.def("sum_into", &sum_into, nb::arg("result"), nb::arg("sources"), nb::arg("scale") = 1.0,
          nb::arg("instruction_set") = "fastest", nb::arg("streaming") = false,
          "Write (((s0 + s1) + s2) + ...) * scale to `result`; 16-bit types are added as float32.");
    m.def("instruction_sets", &instruction_sets,
          "Return the instruction sets of which this processor can run kernels, narrowest first.");
}

// Python bindings of casts and codes. They check sizes; the C++ functions that they call do not.

#include <cstdint>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "blocks.hpp"

namespace nb = nanobind;

namespace {

using namespace paceline;

template <class T>
using Array = nb::ndarray<nb::pytorch, T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = Array<float>;
using Codes = Array<std::uint8_t>;

std::size_t cast_into(const Codes& rounded, const Floats& values, DType dtype,
                      std::size_t num_threads, const std::string& instruction_set) {
    const bool is_aligned = reinterpret_cast<std::uintptr_t>(rounded.data()) % 2 == 0;
    if (rounded.size() != 2 * values.size() || !is_aligned) {
        throw nb::value_error("rounded must have two bytes, aligned, for each value");
    }
    const Kernels& kernels = kernels_named(instruction_set);
    const nb::gil_scoped_release released;
    auto* target = reinterpret_cast<std::uint16_t*>(rounded.data());
    return cast(kernels, dtype, values.data(), values.size(), target, num_threads);
}

template <class Table>
Blocks blocks_of(const Floats& values, const Codes& codes, const Floats& scales,
                 std::size_t block_size) {
    if (block_size == 0) throw nb::value_error("block_size must be at least 1");
    constexpr std::size_t per_byte = Table::values_per_byte;
    const Blocks blocks{values.size(), block_size};
    // A byte must not contain codes of two blocks.
    if (block_size % per_byte != 0 && blocks.num() > 1) {
        throw nb::value_error("block_size must be even for a 4-bit type");
    }
    const std::size_t num_bytes = (values.size() + per_byte - 1) / per_byte;
    if (codes.size() != num_bytes || scales.size() != blocks.num()) {
        throw nb::value_error("values, codes and scales must have matching sizes");
    }
    return blocks;
}

template <class Table>
std::size_t encode_into(const Table& table, const Codes& codes, const Floats& scales,
                        const Floats& values, std::size_t block_size, bool finds_scales,
                        std::size_t num_threads, const std::string& instruction_set) {
    const Blocks blocks = blocks_of<Table>(values, codes, scales, block_size);
    const Kernels& kernels = kernels_named(instruction_set);
    const nb::gil_scoped_release released;
    return encode(kernels, table, blocks, values.data(), scales.data(), finds_scales, codes.data(),
                  num_threads);
}

template <class Table>
void decode_into(const Table& table, const Floats& values, const Codes& codes, const Floats& scales,
                 std::size_t block_size, bool adds, std::size_t num_threads,
                 const std::string& instruction_set) {
    const Blocks blocks = blocks_of<Table>(values, codes, scales, block_size);
    const Kernels& kernels = kernels_named(instruction_set);
    const nb::gil_scoped_release released;
    decode(kernels, table, blocks, codes.data(), scales.data(), values.data(), adds, num_threads);
}

template <class Table>
void bind_table(nb::module_& m, const char* name) {
    nb::class_<Table>(m, name)
        .def(nb::init<const std::vector<float>&, const std::vector<float>&>(),
             nb::arg("magnitudes"), nb::arg("thresholds"))
        .def("encode_into", &encode_into<Table>, nb::arg("codes"), nb::arg("scales"),
             nb::arg("values"), nb::arg("block_size"), nb::arg("finds_scales"),
             nb::arg("num_threads"), nb::arg("instruction_set") = "fastest",
             "Encode float32 values into `codes`; return the number of non-finite values.")
        .def("decode_into", &decode_into<Table>, nb::arg("values"), nb::arg("codes"),
             nb::arg("scales"), nb::arg("block_size"), nb::arg("adds"), nb::arg("num_threads"),
             nb::arg("instruction_set") = "fastest",
             "Decode `codes`: overwrite `values` (float32), or add to `values` if `adds`.");
}

}  // namespace

void bind_codec(nb::module_& m) {
    m.def("cast_into", &cast_into, nb::arg("rounded"), nb::arg("values"), nb::arg("dtype"),
          nb::arg("num_threads"), nb::arg("instruction_set") = "fastest",
          "Round float32 values to 16 bits; return how many are not finite after rounding.");
    bind_table<Codebook>(m, "Codebook");
    bind_table<FourBitTable>(m, "FourBitTable");
}

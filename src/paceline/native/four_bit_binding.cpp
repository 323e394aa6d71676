// The 4-bit kernels, for Python. Sizes are checked here: what lies below trusts its caller.

#include <cstdint>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "blocks.hpp"
#include "four_bit.hpp"

namespace nb = nanobind;

namespace {

using namespace paceline;

template <class T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = Array<float>;
using Codes = Array<std::uint8_t>;

Blocks blocks_of(const Floats& values, const Codes& codes, const Floats& scales,
                 std::size_t block_size) {
    const std::size_t count = values.size();
    if (block_size == 0) throw nb::value_error("a block has at least one value");
    const std::size_t num_blocks = (count + block_size - 1) / block_size;
    // The halves of a byte would be those of two blocks.
    if (block_size % 2 != 0 && num_blocks > 1) {
        throw nb::value_error("a block has an even number of values");
    }
    if (codes.size() != (count + 1) / 2 || scales.size() != num_blocks) {
        throw nb::value_error("values, codes and scales do not fit together");
    }
    return {count, block_size};
}

std::size_t encode_four_bit_into(const Codes& codes, const Floats& scales, const Floats& values,
                                 std::size_t block_size, const FourBitTable& table,
                                 std::size_t num_threads, const std::string& instruction_set) {
    const Blocks blocks = blocks_of(values, codes, scales, block_size);
    const InstructionSet set = instruction_set_named(instruction_set);
    const nb::gil_scoped_release released;
    return encode_four_bit(set, table, blocks, values.data(), scales.data(), codes.data(),
                           num_threads);
}

void decode_four_bit_into(const Floats& values, const Codes& codes, const Floats& scales,
                          std::size_t block_size, const FourBitTable& table, bool adds,
                          std::size_t num_threads, const std::string& instruction_set) {
    const Blocks blocks = blocks_of(values, codes, scales, block_size);
    const InstructionSet set = instruction_set_named(instruction_set);
    const nb::gil_scoped_release released;
    decode_four_bit(set, table, blocks, codes.data(), scales.data(), values.data(), adds,
                    num_threads);
}

}  // namespace

void bind_four_bit(nb::module_& m) {
    nb::class_<FourBitTable>(m, "FourBitTable")
        .def(nb::init<const std::vector<float>&, const std::vector<float>&>(),
             nb::arg("magnitudes"), nb::arg("thresholds"));
    m.def("encode_four_bit_into", &encode_four_bit_into, nb::arg("codes"), nb::arg("scales"),
          nb::arg("values"), nb::arg("block_size"), nb::arg("table"), nb::arg("num_threads"),
          nb::arg("instruction_set") = "fastest",
          "Encode float32 values, two a byte, and return how many are not finite.");
    m.def("decode_four_bit_into", &decode_four_bit_into, nb::arg("values"), nb::arg("codes"),
          nb::arg("scales"), nb::arg("block_size"), nb::arg("table"), nb::arg("adds"),
          nb::arg("num_threads"), nb::arg("instruction_set") = "fastest",
          "Write, or add, the values of the codes to float32 values.");
}

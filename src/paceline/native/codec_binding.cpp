// The codec kernels, for Python. Sizes are checked here: what lies below trusts its caller.

#include <cstdint>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "blocks.hpp"
#include "codec.hpp"

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
    if (codes.size() != count || scales.size() != (count + block_size - 1) / block_size) {
        throw nb::value_error("values, codes and scales do not fit together");
    }
    return {count, block_size};
}

std::size_t encode_into(const Codes& codes, const Floats& scales, const Floats& values,
                        std::size_t block_size, const Codebook& book, bool finds_scales,
                        std::size_t num_threads, const std::string& instruction_set) {
    const Blocks blocks = blocks_of(values, codes, scales, block_size);
    const CodecKernels& kernels = *codec_kernels_of(instruction_set_named(instruction_set));
    const nb::gil_scoped_release released;
    return encode(kernels, book, blocks, values.data(), scales.data(), finds_scales, codes.data(),
                  num_threads);
}

void decode_into(const Floats& values, const Codes& codes, const Floats& scales,
                 std::size_t block_size, const Codebook& book, bool adds, std::size_t num_threads,
                 const std::string& instruction_set) {
    const Blocks blocks = blocks_of(values, codes, scales, block_size);
    const CodecKernels& kernels = *codec_kernels_of(instruction_set_named(instruction_set));
    const nb::gil_scoped_release released;
    decode(kernels, book, blocks, codes.data(), scales.data(), values.data(), adds, num_threads);
}

}  // namespace

void bind_codec(nb::module_& m) {
    nb::class_<Codebook>(m, "Codebook")
        .def(nb::init<const std::vector<float>&, const std::vector<float>&>(),
             nb::arg("magnitudes"), nb::arg("thresholds"));
    m.def("encode_into", &encode_into, nb::arg("codes"), nb::arg("scales"), nb::arg("values"),
          nb::arg("block_size"), nb::arg("book"), nb::arg("finds_scales"), nb::arg("num_threads"),
          nb::arg("instruction_set") = "fastest",
          "Encode float32 values, and return how many are not finite.");
    m.def("decode_into", &decode_into, nb::arg("values"), nb::arg("codes"), nb::arg("scales"),
          nb::arg("block_size"), nb::arg("book"), nb::arg("adds"), nb::arg("num_threads"),
          nb::arg("instruction_set") = "fastest",
          "Write, or add, the values of the codes to float32 values.");
}

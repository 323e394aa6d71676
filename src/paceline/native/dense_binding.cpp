// Python binding of chains of fully-connected layers, which checks sizes.

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "dense.hpp"

namespace nb = nanobind;

namespace {

using namespace paceline;

template <class T, int num_dimensions>
using Array = nb::ndarray<nb::pytorch, T, nb::ndim<num_dimensions>, nb::c_contig, nb::device::cpu>;
using Matrix = Array<float, 2>;
using Vector = Array<float, 1>;
using Integers = Array<std::int64_t, 1>;
using Layer = std::tuple<Matrix, std::optional<Vector>, std::optional<Matrix>,
                         std::optional<Vector>, Activation>;

DenseLayer layer_of(const Layer& given) {
    const auto& [weight, bias, weight_momentum, bias_momentum, activation] = given;
    const std::size_t outputs = weight.shape(0), inputs = weight.shape(1);
    const bool fits = (!bias || bias->size() == outputs) &&
                      (!weight_momentum || (weight_momentum->shape(0) == outputs &&
                                            weight_momentum->shape(1) == inputs)) &&
                      (!bias_momentum || bias_momentum->size() == outputs);
    if (!fits) throw nb::value_error("bias and momenta must match the shape of the layer's weight");
    return {weight.data(),
            bias ? bias->data() : nullptr,
            weight_momentum ? weight_momentum->data() : nullptr,
            bias_momentum ? bias_momentum->data() : nullptr,
            inputs,
            outputs,
            activation};
}

// A chain, with references that keep its tensors alive.
class Chain {
public:
    Chain(std::vector<Layer> layers, Matrix inputs, Integers classes)
        : layers_(std::move(layers)),
          inputs_(std::move(inputs)),
          classes_(std::move(classes)),
          chain_(all_of(layers_), inputs_.data(), classes_.data(), inputs_.shape(0)) {
        if (classes_.size() != inputs_.shape(0)) {
            throw nb::value_error("classes must have one class for each sample");
        }
        if (std::get<0>(layers_.front()).shape(1) != inputs_.shape(1)) {
            throw nb::value_error("the first layer's inputs must match the size of a sample");
        }
    }

    double forward(const Integers& rows) {
        const nb::gil_scoped_release released;
        return chain_.forward(rows.data(), rows.size());
    }

    void backward() {
        const nb::gil_scoped_release released;
        chain_.backward();
    }

    void step(float rate, float momentum) {
        const nb::gil_scoped_release released;
        chain_.step(rate, momentum);
    }

private:
    static std::vector<DenseLayer> all_of(const std::vector<Layer>& layers) {
        std::vector<DenseLayer> found;
        for (const Layer& layer : layers) found.push_back(layer_of(layer));
        return found;
    }

    std::vector<Layer> layers_;
    Matrix inputs_;
    Integers classes_;
    DenseChain chain_;
};

}  // namespace

void bind_dense(nb::module_& m) {
    nb::enum_<Activation>(m, "Activation")
        .value("NONE", Activation::none)
        .value("RELU", Activation::relu)
        .value("SIGMOID", Activation::sigmoid);
    nb::class_<Chain>(m, "DenseChain")
        .def(nb::init<std::vector<Layer>, Matrix, Integers>(), nb::arg("layers"),
             nb::arg("inputs"), nb::arg("classes"))
        .def("forward", &Chain::forward, nb::arg("rows"),
             "Return the mean cross entropy of the samples `rows`; NaN for values out of range.")
        .def("backward", &Chain::backward, "Compute the gradients of the last batch.")
        .def("step", &Chain::step, nb::arg("rate"), nb::arg("momentum"),
             "Update the weights in place with the last batch's gradients, without locks.");
}

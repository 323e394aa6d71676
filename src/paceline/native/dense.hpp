// Training of a chain of fully-connected layers on a few samples at a time, without locks.
//
// The arithmetic is torch's, with another order of summation. For a small batch, torch spends most
// of the time not in arithmetic, but in some sixty calls of Python and the dispatcher, which hold
// the GIL. Several threads and processes read and write the same weights concurrently (Hogwild): a
// thread that reads a weight during a write gets the old or the new value.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace paceline {

enum class Activation : std::uint32_t { none, relu, sigmoid };

// A layer, whose `weight` (outputs, inputs) and `bias` (outputs) are updated in place. The momenta
// have the same shapes. A layer without bias or without momentum has a nullptr instead.
struct DenseLayer {
    float* weight;
    float* bias;
    float* weight_momentum;
    float* bias_momentum;
    std::size_t inputs;
    std::size_t outputs;
    Activation activation;
};

// Kernels for `count` samples. x, x_gradient: (count, inputs); y, y_gradient: (count, outputs).
struct DenseKernels {
    // y = x W^T + b, before the activation.
    void (*forward)(const DenseLayer& layer, const float* x, std::size_t count, float* y);
    // x_gradient = y_gradient W.
    void (*backward)(const DenseLayer& layer, const float* y_gradient, std::size_t count,
                     float* x_gradient);
    // W -= rate * (y_gradient^T x), or with momentum m: m = momentum * m + y_gradient^T x, and
    // W -= rate * m. Likewise for the bias. `row`: temporary memory for `inputs` values.
    void (*step)(const DenseLayer& layer, const float* x, const float* y_gradient,
                 std::size_t count, float rate, float momentum, float* row);
};

// A chain of layers, its training samples, and the values and gradients of one thread's batch.
class DenseChain {
public:
    // `inputs` (num_samples, inputs of the first layer) and `classes` (num_samples) are not copied.
    // Throws std::invalid_argument if a layer's inputs differ in number from the previous outputs.
    DenseChain(std::vector<DenseLayer> layers, const float* inputs, const std::int64_t* classes,
               std::size_t num_samples);

    // Return the mean cross entropy of the samples with indices `rows`. Return NaN if an index or a
    // class is out of range, or if an input or an output of a layer is not finite.
    double forward(const std::int64_t* rows, std::size_t count);

    // Compute the gradients of the outputs of all layers, after `forward`.
    void backward();

    // Update the weights with the gradients of the last batch, after `backward`.
    void step(float rate, float momentum);

private:
    bool activate(const DenseLayer& layer, float* values) const;
    double loss(const std::int64_t* rows);

    std::vector<DenseLayer> layers_;
    const float* inputs_;
    const std::int64_t* classes_;
    std::size_t num_samples_;
    std::size_t count_ = 0;
    // values_[0]: inputs of the first layer; values_[i + 1]: outputs of layer i; gradients_[i]:
    // gradients of these outputs.
    std::vector<std::vector<float>> values_, gradients_;
    std::vector<float> row_;
};

}  // namespace paceline

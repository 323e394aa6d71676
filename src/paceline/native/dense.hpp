// Training of a chain of fully-connected layers on a few samples at a time, without locks.
//
// The same arithmetic as torch's, in another order of summation. What costs a small batch most in
// torch is not arithmetic but the way to it: some sixty calls of Python and of the dispatcher, all
// of them under the GIL. Several threads, and processes, read and write the same weights meanwhile
// (Hogwild): a value that is read while it is written is the old or the new one.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace paceline {

enum class Activation : std::uint32_t { none, relu, sigmoid };

// `weight` (outputs, inputs) and `bias` (outputs) are updated in place; their momenta have the same
// shapes. A bias or a momentum that there is not is a nullptr.
struct DenseLayer {
    float* weight;
    float* bias;
    float* weight_momentum;
    float* bias_momentum;
    std::size_t inputs;
    std::size_t outputs;
    Activation activation;
};

// Kernels on `count` samples: their inputs x (count, inputs), and for each output a value or a
// gradient (count, outputs).
struct DenseKernels {
    // y = x W^T + b, before the activation.
    void (*forward)(const DenseLayer& layer, const float* x, std::size_t count, float* y);
    // x_gradient = y_gradient W.
    void (*backward)(const DenseLayer& layer, const float* y_gradient, std::size_t count,
                     float* x_gradient);
    // W -= rate * (y_gradient^T x), or rate times the momentum; and the same of the bias. `row` has
    // room for `inputs` values.
    void (*step)(const DenseLayer& layer, const float* x, const float* y_gradient,
                 std::size_t count, float rate, float momentum, float* row);
};

// The layers, the samples that they are trained on, and one thread's batch in work.
class DenseChain {
public:
    // `inputs` (num_samples, inputs of the first layer) and `classes` (num_samples) are not copied.
    // Throws std::invalid_argument if a layer does not take what the one before it gives.
    DenseChain(std::vector<DenseLayer> layers, const float* inputs, const std::int64_t* classes,
               std::size_t num_samples);

    // The mean cross entropy of these samples. NaN if a row, a class or any value on the way is out
    // of range; nothing was changed then.
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
    // The input of the first layer, then the outputs of each; and the gradients of these outputs.
    std::vector<std::vector<float>> values_, gradients_;
    std::vector<float> row_;
};

}  // namespace paceline

#include "dense.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>

#include "kernels.hpp"

namespace paceline {

DenseChain::DenseChain(std::vector<DenseLayer> layers, const float* inputs,
                       const std::int64_t* classes, std::size_t num_samples)
    : layers_(std::move(layers)),
      inputs_(inputs),
      classes_(classes),
      num_samples_(num_samples),
      values_(layers_.size() + 1),
      gradients_(layers_.size()) {
    if (layers_.empty()) throw std::invalid_argument("layers must have at least one layer");
    for (std::size_t i = 0; i + 1 < layers_.size(); ++i) {
        if (layers_[i].outputs != layers_[i + 1].inputs) {
            throw std::invalid_argument("a layer must have as many inputs as the previous outputs");
        }
    }
}

// Apply the activation; return false if a value is not finite.
bool DenseChain::activate(const DenseLayer& layer, float* values) const {
    const std::size_t size = count_ * layer.outputs;
    // The sum of x - x is NaN if any x is not finite; otherwise, it is zero.
    float differences = 0;
    for (std::size_t i = 0; i < size; ++i) differences += values[i] - values[i];
    if (differences != 0) return false;
    switch (layer.activation) {
        case Activation::relu:
            for (std::size_t i = 0; i < size; ++i) values[i] = values[i] > 0 ? values[i] : 0.0f;
            break;
        case Activation::sigmoid:
            for (std::size_t i = 0; i < size; ++i) values[i] = 1 / (1 + std::exp(-values[i]));
            break;
        case Activation::none:
            break;
    }
    return true;
}

// Return the mean cross entropy of the last layer's outputs; write their gradients to `gradients_`.
double DenseChain::loss(const std::int64_t* rows) {
    const std::size_t outputs = layers_.back().outputs;
    double sum = 0;
    for (std::size_t s = 0; s < count_; ++s) {
        const float* scores = values_.back().data() + s * outputs;
        float* gradient = gradients_.back().data() + s * outputs;
        const float most = *std::max_element(scores, scores + outputs);
        float total = 0;
        for (std::size_t o = 0; o < outputs; ++o) total += gradient[o] = std::exp(scores[o] - most);
        const auto right = static_cast<std::size_t>(classes_[rows[s]]);
        sum += std::log(total) - (scores[right] - most);
        const float share = 1.0f / (total * static_cast<float>(count_));
        for (std::size_t o = 0; o < outputs; ++o) gradient[o] *= share;
        gradient[right] -= 1.0f / static_cast<float>(count_);
    }
    return sum / static_cast<double>(count_);
}

double DenseChain::forward(const std::int64_t* rows, std::size_t count) {
    constexpr double none = std::numeric_limits<double>::quiet_NaN();
    const DenseKernels& kernels = fastest_kernels().dense;
    const auto num_classes = static_cast<std::int64_t>(layers_.back().outputs);
    const std::size_t features = layers_.front().inputs;
    count_ = count;
    values_[0].resize(count * features);
    float differences = 0;
    for (std::size_t s = 0; s < count; ++s) {
        if (rows[s] < 0 || static_cast<std::size_t>(rows[s]) >= num_samples_) return none;
        if (classes_[rows[s]] < 0 || classes_[rows[s]] >= num_classes) return none;
        const float* sample = inputs_ + static_cast<std::size_t>(rows[s]) * features;
        std::copy(sample, sample + features, values_[0].data() + s * features);
        for (std::size_t i = 0; i < features; ++i) differences += sample[i] - sample[i];
    }
    if (count == 0 || differences != 0) return none;
    for (std::size_t i = 0; i < layers_.size(); ++i) {
        values_[i + 1].resize(count * layers_[i].outputs);
        gradients_[i].resize(count * layers_[i].outputs);
        kernels.forward(layers_[i], values_[i].data(), count, values_[i + 1].data());
        if (!activate(layers_[i], values_[i + 1].data())) return none;
    }
    return loss(rows);
}

void DenseChain::backward() {
    const DenseKernels& kernels = fastest_kernels().dense;
    for (std::size_t i = layers_.size() - 1; i > 0; --i) {
        std::vector<float>& gradients = gradients_[i - 1];
        const std::vector<float>& values = values_[i];
        kernels.backward(layers_[i], gradients_[i].data(), count_, gradients.data());
        if (layers_[i - 1].activation == Activation::relu) {
            for (std::size_t j = 0; j < gradients.size(); ++j) {
                if (!(values[j] > 0)) gradients[j] = 0;
            }
        } else if (layers_[i - 1].activation == Activation::sigmoid) {
            for (std::size_t j = 0; j < gradients.size(); ++j) {
                gradients[j] *= (1 - values[j]) * values[j];
            }
        }
    }
}

void DenseChain::step(float rate, float momentum) {
    const DenseKernels& kernels = fastest_kernels().dense;
    for (std::size_t i = 0; i < layers_.size(); ++i) {
        row_.resize(std::max(row_.size(), layers_[i].inputs));
        kernels.step(layers_[i], values_[i].data(), gradients_[i].data(), count_, rate, momentum,
                     row_.data());
    }
}

}  // namespace paceline
